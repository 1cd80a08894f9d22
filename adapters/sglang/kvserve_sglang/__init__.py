"""kvserve in SGLang: a compressed transfer backend for PD disaggregation, loaded as a plugin of a stock SGLang."""
