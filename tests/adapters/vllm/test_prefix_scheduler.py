"""The scheduler half of stored prefixes, call by call: without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_engine import dense
from kvserve_core.deployment import Deployment
from kvserve_core.policy import Outcome
from kvserve_core.settings import Settings
from kvserve_vllm.metadata import RankInfo, StepMeta, WorkerReport
from kvserve_vllm.params import TransferParams
from kvserve_vllm.prefix import scheduler
from kvserve_vllm.prefix.lookup import names_of
from kvserve_vllm.prefix.meta import PrefixLoaded, PrefixStored
from kvserve_vllm.prefix.scheduler import Prefixes
from kvserve_vllm.scheduler.pollution import Pollution
from kvserve_vllm.spec import ServedModel
from kvserve_vllm.stats import StatsBuffer

KV = dense()
PROMPT = list(range(700))
BLOCKS = (list(range(1, 23)),)
BOTH = SimpleNamespace(is_kv_producer=True, is_kv_consumer=True)


def request(req_id: str = "r", tokens: Sequence[int] = PROMPT) -> Any:
    plain = {"lora_request": None, "cache_salt": None, "mm_features": [], "num_output_tokens": 0, "arrival_time": 0.0}
    ids = list(tokens)
    return SimpleNamespace(request_id=req_id, prompt_token_ids=ids, num_prompt_tokens=len(ids), **plain)


class Pool:
    """As much of an engine's block pool as pollution looks at."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_hash=None) for _ in range(64)]


class Half:
    """The scheduler half over an empty folder, and steps of an engine."""

    def __init__(self, folder: Path, policy: str = "forbid") -> None:
        deployment = Deployment(Settings.model_validate({"transport": {"file": {"path": str(folder)}}}), KV)
        stats = StatsBuffer(deployment.counters)
        self.pollution = Pollution(policy, [32], stats)  # type: ignore[arg-type]  # one of its two names
        model = ServedModel(KV, (), 1, 1, 1)
        self.prefixes = Prefixes(deployment, model, "file", BOTH, False, self.pollution, stats)
        self.prefixes.meet([RankInfo(None, {}, None)])
        self.asked, self.present = 0, set[str]()
        self.prefixes._index._store = self  # type: ignore[assignment]  # a lookup needs nothing else of a store

    def contains(self, names: Sequence[str]) -> int:
        self.asked += 1
        return next((n for n, name in enumerate(names) if name not in self.present), len(names))

    def hold(self, cells: int, quality: float = 1.0) -> None:
        """The store has the first cells of the prompt."""
        self.prefixes.arrived(request("probe"), TransferParams())
        keys = self.prefixes._entries.pop("probe").keys
        self.present |= {name for i in range(cells) for name in names_of(keys, i, quality)}

    def arrive(self, req_id: str = "r", **params: Any) -> Any:
        made = request(req_id)
        self.prefixes.arrived(made, TransferParams(**params))
        return made

    def step(self, req_id: str = "", computed: int = 0, count: int = 0, preempted: Sequence[str] = ()) -> StepMeta:
        """One step in which a request is scheduled for the first time, or none is."""
        new = SimpleNamespace(req_id=req_id, block_ids=BLOCKS, num_computed_tokens=computed)
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        output = SimpleNamespace(
            scheduled_new_reqs=[new] if req_id else [],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={req_id: count},
            preempted_req_ids=set(preempted),
        )
        meta = StepMeta()
        self.prefixes.plan(output, meta)
        return meta

    def ended(self, req_id: str, valid: int, reason: str = "") -> None:
        outcome = Outcome(req_id, "raw", 1 << 20, 1 << 20, transfer_s=0.1, total_s=0.1, ok=not reason)
        self.prefixes.learn(WorkerReport(prefix_loaded=[PrefixLoaded(req_id, valid, outcome, reason)]))


@pytest.fixture
def half(tmp_path: Path) -> Half:
    return Half(tmp_path)


def test_asking_changes_nothing_and_reads_the_store_once(half: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "LOOKUP_S", 1e9)
    half.hold(2)
    asking = half.arrive()
    before = half.asked
    assert [half.prefixes.matched(asking, 64) for _ in range(50)] == [(512 - 64, True)] * 50
    assert half.asked == before + 1
    assert half.prefixes.matched(asking, 512) == (0, False)
    assert half.prefixes.matched(asking, 0) == (512, True)
    assert half.step().prefix_load == []


def test_a_failed_load_is_not_tried_again(half: Half) -> None:
    half.hold(2)
    asking = half.arrive()
    half.prefixes.matched(asking, 0)
    half.prefixes.allocated(asking, BLOCKS, 512)
    (load,) = half.step().prefix_load
    assert (load.start, load.stop, sorted(load.cells)) == (0, 512, [0, 1])
    assert half.prefixes.matched(asking, 0) == (0, False)
    half.ended("r", 256, "damaged")
    assert half.prefixes.matched(asking, 0) == (0, False)
    assert not half.prefixes.finished(asking)
    assert half.prefixes.open_requests == 0


