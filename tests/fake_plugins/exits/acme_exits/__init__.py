"""A script that was declared as a plugin: it ends the process when imported."""

import sys

sys.exit("usage: acme")
