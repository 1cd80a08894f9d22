"""The quantizer that does not quantize."""

from __future__ import annotations

from torch import Tensor

from kvserve_core.component import ANY, Capabilities, ComponentConfig
from kvserve_core.spec import DType, Region
from kvserve_core.tensor import Part, Quantized
from kvserve_plugins.kernels.bits import bytes_of, from_bytes
from kvserve_plugins.kernels.shapes import shape_of
from kvserve_plugins.quantizers._native import NativeQuantizer


class Identity(NativeQuantizer):
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

    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` of the plane's dtype to one stream of bytes.

        Raises:
            UnsupportedSpecError: another dtype.
        """
        self._require_native(x)
        return Quantized((Part(bytes_of(x), 256, x.shape[0] * x.shape[1]),), {}, shape_of(x))

    def decode(self, q: Quantized, at: Region) -> Tensor:
        """The tensor again, bit for bit."""
        return from_bytes(q.parts[0].codes, self._dtype).view(q.shape)
