"""Which elements of a fetch did arrive: decoding never continues on KV that is not there."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kvserve_core.errors import FrameError
from kvserve_core.session.routing import wanted_tokens
from kvserve_core.spec import KVSpec, Region, Shard


class Coverage:
    """Counts (layer, head) rows that arrived per token and layer group, against what this rank must hold."""

    def __init__(self, kv: KVSpec, shard: Shard, tokens: range, total: int) -> None:
        self._tokens = tokens
        self._spans = {g.id: wanted_tokens(g, tokens, total) for g in kv.groups}
        self._expected = {
            g.id: len(set(g.layers) & set(shard.layers)) * sum(len(shard.heads(p.num_heads)) for p in g.planes)
            for g in kv.groups
        }
        self._state = {g.id for g in kv.groups if g.unit == "state"}
        self._counts = {i: np.zeros(len(span), np.int64) for i, span in self._spans.items()}

    def add(self, at: Region) -> None:
        """A region is in place."""
        start = self._spans[at.group].start
        self._counts[at.group][at.start - start : at.stop - start] += len(at.layers) * len(at.heads)

    def valid(self) -> range:
        """The longest run of complete tokens from the first one asked for. None count without all state."""
        stop = self._tokens.stop
        for group, counts in self._counts.items():
            short = np.flatnonzero(counts < self._expected[group])
            if short.size:
                stop = min(stop, self._tokens.start if group in self._state else self._first(group, int(short[0])))
        return range(self._tokens.start, max(stop, self._tokens.start))

    def _first(self, group: int, offset: int) -> int:
        return self._spans[group].start + offset

    def require_complete(self) -> None:
        """Raise FrameError when an element did not arrive."""
        for group, counts in self._counts.items():
            short = np.flatnonzero(counts < self._expected[group])
            if short.size:
                raise FrameError("the producer did not send everything asked for", self._where(group, int(short[0])))

    def _where(self, group: int, offset: int) -> str:
        return f"group {group} token {self._first(group, offset)}"


def clip(at: Region, to: Region) -> Region | None:
    """The part of ``at`` inside ``to``, or None when they are disjoint or name different planes."""
    if at.group != to.group or at.plane != to.plane:
        return None
    inside_layers, inside_heads = set(to.layers), set(to.heads)
    layers = tuple(x for x in at.layers if x in inside_layers)
    heads = tuple(x for x in at.heads if x in inside_heads)
    start, stop = max(at.start, to.start), min(at.stop, to.stop)
    if not layers or not heads or start >= stop:
        return None
    return Region(at.group, at.plane, layers, heads, start, stop)


def cut(x: Tensor, at: Region, part: Region) -> Tensor:
    """``part`` of a tensor ``[L, H, T, D]`` that covers ``at``; a view where whole layers and heads are kept."""
    x = x[:, :, part.start - at.start : part.stop - at.start]
    if part.layers != at.layers:
        x = x[[at.layers.index(layer) for layer in part.layers]]
    if part.heads != at.heads:
        x = x[:, [at.heads.index(head) for head in part.heads]]
    return x
