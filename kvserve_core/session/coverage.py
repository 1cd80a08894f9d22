"""Which elements of a fetch did arrive: decoding never continues on KV that is not there."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvserve_core.errors import FrameError
from kvserve_core.session.routing import wanted_tokens
from kvserve_core.spec import KVSpec, Region, Shard


class Lane(NamedTuple):
    """Layers and heads of a plane that arrive together."""

    group: int
    plane: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]


class Coverage:
    """Marks every (lane, token) once and counts them per token and layer group, against what this rank must hold."""

    def __init__(self, kv: KVSpec, shard: Shard, tokens: range, total: int) -> None:
        self._tokens = tokens
        self._spans = {g.id: wanted_tokens(g, tokens, total) for g in kv.groups}
        self._expected = {
            g.id: len(set(g.layers) & set(shard.layers)) * sum(len(shard.heads(p.num_heads)) for p in g.planes)
            for g in kv.groups
        }
        self._whole = {g.id for g in kv.groups if g.unit == "state" or (g.window is not None and g.window < total)}
        self._counts: dict[int, NDArray[np.int64]] = {i: np.zeros(len(s), np.int64) for i, s in self._spans.items()}
        self._lanes: dict[Lane, NDArray[np.bool_]] = {}
        self._lock = threading.Lock()

    def claim(self, at: Region) -> None:
        """A region arrived and is about to be written. It counts with :meth:`count`, once it is in place.

        Raises:
            FrameError: an element of it arrived already, so that counting would hide one that is missing.
        """
        span = self._span(at)
        with self._lock:
            seen = self._lane(at)
            if seen[span].any():
                raise FrameError("tokens arrived twice", at)
            seen[span] = True

    def count(self, at: Region) -> None:
        """A claimed region is in place."""
        with self._lock:
            self._counts[at.group][self._span(at)] += len(at.layers) * len(at.heads)

    def _span(self, at: Region) -> slice:
        start = self._spans[at.group].start
        return slice(at.start - start, at.stop - start)

    def _lane(self, at: Region) -> NDArray[np.bool_]:
        lane = Lane(at.group, at.plane, at.layers, at.heads)
        if lane not in self._lanes:
            if any(_overlap(lane, other) for other in self._lanes):
                raise FrameError("layers and heads were cut in two ways", at)
            self._lanes[lane] = np.zeros(len(self._spans[at.group]), np.bool_)
        return self._lanes[lane]

    def valid(self) -> range:
        """The longest run of tokens, from the first one asked for, from which recomputing can go on.

        Everything, or a prefix; but no part of a request whose state or whose sliding windows only hold its end.
        """
        short = {g: np.flatnonzero(counts < self._expected[g]) for g, counts in self._counts.items()}
        missing = {g: int(s[0]) + self._spans[g].start for g, s in short.items() if s.size}
        if not missing:
            return self._tokens
        stop = self._tokens.start if self._whole else min(missing.values())
        return range(self._tokens.start, max(stop, self._tokens.start))

    def require_complete(self) -> None:
        """Raise FrameError when an element did not arrive."""
        for group, counts in self._counts.items():
            short = np.flatnonzero(counts < self._expected[group])
            if short.size:
                token = self._spans[group].start + int(short[0])
                raise FrameError("the producer did not send everything asked for", f"group {group} token {token}")


def _overlap(a: Lane, b: Lane) -> bool:
    return (
        (a.group, a.plane) == (b.group, b.plane)
        and not set(a.layers).isdisjoint(b.layers)
        and not set(a.heads).isdisjoint(b.heads)
    )


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
