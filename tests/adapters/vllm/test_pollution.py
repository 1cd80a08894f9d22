"""Which blocks are taken out of the engine's prefix cache, and until when, call by call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kvserve_core.metrics import Counters
from kvserve_vllm.scheduler.pollution import Pollution
from kvserve_vllm.stats import StatsBuffer

SIZE = 16


class Pool:
    """Blocks by what they are cached as, and what was taken out."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_hash=f"h{i}") for i in range(16)]
        self.evicted: list[set[int]] = []

    def evict_blocks(self, ids: set[int]) -> None:
        self.evicted.append(set(ids))


def made(policy: Any = "forbid") -> tuple[Pollution, Pool, StatsBuffer]:
    stats, pool = StatsBuffer(Counters()), Pool()
    pollution = Pollution(policy, [SIZE], stats)
    pollution.bind(pool)
    return pollution, pool, stats


def step(new: Mapping[str, list[int]] | None = None, preempted: Sequence[str] = ()) -> Any:
    fresh = [SimpleNamespace(req_id=r, block_ids=(ids,), num_computed_tokens=0) for r, ids in (new or {}).items()]
    none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return SimpleNamespace(preempted_req_ids=set(preempted), scheduled_new_reqs=fresh, scheduled_cached_reqs=none)


def test_a_preempted_request_takes_its_blocks_out_once_more_and_none_of_those_given_away() -> None:
    pollution, pool, _ = made()
    pollution.loading("r", ([1, 2, 3],), SIZE)
    assert pool.evicted == [{2, 3}]
    pollution.plan(step({"other": [3, 4]}, preempted=["r"]))
    assert pool.evicted[1:] == [{2}]
    pollution.plan(step())
    pollution.finished("r")
    assert len(pool.evicted) == 2


def test_blocks_given_anew_after_a_failed_load_replace_those_of_before() -> None:
    pollution, pool, _ = made()
    pollution.loading("r", ([1, 2, 3],), SIZE)
    pollution.failed("r", 2 * SIZE)  # some of it is there
    pollution.plan(step({"r": [7, 8, 9]}))
    assert pool.evicted[-1] == {8, 9}


def test_a_load_that_brought_nothing_lost_nothing() -> None:
    pollution, pool, _ = made()
    pollution.loading("r", ([1, 2, 3],), SIZE)
    pollution.failed("r", SIZE)
    pollution.plan(step({"r": [1, 2, 3]}))
    assert len(pool.evicted) == 1


def test_tokens_from_lossy_entries_are_counted_once_a_request() -> None:
    pollution, _, stats = made("allow")
    pollution.loading("r", ([1, 2],), 0)
    for _ in range(2):
        pollution.allocated("other", ([1, 2, 5],))
    taken = stats.take()
    assert taken is not None
    assert taken.data["lossy_cache_tokens"] == [[[], 2 * SIZE]]
