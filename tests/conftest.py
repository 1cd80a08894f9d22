"""One thread for torch: tests share cores, and oversubscription makes small kernels many times slower."""

from __future__ import annotations

import os

import hypothesis
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: kernels then run on the CPU
hypothesis.settings.register_profile("kvserve", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("kvserve")
