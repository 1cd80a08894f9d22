"""Cells on their way into a store that is slow or hangs: the engine gets its blocks back, and its shutdown ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvserve_core.deployment import Deployment
from kvserve_core.policy import Decision, ServiceContext
from kvserve_core.settings import Settings
from kvserve_vllm.metadata import StepMeta, WorkerReport
from kvserve_vllm.prefix import worker, writer
from kvserve_vllm.prefix.meta import PrefixStore
from kvserve_vllm.prefix.worker import PrefixWorker
from kvserve_vllm.spec import ServedModel
from kvserve_vllm.stats import StatsBuffer
from vllm_blocks import KV, caches, placed, tables, until
from vllm_steps import failures

DECISION = Decision("lossless", "test", ServiceContext(1), 1e9)
WRITES = SimpleNamespace(is_kv_producer=True, is_kv_consumer=False)


class Recorder:
    """Half of a rank; all calls are noted and fail."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> None:
            self.called.append(name)
            raise RuntimeError("injected")

        return call


class Slow:
    """Makes ``publish`` of a store wait until it is let go."""

    def __init__(self, store: Any) -> None:
        self.store, self.gate, self.taken = store, threading.Event(), 0
        self._publish, store.publish = store.publish, self.publish

    def publish(self, *given: Any) -> str:
        self.taken += 1
        self.gate.wait()
        return str(self._publish(*given))


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[tuple[PrefixWorker, Slow]]:
    """The store half of a rank over real blocks, and its store, which hangs."""
    settings = Settings.model_validate({"transport": {"file": {"path": str(tmp_path)}}})
    deployment = Deployment(settings, KV)
    slow = Slow(deployment.store("file"))
    placement, model = placed(caches()), ServedModel(KV, (), 1, 1, 1)
    made = PrefixWorker(deployment, "file", placement, model, StatsBuffer(deployment.counters))
    made.open(WRITES, placement.layers[0].views["k"].device, lambda: None)
    yield made, slow
    slow.gate.set()
    made.close()


def stored(rank: PrefixWorker, names: list[str], report: WorkerReport) -> None:
    orders = [PrefixStore(f"r-{name}", tables(), DECISION, {0: (name,)}) for name in names]
    rank.after_forward(StepMeta(prefix_store=orders), report)


def given_back(rank: PrefixWorker, finished: set[str], report: WorkerReport) -> set[str]:
    """Requests whose blocks came back, once all have."""
    done = rank.finished(finished, set(), None)

    def back() -> bool:
        rank.poll(report)
        done.update(rank.finished(set(), set(), None))
        return done >= finished

    until(back)
    return done


def test_a_store_that_hangs_does_not_keep_blocks(
    rank: tuple[PrefixWorker, Slow], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    half, slow = rank
    monkeypatch.setattr(writer, "HELD_S", 0.2)
    report, names = WorkerReport(), [f"cell{i}" for i in range(5)]
    stored(half, names, report)
    requests = {f"r-{name}" for name in names}
    assert given_back(half, requests, report) == requests
    half.poll(report)
    assert {end.name for end in report.prefix_stored} == set(names)
    assert all(end.outcome is None for end in report.prefix_stored)
    assert slow.taken == 1  # the encode thread still waits for the first
    assert [r.levelname for r in caplog.records if "slower than the prompts" in r.message] == ["WARNING"]
    assert half.writer is not None
    assert half.writer.held == 0


def test_once_it_is_back_cells_are_stored_again(
    rank: tuple[PrefixWorker, Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    half, slow = rank
    monkeypatch.setattr(writer, "HELD_S", 0.2)
    stored(half, ["first"], WorkerReport())
    given_back(half, {"r-first"}, WorkerReport())
    slow.gate.set()
    monkeypatch.setattr(writer, "HELD_S", 60.0)
    report = WorkerReport()
    stored(half, ["second", "third"], report)
    assert given_back(half, {"r-second", "r-third"}, report) == {"r-second", "r-third"}
    assert [end.name for end in report.prefix_stored if end.outcome is not None] == ["second", "third"]
    assert slow.store.contains(["second", "third"]) == 2


def test_trouble_with_one_order_leaves_the_others(rank: tuple[PrefixWorker, Slow]) -> None:
    half, slow = rank
    slow.gate.set()
    report, fences = WorkerReport(), iter([RuntimeError("injected")])

    def fence() -> None:
        for error in fences:
            raise error

    assert half.writer is not None
    half.writer._fence = fence
    wrong = PrefixStore("r-wrong", tables(), DECISION, {0: ()})  # no name for this rank
    good = [PrefixStore(f"r-{name}", tables(), DECISION, {0: (name,)}) for name in ("unfenced", "good")]
    half.after_forward(StepMeta(prefix_store=[wrong, *good]), report)
    requests = {"r-wrong", "r-unfenced", "r-good"}
    assert given_back(half, requests, report) == requests
    until(lambda: bool(half.poll(report) or len(report.prefix_stored) >= 2))
    told = {end.name: (end.outcome is not None, end.reason) for end in report.prefix_stored}
    assert told == {"good": (True, ""), "unfenced": (False, "RuntimeError: injected")}


def test_a_half_of_the_store_that_fails_leaves_the_other(rank: tuple[PrefixWorker, Slow]) -> None:
    half, slow = rank
    slow.gate.set()
    loader = Recorder()
    half.loader, half.writer = loader, Recorder()  # type: ignore[assignment]  # all of their calls fail
    half.load(StepMeta(), WorkerReport())
    half.poll(WorkerReport())
    assert loader.called == ["cancel", "start", "poll"]
    assert failures(half._stats) == {"start_load_kv": 2, "get_finished": 2}


def test_a_shutdown_does_not_wait_for_a_store_that_hangs(
    rank: tuple[PrefixWorker, Slow], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    half, slow = rank
    monkeypatch.setattr(worker, "CLOSE_S", 0.1)
    stored(half, ["cell"], WorkerReport())
    until(lambda: slow.taken > 0)
    half.close()
    assert not slow.gate.is_set()
    assert "did not let go" in caplog.text
