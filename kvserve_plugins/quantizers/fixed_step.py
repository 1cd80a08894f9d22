"""One step for everything: reverse water-filling, once the coordinates are scaled so that one step is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import field_validator
from torch import Tensor

from kvserve_core.component import ANY, Capabilities, ComponentConfig, Tunable
from kvserve_core.errors import FrameError, NonFiniteError
from kvserve_core.spec import KVSpec, Region
from kvserve_core.stages import Codec, Fusion, Quantizer, Transform
from kvserve_core.tensor import Part, Quantized
from kvserve_plugins.kernels.fused_klt import fusion
from kvserve_plugins.kernels.shapes import shape_of

NARROW, WIDE = 255, 32767
"""Alphabets of codes of one and of two bytes; both are odd, so that 0 has a code in the middle."""
SMALLEST, LARGEST = 2.0**-126, 2.0**100


class FixedStep(Quantizer):
    """Rounds to multiples of one step; with ``klt`` and an entropy coder, reverse water-filling.

    ``q = round(x / step)``, ties to even, 0 where ``|x| < (1/2 + dead_zone) step``; ``x' = (q + sign(q) offset) step``.
    One stream without parameters, component-major: codes ``q + (alphabet - 1) / 2`` in the order L, H, D, T, one row a
    component. The alphabet is 255 (one byte) where the segment fits into it, else 32767 (two bytes).

    With ``dead_zone`` and ``offset`` 0, ``|x - x'| <= step / 2 + 2^-22 |x|``, the last term being f32 rounding. A
    ``dead_zone`` makes the first term ``(1/2 + dead_zone) step``, an ``offset`` adds ``|offset| step``. At high rate
    the squared error is ``step^2 / 12`` a coordinate, and a component of less variance costs next to nothing (Cover and
    Thomas, Elements of Information Theory, 10.3.3).
    """

    class Config(ComponentConfig):
        """step: in units of the input. dead_zone: added to each side of zero, and offset: outwards, in steps."""

        step: float = Tunable(0.25, low=3e-5, high=3.0, log=True, ge=SMALLEST, le=LARGEST)
        dead_zone: float = Tunable(0.0, choices=(0.0, 0.1, 0.2), ge=0.0, le=0.5)
        offset: float = Tunable(0.0, choices=(-0.05, 0.0, 0.05), ge=-0.5, le=0.5)

        @field_validator("step")
        @classmethod
        def _as_f32(cls, value: float) -> float:
            return float(torch.tensor(value, dtype=torch.float32))

    config: Config
    caps = Capabilities(
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        head_local=True,
        layer_local=True,
        max_alphabet=WIDE,
    )

    def fuse(self, transforms: Sequence[Transform], codec: Codec, spec: KVSpec, device: torch.device) -> Fusion | None:
        """Matrix products behind ``klt``, on a GPU with Triton. Alone on a GPU, encoding waits for its largest code."""
        return fusion(transforms, self, spec, device)

    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` to codes ``[L, H, D, T]``.

        Raises:
            NonFiniteError: NaN, Inf, or values beyond 16383 steps.
        """
        q = to_steps(x, self.config.step, self.config.dead_zone)
        largest = float(torch.aminmax(q.abs()).max) if q.numel() else 0.0
        if not largest <= WIDE // 2:  # also NaN
            raise NonFiniteError(
                f"quantizer 'fixed_step' codes up to {WIDE // 2} steps of {self.config.step:g}, got {largest:g};"
                " use a larger 'step'"
            )
        alphabet, dtype = (NARROW, torch.uint8) if largest <= NARROW // 2 else (WIDE, torch.int16)
        codes = (q.transpose(2, 3) + alphabet // 2).to(dtype).reshape(-1)
        layers, heads, _, dim = shape_of(x)
        return Quantized((Part(codes, alphabet, max(1, layers * heads * dim)),), {}, shape_of(x))

    def decode(self, q: Quantized, at: Region) -> Tensor:
        """``[L, H, T, D]`` in f32.

        Raises:
            FrameError: not one stream of an alphabet that ``encode`` gives.
        """
        if len(q.parts) != 1 or q.parts[0].alphabet not in (NARROW, WIDE):
            raise FrameError(f"quantizer 'fixed_step' reads one stream of {NARROW} or {WIDE} levels")
        layers, heads, tokens, dim = q.shape
        codes = q.parts[0].codes.view(layers, heads, dim, tokens).transpose(2, 3)
        return from_steps(codes.to(torch.float32) - q.parts[0].alphabet // 2, self.config.step, self.config.offset)


def to_steps(x: Tensor, step: float, dead_zone: float) -> Tensor:
    """``round(x / step)`` in f32, 0 within the dead zone; any shape."""
    z = x.to(torch.float32) / step
    q = z.round()
    return torch.where(z.abs() < 0.5 + dead_zone, 0.0, q) if dead_zone else q


def from_steps(q: Tensor, step: float, offset: float) -> Tensor:
    """``(q + sign(q) offset) step`` in f32, any shape."""
    moved = q + q.sign() * offset if offset else q
    return moved * step
