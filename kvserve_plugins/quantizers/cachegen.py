"""CacheGen: fewer levels for later layers, one scale a token, channels apart for the entropy coder."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ANY, Capabilities, ComponentConfig, Tunable
from kvserve_core.errors import FrameError
from kvserve_core.spec import KVSpec, Region
from kvserve_core.stages import Quantizer
from kvserve_core.tensor import Part, Quantized
from kvserve_plugins.kernels.norms import BF16_MAX, bf16_up, largest_magnitude
from kvserve_plugins.kernels.shapes import reduced, require_shape, shape_of

Axis = Literal["token", "token_head"]
AXES: dict[Axis, tuple[int, ...]] = {"token": (1, 3), "token_head": (3,)}
Run = tuple[int, int, int]
"""First and last-plus-one layer of a segment with equal levels, and the middle code of these."""


class CacheGen(Quantizer):
    """Rounds to levels that fall with depth, against the largest magnitude of each token.

    With M = levels // 2 - 1 and a the largest magnitude rounded up to bf16, ``code = round(x / a * M) + M`` in
    0 .. 2 M and ``x' = (code - M) * a / M``, so ``|x - x'| <= a / (2 M)`` to f32 rounding, and 0 is exact.
    ``levels[i]`` holds for layers whose place among the model's N layers is below ``until[i] * N``, the last one for
    the rest; the default is thirds of the layers, as in CacheGen's paper (arXiv 2310.07240), with the bins of its code.

    ``token`` scales over all heads, as CacheGen does; ``token_head`` costs a bf16 more per head and works on any slice
    of heads. Codes come channel by channel, ``[L, H, D, T]`` with a row a channel, so that an entropy coder sees each
    channel's own distribution; one stream for each run of layers with equal levels; one parameter ``scale``. The
    anchors and differences of the paper, which its code lacks, are the transform ``delta``.
    """

    class Config(ComponentConfig):
        """levels: by depth. until: fractions of the layers at which each but the last ends. axis: what shares a."""

        levels: tuple[int, ...] = Tunable(
            (32, 16, 12), choices=((64, 32, 32), (32, 32, 32), (32, 16, 16), (32, 16, 12), (16, 16, 12)), min_length=1
        )
        until: tuple[float, ...] = (0.33, 0.67)
        axis: Axis = Tunable("token", choices=tuple(AXES))

        @model_validator(mode="after")
        def _schedule(self) -> Self:
            if len(self.until) != len(self.levels) - 1:
                raise ValueError(f"until needs one fraction less than levels has entries, got {len(self.until)}")
            if list(self.until) != sorted({*self.until}) or not all(0 < f < 1 for f in self.until):
                raise ValueError(f"until needs rising fractions between 0 and 1, got {list(self.until)}")
            if not all(4 <= n <= 256 for n in self.levels):
                raise ValueError(f"levels needs numbers from 4 to 256, got {list(self.levels)}")
            return self

    config: Config
    caps = Capabilities(
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        head_local=True,
        layer_local=True,
        max_alphabet=255,
    )

    _runs: tuple[Run, ...]
    _middle: Tensor  # [L, 1, 1, 1] f32

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        widest = 2 * middle(max(config.levels)) + 1
        self.caps = replace(type(self).caps, head_local=config.axis == "token_head", max_alphabet=widest)

    def bind(self, at: Region, spec: KVSpec, device: torch.device, artefacts: Artefacts) -> Self:
        """Look up the levels of these layers."""
        bound = super().bind(at, spec, device, artefacts)
        order = sorted({layer for group in spec.groups for layer in group.layers})
        each = [middle(self.levels_at(order.index(layer), len(order))) for layer in at.layers]
        bound._runs = tuple(runs(each))
        bound._middle = torch.tensor(each, dtype=torch.float32, device=device).view(-1, 1, 1, 1)
        return bound

    def levels_at(self, place: int, of: int) -> int:
        """Levels of the layer at a place among ``of``."""
        ends = (*self.config.until, 1.0)
        return next(n for n, end in zip(self.config.levels, ends, strict=True) if place < end * of)

    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` finite floats to codes.

        Raises:
            NonFiniteError: NaN or Inf, on a CPU.
        """
        wide, shape = x.to(torch.float32), shape_of(x)
        scale = bf16_up(largest_magnitude(wide, AXES[self.config.axis]))
        steps = (wide / scale.to(torch.float32)).clamp_(-1, 1).mul_(self._middle).round_().add_(self._middle)
        by_channel = steps.to(torch.uint8).transpose(2, 3)
        rows = shape[1] * shape[3]
        parts = [
            Part(by_channel[a:b].reshape(-1), 2 * middle_code + 1, max(rows * (b - a), 1))
            for a, b, middle_code in self._runs
        ]
        return Quantized(tuple(parts), {"scale": scale}, shape)

    def decode(self, q: Quantized, at: Region) -> Tensor:
        """``[L, H, T, D]`` in f32.

        Raises:
            FrameError: ``scale`` of another shape, or another number of streams.
        """
        layers, heads, tokens, dim = q.shape
        require_shape(q.params, ("scale",), reduced(q.shape, AXES[self.config.axis]), at)
        scale = q.params["scale"]
        if len(q.parts) != len(self._runs):
            raise FrameError(f"{len(q.parts)} streams, these layers have {len(self._runs)} runs of levels", at)
        codes = torch.cat([part.codes for part in q.parts]).view(layers, heads, dim, tokens).transpose(2, 3)
        steps = codes.to(torch.float32).sub_(self._middle).div_(self._middle)
        return steps.mul_(scale.to(torch.float32)).clamp_(-BF16_MAX, BF16_MAX)


def middle(levels: int) -> int:
    """The code of 0, as CacheGen has it: of 32 bins 31 are used."""
    return levels // 2 - 1


def runs(each: list[int]) -> list[Run]:
    """``[15, 15, 7]`` -> ``[(0, 2, 15), (2, 3, 7)]``."""
    found: list[Run] = []
    for value, members in groupby(each):
        start = found[-1][1] if found else 0
        found.append((start, start + len(list(members)), value))
    return found
