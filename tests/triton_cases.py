"""Where the kernels run: on a GPU where there is one, else in Triton's interpreter (see ``conftest.py``)."""

from __future__ import annotations

import torch

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
