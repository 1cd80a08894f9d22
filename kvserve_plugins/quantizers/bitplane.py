"""Lossless split of floats into streams that an entropy coder can tell apart."""

from __future__ import annotations

from torch import Tensor

from kvserve_core.component import ANY, Capabilities, ComponentConfig
from kvserve_core.spec import Region
from kvserve_core.tensor import Part, Quantized
from kvserve_plugins.kernels.bits import byte_planes, join_planes
from kvserve_plugins.kernels.shapes import shape_of
from kvserve_plugins.quantizers._native import NativeQuantizer


class Bitplane(NativeQuantizer):
    """Splits floats into an exponent stream and mantissa streams that carry the sign; exact.

    Each value is rotated left by one bit and cut into bytes, most significant first, one stream a byte:

    ====  ==========================  =======================================
    bf16  8 exponent bits             7 mantissa bits, sign
    f16   5 exponent, 3 mantissa bits 7 mantissa bits, sign
    f32   8 exponent bits             8, 8 and 7 mantissa bits, sign
    ====  ==========================  =======================================

    Every bit pattern survives: NaN payloads, -0, subnormals. See ZipNN, arXiv 2411.05239.
    """

    class Config(ComponentConfig):
        """Nothing to set."""

    config: Config
    caps = Capabilities(
        exact=True,
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        head_local=True,
        layer_local=True,
    )

    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` of the plane's dtype to one u8 stream per byte of it.

        Raises:
            UnsupportedSpecError: another dtype.
        """
        self._require_native(x)
        rows = x.shape[0] * x.shape[1]
        return Quantized(tuple(Part(plane, 256, rows) for plane in byte_planes(x)), {}, shape_of(x))

    def decode(self, q: Quantized, at: Region) -> Tensor:
        """The tensor again, bit for bit."""
        return join_planes([part.codes for part in q.parts], self._dtype).view(q.shape)
