"""KIVI: few bits, small groups, keys along tokens and values along channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from kvserve_core.component import ANY, Capabilities, ComponentConfig, Tunable
from kvserve_core.spec import SEGMENT_TOKENS, Region
from kvserve_core.stages import Quantizer
from kvserve_core.tensor import Part, Quantized
from kvserve_plugins.kernels.groups import fold, unfold
from kvserve_plugins.kernels.minmax import Grid, dequantize, grid, quantize
from kvserve_plugins.kernels.shapes import require_shape, shape_of

Axis = Literal["token_group", "channel_group"]
AXES: dict[Axis, int] = {"token_group": 2, "channel_group": 3}
"""The axis of ``[L, H, T, D]`` that is cut into groups."""


class Kivi(Quantizer):
    """Rounds groups of tokens (keys) or of channels (values) to 2 or 4 bits.

    ``axis: token_group`` (32 tokens of a channel) is KIVI's scheme for keys, ``channel_group`` (32 channels of a token)
    that for values: give each plane its own chain.
    One stream of codes in the order L, H, T, D and two bf16 parameters, ``lo`` and ``scale``, with the groups in place
    of their axis and 1 behind it: ``b + 32 / group_size`` bits a value. A token group needs ``group_size`` tokens, so
    the tail of a segment that is shorter goes raw, as KIVI's residual does; called with such a tail, or with a head_dim
    that the group size does not divide, the last group is shorter.

    KIVI (arXiv 2402.02750) divides a constant group by 0 and clamps to a code too many. Here a constant group of a bf16
    or f16 plane decodes to itself, and codes are computed from the parameters as rounded; see
    :mod:`kvserve_plugins.kernels.minmax` for formulas and the error bound.
    """

    class Config(ComponentConfig):
        """bits a code; which axis forms groups, and of how many tokens or channels."""

        bits: Literal[2, 4] = Tunable(4, choices=(2, 4))
        axis: Axis = Tunable("token_group", choices=tuple(AXES))
        group_size: int = Tunable(32, choices=(32, 64, 128), ge=2, le=SEGMENT_TOKENS)

    config: Config
    caps = Capabilities(
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        head_local=True,
        layer_local=True,
        max_alphabet=16,
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._axis, self._levels = AXES[config.axis], 1 << config.bits
        tokens = config.group_size if config.axis == "token_group" else 1
        self.caps = replace(type(self).caps, token_multiple=tokens, max_alphabet=self._levels)

    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` finite floats to codes.

        Raises:
            NonFiniteError: NaN or Inf, on a CPU.
        """
        shape, axis = shape_of(x), self._axis
        values = fold(x.to(torch.float32), axis, self.config.group_size)
        cells = grid(values, (axis + 1,), self._levels, "bf16")
        codes = unfold(quantize(values, cells, self._levels), axis, shape[axis])
        part = Part(codes.reshape(-1), self._levels, shape[0] * shape[1])
        return Quantized((part,), {"lo": cells.lo, "scale": cells.scale}, shape)

    def decode(self, q: Quantized, at: Region) -> Tensor:
        """``[L, H, T, D]`` in f32.

        Raises:
            FrameError: ``lo`` or ``scale`` of another shape; together they could broadcast to any size.
        """
        codes = fold(q.parts[0].codes.view(q.shape), self._axis, self.config.group_size)
        expected = (*codes.shape[: self._axis + 1], 1, *codes.shape[self._axis + 2 :])
        require_shape(q.params, ("lo", "scale"), expected, at)
        cells = Grid(q.params["lo"], q.params["scale"])
        return unfold(dequantize(codes, cells, self._levels), self._axis, q.shape[self._axis])
