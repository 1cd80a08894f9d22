"""Eight-bit floats with a scale."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from kvserve_core.component import ANY, Capabilities, ComponentConfig, Tunable
from kvserve_core.spec import Region
from kvserve_core.stages import Quantizer
from kvserve_core.tensor import Part, Quantized
from kvserve_plugins.kernels.norms import bf16_up, largest_magnitude
from kvserve_plugins.kernels.shapes import reduced, require_shape, shape_of

Axis = Literal["token_head", "channel"]
AXES: dict[Axis, tuple[int, ...]] = {"token_head": (3,), "channel": (2,)}
LARGEST = 448.0


class FP8(Quantizer):
    """Casts to 8-bit floats (e4m3), scaled so that the largest value of a group just fits.

    ``scale = max |x| / 448``, rounded up to bf16, so that nothing saturates; groups are a head and token
    (``token_head``) or a head and channel over the segment (``channel``). One stream of the bit patterns of e4m3fn in
    the order L, H, T, D and one parameter, ``scale``. Casts without a scale, as serving code has them, clip all beyond
    448 without a word.

    For a value x of a group with scale s: ``|x - x'| <= max(|x| / 16, s * 2^-10)`` to f32 rounding.
    """

    class Config(ComponentConfig):
        """axis: which values share a scale."""

        axis: Axis = Tunable("token_head", choices=tuple(AXES))

    config: Config
    caps = Capabilities(
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        head_local=True,
        layer_local=True,
        max_alphabet=256,
    )

    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` finite floats to e4m3 bit patterns.

        Raises:
            NonFiniteError: NaN or Inf, on a CPU.
        """
        wide, shape = x.to(torch.float32), shape_of(x)
        scale = bf16_up(largest_magnitude(wide, AXES[self.config.axis]) / LARGEST)
        scaled = (wide / scale.to(torch.float32)).clamp_(-LARGEST, LARGEST)
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        return Quantized((Part(codes.reshape(-1), 256, shape[0] * shape[1]),), {"scale": scale}, shape)

    def decode(self, q: Quantized, at: Region) -> Tensor:
        """``[L, H, T, D]`` in f32, through a table: it needs no fp8 support.

        Raises:
            FrameError: ``scale`` of another shape.
        """
        require_shape(q.params, ("scale",), reduced(q.shape, AXES[self.config.axis]), at)
        scale = q.params["scale"]
        codes = q.parts[0].codes.view(q.shape)
        return values(codes.device).take(codes.to(torch.int64)).mul_(scale.to(torch.float32))


@lru_cache(maxsize=8)
def values(device: torch.device) -> Tensor:
    """``[256]`` f32: the value of every e4m3fn bit pattern (1 sign, 4 exponent with bias 7, 3 mantissa bits)."""
    code = torch.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7).to(torch.float32)
    normal = (1 + mantissa / 8) * torch.exp2(exponent.to(torch.float32) - 7)
    size = torch.where(exponent == 0, mantissa * 2.0**-9, normal)
    size[(code & 127) == 127] = torch.nan
    return torch.where(code < 128, size, -size).to(device)
