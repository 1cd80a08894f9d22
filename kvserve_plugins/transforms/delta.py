"""Differences of tokens to the anchor of their group."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve_core.component import ANY, Capabilities, ComponentConfig, Tunable
from kvserve_core.errors import FrameError
from kvserve_core.spec import SEGMENT_TOKENS, Region
from kvserve_core.stages import Transform
from kvserve_core.tensor import Params, Shape
from kvserve_plugins.kernels.minmax import Grid, dequantize, grid, quantize
from kvserve_plugins.kernels.shapes import require_shape

LEVELS = 256


class Delta(Transform):
    """Replaces the tokens of a group by their differences to its first token, the anchor.

    Groups are ``group_tokens`` adjacent tokens, counted from the segment's first; the last one may be shorter. Anchors
    go as parameters in 8 bits: ``anchor`` u8 ``[L, H, G, D]`` with ``lo`` and ``scale`` bf16 ``[L, H, G, 1]``
    (:mod:`kvserve_plugins.kernels.minmax`), so an anchor is off by half of 1/255 of its range. What goes on to the
    quantizer is ``[L, H, T - G, D]`` in f32: the other tokens minus the anchor AS DECODED, so the anchor's error does
    not add to theirs; and all of them are restored at once, since none depends on its neighbour.

    CacheGen (SIGCOMM 2024), section 5.1: 10 tokens a group. Anchors cost ``(8 + 32 / D) / group_tokens`` bits a value.
    """

    class Config(ComponentConfig):
        """group_tokens: tokens an anchor serves, itself included."""

        group_tokens: int = Tunable(10, choices=(10, 16, 32), ge=2, le=SEGMENT_TOKENS)

    config: Config
    caps = Capabilities(
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        head_local=True,
        layer_local=True,
    )

    def shape(self, x: Shape) -> Shape:
        """``[L, H, T - G, D]`` with G = ceil(T / group_tokens)."""
        return (x[0], x[1], x[2] - -(-x[2] // self.config.group_tokens), x[3])

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        """``[L, H, T, D]`` finite floats to differences and anchors.

        Raises:
            NonFiniteError: NaN or Inf in an anchor, on a CPU.
        """
        size, wide = self.config.group_tokens, x.to(torch.float32)
        first = wide[:, :, ::size]
        cells = grid(first, (3,), LEVELS, "bf16")
        codes = quantize(first, cells, LEVELS)
        token, group = followers(x.shape[2], size, x.device)
        anchors = dequantize(codes, cells, LEVELS)
        differences = wide.index_select(2, token).sub_(anchors.index_select(2, group))
        return differences, {"anchor": codes, "lo": cells.lo, "scale": cells.scale}

    def decode(self, y: Tensor, params: Params, at: Region) -> Tensor:
        """Differences back to ``[L, H, T, D]`` in f32.

        Raises:
            FrameError: anchors that do not belong to this many tokens.
        """
        layers, heads, _, dim = y.shape
        size, tokens = self.config.group_tokens, at.num_tokens
        groups = -(-tokens // size)
        if y.shape[2] != tokens - groups:
            raise FrameError(f"{y.shape[2]} differences do not fit {tokens} tokens in groups of {size}", at)
        require_shape(params, ("anchor",), (layers, heads, groups, dim), at)
        require_shape(params, ("lo", "scale"), (layers, heads, groups, 1), at)
        anchors = dequantize(params["anchor"], Grid(params["lo"], params["scale"]), LEVELS)
        token, group = followers(tokens, size, y.device)
        x = y.new_empty((layers, heads, tokens, dim), dtype=torch.float32)
        x[:, :, ::size] = anchors
        return x.index_copy_(2, token, y.to(torch.float32) + anchors.index_select(2, group))


def followers(tokens: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of the tokens that are no anchors: their positions, and the groups they are in."""
    i = torch.arange(tokens - -(-tokens // size), device=device)
    group = i // (size - 1)
    return i + group + 1, group
