"""What the exact quantizers share: they take the plane's own dtype, and no other."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import KVSpec, Region
from kvserve_core.stages import Quantizer
from kvserve_core.tensor import TORCH


class NativeQuantizer(Quantizer):
    """A quantizer that knows its plane's dtype once it is bound."""

    _dtype: torch.dtype

    def bind(self, at: Region, spec: KVSpec, device: torch.device, artefacts: Artefacts) -> Self:
        """Note the plane's dtype."""
        bound = super().bind(at, spec, device, artefacts)
        bound._dtype = TORCH[spec.group(at.group).plane(at.plane).dtype]
        return bound

    def _require_native(self, x: Tensor) -> None:
        """An exact quantizer behind a lossy transform would pass f32 off as lossless."""
        if x.dtype != self._dtype:
            raise UnsupportedSpecError(
                f"quantizer {type(self).__name__.lower()!r} is exact and takes the plane's own dtype {self._dtype}, not"
                f" {x.dtype}; remove the lossy transform before it or use a lossy quantizer"
            )
