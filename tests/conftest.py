"""One thread for torch: tests share cores, and oversubscription makes small kernels many times slower."""

from __future__ import annotations

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("kvserve", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("kvserve")
