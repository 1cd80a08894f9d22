"""The quantizer that does not quantize."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ANY, Capabilities, ComponentConfig
from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import DType, KVSpec, Region
from kvserve_core.stages import Quantizer
from kvserve_core.tensor import TORCH, Part, Quantized
from kvserve_plugins.kernels.bits import bytes_of, from_bytes
from kvserve_plugins.kernels.shapes import shape_of


class Identity(Quantizer):
    """Hands the plane's own bytes to the codec; exact.

    One stream of bytes in the order L, H, T, D, little-endian. It takes the plane's own dtype only, never the f32 of
    a lossy transform: a lossless chain is lossless, and not larger than the plane.
    """

    class Config(ComponentConfig):
        """Nothing to set."""

    config: Config
    caps = Capabilities(
        exact=True,
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        dtypes=frozenset(DType),
        head_local=True,
        layer_local=True,
    )

    _dtype: torch.dtype

    def bind(self, at: Region, spec: KVSpec, device: torch.device, artefacts: Artefacts) -> Self:
        """Note the plane's dtype."""
        bound = super().bind(at, spec, device, artefacts)
        bound._dtype = TORCH[spec.group(at.group).plane(at.plane).dtype]
        return bound

    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` of the plane's dtype to one stream of bytes.

        Raises:
            UnsupportedSpecError: another dtype.
        """
        check_native(x, self._dtype, "identity")
        return Quantized((Part(bytes_of(x), 256, x.shape[0] * x.shape[1]),), {}, shape_of(x))

    def decode(self, q: Quantized, at: Region) -> Tensor:
        """The tensor again, bit for bit."""
        return from_bytes(q.parts[0].codes, self._dtype).view(q.shape)


def check_native(x: Tensor, native: torch.dtype, name: str) -> None:
    """An exact quantizer behind a lossy transform would pass f32 off as lossless."""
    if x.dtype != native:
        raise UnsupportedSpecError(
            f"quantizer {name!r} is exact and takes the plane's own dtype {native}, not {x.dtype};"
            " remove the lossy transform before it or use a lossy quantizer"
        )
