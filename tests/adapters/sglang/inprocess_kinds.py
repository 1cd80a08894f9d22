"""The kinds of pools that are tried, and both ends of a request over a pair of them."""

from __future__ import annotations

from itertools import count
from typing import Any

from inprocess import MHA, MLA, Pages, Pair, mha_pool, mla_pool, pages_of, wait

KINDS = {"mha-1": (mha_pool, MHA, 1), "mha-16": (mha_pool, MHA, 16), "mla-16": (mla_pool, MLA, 16)}
ROOMS = count(1000)


def start(pair: Pair, total: int, prefix: int = 0) -> tuple[int, Pages, Pages, Any, Any]:
    """Both ends of a request whose decode side waits for its pages."""
    room, size = next(ROOMS), pair.page_size
    source, target = pages_of(total - prefix, room, size), pages_of(total - prefix, room + 1, size)
    (sender,), (receiver,) = pair.request(room, target, prefix)
    pair.write_aux(room)
    return room, source, target, sender, receiver


def nothing_left(pair: Pair) -> None:
    """No room, no transfer and no published byte, on either side."""
    sides = (pair.prefill.manager.side, pair.decode.manager.side)
    wait(lambda: not any(side.active for side in sides), "the end of all transfers")
    assert sides[0].producer.budget.held_bytes == 0
    assert not pair.prefill.manager.request_status
    assert not pair.decode.manager.request_status
