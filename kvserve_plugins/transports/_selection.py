"""Which segments cover a selection, in time linear in both: a consumer's request must not hold up the others."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TypeVar

from kvserve_core.errors import TransportError
from kvserve_core.spec import Region, base_planes

MAX_REGIONS = 4096
MAX_IDS = 2**17
"""Layer and head numbers in all regions of one selection together."""
KeyT = TypeVar("KeyT", bound=Hashable)


def check_size(want: Sequence[Region]) -> None:
    """Refuse what no consumer needs, before time is spent on it.

    Raises:
        TransportError: too many regions, or too many layer and head numbers in them.
    """
    ids = sum(len(w.layers) + len(w.heads) for w in want)
    if len(want) > MAX_REGIONS or ids > MAX_IDS:
        raise TransportError(
            f"a selection of {len(want)} regions with {ids} layer and head numbers; at most {MAX_REGIONS} regions with"
            f" {MAX_IDS} are served at once: ask for larger regions, or in several fetches"
        )


def covering(plan: Sequence[Region], want: Sequence[Region]) -> list[int]:
    """What :func:`kvserve_core.spec.covering` gives, without looking at every segment for every region."""
    index = _Index(plan)
    return index.numbers(reduce(or_, map(index.overlapping, want), 0))


class _Index:
    """Sets of segments as bits of an integer, in the order of their first tokens, by all that a region names."""

    def __init__(self, plan: Sequence[Region]) -> None:
        self._order = sorted(range(len(plan)), key=lambda i: plan[i].start)
        self._starts = [plan[i].start for i in self._order]
        self._index_stops(plan)
        lanes: dict[tuple[int, str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for bit, i in enumerate(self._order):
            at = plan[i]
            lanes.setdefault((at.group, at.plane, at.layers, at.heads), []).append(bit)
        masks = {lane: _mask(bits, len(plan)) for lane, bits in lanes.items()}
        self._planes = _union(((g, p), m) for (g, plane, _, _), m in masks.items() for p in base_planes(plane))
        self._layers = _union((layer, m) for (_, _, layers, _), m in masks.items() for layer in layers)
        self._heads = _union((head, m) for (_, _, _, heads), m in masks.items() for head in heads)
        self._known: dict[tuple[bool, tuple[int, ...]], int] = {}

    def _index_stops(self, plan: Sequence[Region]) -> None:
        """``_over[k]``: the segments that end by the k-th last token."""
        ends: dict[int, list[int]] = {}
        for bit, i in enumerate(self._order):
            ends.setdefault(plan[i].stop, []).append(bit)
        self._stops = sorted(ends)
        self._over = [0]
        for stop in self._stops:
            self._over.append(self._over[-1] | _mask(ends[stop], len(plan)))

    def overlapping(self, want: Region) -> int:
        """The segments that share an element with ``want``."""
        place = 0
        for plane in base_planes(want.plane):
            place |= self._planes.get((want.group, plane), 0)
        if place:
            place &= self._any(True, want.layers) & self._any(False, want.heads)
        if not place:
            return 0
        begun = (1 << bisect_left(self._starts, want.stop)) - 1
        return place & begun & ~self._over[bisect_right(self._stops, want.start)]

    def _any(self, layers: bool, ids: tuple[int, ...]) -> int:
        """The segments that hold one of these layers, or heads; regions repeat few combinations of them."""
        if (layers, ids) not in self._known:
            table = self._layers if layers else self._heads
            self._known[layers, ids] = reduce(or_, (table[i] for i in set(ids) if i in table), 0)
        return self._known[layers, ids]

    def numbers(self, mask: int) -> list[int]:
        """Indices into the plan, ascending."""
        return sorted(i for i, bit in zip(self._order, reversed(f"{mask:b}"), strict=False) if bit == "1")


def _mask(bits: Iterable[int], size: int) -> int:
    made = bytearray(size // 8 + 1)
    for bit in bits:
        made[bit >> 3] |= 1 << (bit & 7)
    return int.from_bytes(made, "little")


def _union(pairs: Iterable[tuple[KeyT, int]]) -> Mapping[KeyT, int]:
    found: dict[KeyT, int] = {}
    for key, mask in pairs:
        found[key] = found.get(key, 0) | mask
    return found