@pytest.mark.parametrize(
    ("reason", "then"),
    [
        ("Unacceptable: the consumer cannot read 'artefact:0123456789abcdef'", 0),
        ("IntegrityError: damaged", 512),
    ],
)
def test_lossy_cells_that_this_side_cannot_decode_do_not_fail_the_next_request(
    half: Half, reason: str, then: int
) -> None:
    half.hold(2, 0.99)
    first = half.arrive("a")
    assert half.prefixes.matched(first, 0) == (512, True)
    half.prefixes.allocated(first, BLOCKS, 512)
    half.step()
    half.ended("a", 0, reason)
    assert half.prefixes.matched(half.arrive("b"), 0) == (then, bool(then))
    half.hold(2)
    assert half.prefixes.matched(half.arrive("c"), 0) == (512, True)  # exact cells need no library


def test_an_aborted_load_is_cancelled_and_forgotten_when_it_ended(half: Half) -> None:
    half.hold(2)
    asking = half.arrive()
    half.prefixes.matched(asking, 0)
    half.prefixes.allocated(asking, BLOCKS, 512)
    assert not half.prefixes.finished(asking)
    assert half.step().prefix_cancel == ["r"]
    assert half.prefixes.open_requests > 0
    half.ended("r", 0, "cancelled")
    assert half.prefixes.open_requests == 0


def test_who_meets_a_load_of_the_same_cells_waits_for_it(half: Half) -> None:
    half.hold(2)
    first, second = half.arrive("a"), half.arrive("b")
    half.prefixes.matched(first, 0)
    half.prefixes.allocated(first, BLOCKS, 512)
    assert half.prefixes.matched(second, 0) == (None, False)
    half.ended("a", 512)
    assert half.prefixes.matched(second, 0) == (None, False)  # the engine has not cached it yet
    half.step("a", computed=512, count=188)
    assert half.prefixes.matched(second, 512) == (0, False)


def test_cells_are_stored_once_and_their_blocks_kept(half: Half) -> None:
    first, second = half.arrive("a"), half.arrive("b")
    (order,) = half.step("a", count=700).prefix_store
    assert sorted(order.cells) == [0, 1]
    assert half.step("b", count=700).prefix_store == []
    assert half.prefixes.finished(first)
    assert not half.prefixes.finished(second)
    names = [names[0] for names in order.cells.values()]
    stored = Outcome(names[0], "raw", 1, 1, encode_s=0.1)
    half.prefixes.learn(WorkerReport(prefix_stored=[PrefixStored(names[0], stored), PrefixStored(names[1], None)]))
    assert half.prefixes.open_requests == 0


def test_trouble_with_one_request_leaves_the_others_of_the_step(half: Half) -> None:
    half.arrive("a")
    half.arrive("b")
    half.prefixes._entries["a"].keys = ()
    none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    new = [SimpleNamespace(req_id=name, block_ids=BLOCKS, num_computed_tokens=0) for name in "ab"]
    counts = {"a": 700, "b": 700}
    step: Any = SimpleNamespace(
        preempted_req_ids=set(), scheduled_new_reqs=new, scheduled_cached_reqs=none, num_scheduled_tokens=counts
    )
    meta = StepMeta()
    half.prefixes.plan(step, meta)
    assert [order.req_id for order in meta.prefix_store] == ["b"]


def test_a_preempted_request_gives_up_what_is_not_stored_and_stores_it_later(half: Half) -> None:
    asking = half.arrive()
    (order,) = half.step("r", count=300).prefix_store
    assert half.step(preempted=["r"]).prefix_drop == ["r"]
    name = order.cells[0][0]
    half.prefixes.learn(WorkerReport(prefix_stored=[PrefixStored(name, None, "preempted")]))
    (again,) = half.step("r", count=700).prefix_store
    assert sorted(again.cells) == [0, 1]
    assert half.prefixes.finished(asking)


def test_nothing_is_stored_while_a_load_of_the_same_step_may_fail(half: Half) -> None:
    half.hold(1)
    asking = half.arrive()
    half.prefixes.matched(asking, 0)
    half.prefixes.allocated(asking, BLOCKS, 256)
    assert half.step("r", computed=256, count=444).prefix_store == []
    half.present.clear()
    half.ended("r", 0, "damaged")
    (order,) = half.step("r", count=700).prefix_store
    assert sorted(order.cells) == [0, 1]


def test_what_was_computed_after_lossy_cells_of_the_engines_cache_is_not_stored(tmp_path: Path) -> None:
    half, pool = Half(tmp_path, "allow"), Pool()
    half.pollution.bind(pool)
    pool.blocks[3].block_hash = "h"
    half.pollution.loading("lossy", ([3],), 0)
    asking = half.arrive()
    half.prefixes.allocated(asking, BLOCKS, 0)
    assert half.step("r", count=700).prefix_store == []


def test_what_goes_on_to_another_engine_is_loaded_exactly(half: Half) -> None:
    half.hold(1)
    half.hold(2, 0.99)
    assert half.prefixes.matched(half.arrive("a"), 0) == (512, True)
    assert half.prefixes.matched(half.arrive("b", offer=True), 0) == (256, True)
