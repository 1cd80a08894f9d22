"""What one connector instance reports, and what of it every rank reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvserve_core.metrics import Counters
from kvserve_core.policy import Outcome
from kvserve_vllm.stats import KVServeStats, StatsBuffer

OUTCOME = Outcome("t", "raw", raw_bytes=100, wire_bytes=50, transfer_s=1.0, total_s=2.0)
LOAD: Any = SimpleNamespace(start=10, stop=40)


def taken(stats: StatsBuffer) -> dict[str, Any]:
    found = stats.take()
    return {} if found is None else found.data


def test_bytes_held_for_consumers_are_told_when_they_change_and_at_first() -> None:
    stats = StatsBuffer(Counters())
    told = []
    for nbytes in (0, 0, 700, 700, 0):
        stats.held(nbytes)
        told.append(taken(stats).get("published_bytes"))
    assert told == [[[[], 0]], None, [[[], 700]], None, [[[], 0]]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_is_one_load_and_its_bytes_those_of_all_ranks(ranks: int) -> None:
    total = KVServeStats(data={})
    for rank in range(ranks):
        stats = StatsBuffer(Counters(), first=rank == 0)
        stats.loaded([(LOAD, OUTCOME)])
        total.aggregate(KVServeStats(data=taken(stats)))
    assert total.data["transfers"] == [[["consumer", "true"], 1]]
    assert total.data["external_tokens"] == [[[], 30]]
    assert total.data["load_seconds"] == [[[], 2.0]]
    assert total.data["raw_bytes"] == [[[], 100 * ranks]]
