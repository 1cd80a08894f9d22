"""Who fetches what from whom: any producer layout to any consumer layout. Pure, equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import KVSpec, LayerGroup, PlaneSpec, Region, Shard
from kvserve_core.transport import Endpoint


def wanted_tokens(group: LayerGroup, tokens: range, total: int) -> range:
    """The tokens of a group that are sent at all: a sliding window drops old ones, state is one cell."""
    if group.unit == "state":
        return range(1)
    start = max(tokens.start, total - group.window) if group.window else tokens.start
    return range(min(start, tokens.stop), tokens.stop)


def route(
    endpoints: Sequence[Endpoint], kv: KVSpec, shard: Shard, tokens: range, total: int
) -> list[tuple[int, tuple[Region, ...]]]:
    """``(endpoint index, disjoint regions)`` that together cover this rank's part of ``tokens``.

    Where heads are replicated on the producer, consumer ranks take different replicas.

    Raises:
        UnsupportedSpecError: no endpoint holds some layer or head.
    """
    found: dict[int, list[Region]] = {}
    for group in kv.groups:
        span = wanted_tokens(group, tokens, total)
        for plane in group.planes:
            for i, layers, heads in _cover(endpoints, group, plane, shard):
                if span:
                    found.setdefault(i, []).append(Region(group.id, plane.name, layers, heads, span.start, span.stop))
    return [(i, tuple(regions)) for i, regions in sorted(found.items())]


def _cover(
    endpoints: Sequence[Endpoint], group: LayerGroup, plane: PlaneSpec, shard: Shard
) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    heads = shard.heads(plane.num_heads)
    missing = {(layer, head) for layer in set(group.layers) & set(shard.layers) for head in heads}
    taken = []
    turn = shard.rank % len(endpoints) if endpoints else 0
    for i in [*range(turn, len(endpoints)), *range(turn)]:
        theirs = endpoints[i].shard
        layers = tuple(sorted({x for x, _ in missing} & set(theirs.layers)))
        mine = tuple(sorted(set(theirs.heads(plane.num_heads)) & {h for x, h in missing if x in layers}))
        got = {(x, h) for x in layers for h in mine}
        if got and got <= missing:
            missing -= got
            taken.append((i, layers, mine))
    if missing:
        layer, head = min(missing)
        raise UnsupportedSpecError(
            f"no producer endpoint holds layer {layer} head {head} of plane {plane.name!r}; every rank of the"
            " prefill engine must be in the locator"
        )
    return taken


def share(
    index: int, endpoints: Sequence[Endpoint], kv: KVSpec, me: Shard, everyone: Sequence[Shard]
) -> tuple[int, int] | None:
    """``(i, n)``: this rank is the i-th of the n consumer ranks that fetch from endpoint ``index``.

    A replica that nobody fetches from is the first rank's to release. None for the other ranks.
    """
    users = [s for s in everyone if any(i == index for i, _ in route(endpoints, kv, s, range(1), 1))]
    users = users or [everyone[0]]
    return (users.index(me), len(users)) if me in users else None
