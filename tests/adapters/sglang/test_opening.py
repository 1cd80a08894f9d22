"""From a decision to a transfer on offer, and what happens where it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import fake_sessions
import numpy as np
import pytest
import small_models
from fake_sessions import TOTAL, full, ignore, outcome

from kvserve_core.deployment import Deployment
from kvserve_core.errors import StoreFull, UnsupportedSpecError
from kvserve_core.requests import RequestOptions
from kvserve_core.settings import Settings
from kvserve_core.spec import SEGMENT_TOKENS, whole
from kvserve_sglang import opening
from kvserve_sglang.hooks import describe_request, prefilled, text_of
from kvserve_sglang.messages import Decided, Reported
from kvserve_sglang.opening import EARLY_KEPT, Opening, overdue
from kvserve_sglang.prefill_rank import Rank
from kvserve_sglang.sending import Sending, Target
from kvserve_sglang.slots import Slots


@dataclass
class Counted:
    """An exporter that keeps what it is told."""

    counts: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    settled: list[Any] = field(default_factory=list)

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        self.counts.append((name, labels))


@dataclass
class Bench:
    """One rank's opening with the real controller and pipelines, and a fake session."""

    first: bool
    deployment: Deployment
    told: list[tuple[tuple[int, int], Any]] = field(default_factory=list)
    producer: fake_sessions.Producer = field(default_factory=fake_sessions.Producer)
    rooms: fake_sessions.Rooms = field(default_factory=fake_sessions.Rooms)
    exporter: Any = field(default_factory=Counted)

    def __post_init__(self) -> None:
        ranks: Any = SimpleNamespace(
            first=self.first,
            others=[(1, 0)],
            tell=lambda rank, message: self.told.append((rank, message)),
            reporting=lambda size: 2,
        )
        pipelines = self.deployment.pipelines(whole(self.deployment.kv))
        layout: Any = None
        number = 0 if self.first else 1
        rank = Rank(self.rooms, ranks, self.deployment, pipelines, layout, self.exporter, number, None)
        self.opening = Opening(rank, self.producer)

    def sending(self, room: int = 1) -> Sending:
        consumer = self.deployment.consumer(whole(self.deployment.kv), ignore)
        register: Any = SimpleNamespace(peer=consumer.peer, exact=False)
        wanted: Any = SimpleNamespace()
        consumer.close()
        return Sending(room, Slots(16), (Target(wanted, register),), total=TOTAL)


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    made = Deployment.load(Settings(bandwidth="1Mbps"), small_models.model())
    yield made
    made.close()


def decided(room: int, profile: str = "lossless") -> Decided:
    return Decided(room, f"t{room}", profile, "why", "link")


def test_the_first_rank_decides_and_tells_the_others(deployment: Deployment) -> None:
    bench = Bench(True, deployment)
    made = bench.opening.decision(bench.sending(), active=0)
    assert made is not None
    assert bench.told == [((1, 0), made)]
    assert bench.exporter.counts == [("decisions", {"profile": made.profile, "reason": made.reason.split(";")[0]})]


def test_another_rank_takes_the_word_that_came_before_or_waits(deployment: Deployment) -> None:
    bench = Bench(False, deployment)
    bench.opening.keep(decided(1))
    early, late = bench.sending(1), bench.sending(2)
    assert bench.opening.decision(early, active=0) == decided(1)
    assert early.waiting_since is None
    assert bench.opening.decision(late, active=0) is None
    assert late.waiting_since is not None
    assert bench.told == []


def test_words_for_requests_that_never_come_are_bounded(deployment: Deployment) -> None:
    bench = Bench(False, deployment)
    for room in range(EARLY_KEPT + 1):
        bench.opening.keep(decided(room))
    assert bench.opening.decision(bench.sending(0), active=0) is None
    assert bench.opening.decision(bench.sending(1), active=0) == decided(1)


def test_who_waited_too_long_is_told_once(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    sending = Bench(False, deployment).sending()
    assert not overdue(sending)
    sending.waiting_since = 100.0
    monkeypatch.setattr(opening.time, "monotonic", lambda: 100.0 + opening.DECISION_S)
    assert not overdue(sending)
    monkeypatch.setattr(opening.time, "monotonic", lambda: 100.1 + opening.DECISION_S)
    assert overdue(sending)
    assert not overdue(sending)


def test_what_a_rank_cannot_serve_it_sends_raw_and_says_so(deployment: Deployment) -> None:
    bench = Bench(False, deployment)
    errors = iter([UnsupportedSpecError("not here")])

    def refuse() -> None:
        if (error := next(errors, None)) is not None:
            raise error

    bench.producer.during_open = refuse
    sending = bench.sending()
    endpoint, profile = bench.opening.open(sending, decided(1))
    assert profile == "raw"
    assert bench.exporter.counts == [("fallbacks", {"rung": "profile"})], "RAW counts segments"
    sending.opened("t1")
    bench.opening.announce(sending, endpoint, profile)
    assert bench.rooms.located == ["t1"]


def test_a_full_store_and_a_raw_that_fails_end_the_request(deployment: Deployment) -> None:
    bench = Bench(False, deployment)
    bench.producer.during_open = full
    with pytest.raises(StoreFull):
        bench.opening.open(bench.sending(), decided(1))

    def refuse() -> None:
        raise UnsupportedSpecError("not here")

    bench.producer.during_open = refuse
    with pytest.raises(UnsupportedSpecError):
        bench.opening.open(bench.sending(), decided(1, "raw"))
    assert not bench.exporter.counts


def test_reports_go_to_the_first_rank(deployment: Deployment) -> None:
    bench = Bench(False, deployment)
    bench.opening.report(outcome())
    assert bench.told == [((0, 0), Reported(1, outcome()))]


def test_prefill_seconds_reach_the_controller_of_the_first_rank_alone(deployment: Deployment) -> None:
    Bench(False, deployment).opening.prefilled(1000, 2.0)
    model = deployment.controller.model
    assert model.prefill_s_per_token is None
    Bench(True, deployment).opening.prefilled(1000, 2.0)
    assert model.prefill_s_per_token == 0.002
    assert model.seconds(500) == 1.0, "what a request waited is a part of its elapsed time, not of what is to come"


CODE = "import os\ndef f(x):\n    return x + 1\nfor i in range(3):\n    print(f(i))\n"


@pytest.fixture
def classifying() -> Iterator[Deployment]:
    settings = Settings.model_validate({"bandwidth": "1Mbps", "classifier": "rules", "workload": "prose"})
    made = Deployment.load(settings, small_models.model())
    yield made
    made.close()


def workload(bench: Bench, monkeypatch: pytest.MonkeyPatch, **given: Any) -> str:
    seen: list[str] = []
    real = bench.deployment.controller.choose

    def choose(context: Any) -> Any:
        seen.append(context.workload)
        return real(context)

    monkeypatch.setattr(bench.deployment.controller, "choose", choose)
    sending = bench.sending()
    for name, value in given.items():
        setattr(sending, name, value)
    assert bench.opening.decision(sending, active=0) is not None
    (found,) = seen
    return found


def test_a_classifier_names_the_workload_of_a_prompt(classifying: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    assert workload(Bench(True, classifying), monkeypatch, text=lambda: CODE) == "code"


def test_a_request_that_names_its_workload_is_not_read(
    classifying: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RequestOptions(workload="maths")
    assert workload(Bench(True, classifying), monkeypatch, text=lambda: CODE, options=options) == "maths"


def test_without_a_text_or_with_a_classifier_that_fails_it_is_the_deployments(
    classifying: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert workload(Bench(True, classifying), monkeypatch) == "prose"

    def fail() -> str:
        raise ValueError("a tokenizer's")

    bench = Bench(True, classifying)
    assert workload(bench, monkeypatch, text=fail) == "prose"
    assert ("hook_failures", {"hook": "classifier"}) in bench.exporter.counts


def test_a_prompts_text_is_its_beginning_and_end() -> None:
    tokenizer = SimpleNamespace(decode=lambda tokens: f"{tokens[0]}-{tokens[-1]}")
    asked = SimpleNamespace(origin_input_ids=range(1536), tokenizer=tokenizer)
    assert text_of(asked) == "0-1535"
    asked.origin_input_ids = range(5000)
    assert text_of(asked) == "0-1023\n4488-4999"
    asked.tokenizer = None
    assert text_of(asked) == ""


def req(tokens: int = 600, cached: int = 0, began_s: float = 10.0, ended_s: float = 12.5) -> Any:
    stats = SimpleNamespace(forward_entry_time=began_s, prefill_finished_time=ended_s)
    return SimpleNamespace(origin_input_ids=np.zeros(tokens), cached_tokens=cached, time_stats=stats)


def test_a_prefill_is_timed_from_its_first_batch_and_counts_what_was_computed() -> None:
    assert prefilled(req()) == (600, 2.5)
    assert prefilled(req(cached=100)) == (500, 2.5)
    assert prefilled(req(tokens=20)) == (20, 2.5)


@pytest.mark.parametrize(
    "unknown",
    [
        req(began_s=0.0),
        req(ended_s=0.0),
        req(cached=600 - SEGMENT_TOKENS + 1),
        SimpleNamespace(origin_input_ids=[1, 2]),
    ],
)
def test_a_prefill_that_sglang_did_not_time_or_that_was_cached_says_nothing(unknown: Any) -> None:
    assert prefilled(unknown) is None


class Described:
    """A request's sender, which is told something or breaks."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.told, self.failed = error, list[int](), list[str]()
        self.kv_mgr = SimpleNamespace(hook_failed=self.failed.append)

    def describe(self, num_tokens: int, *rest: Any) -> None:
        if self.error is not None:
            raise self.error
        self.told.append(num_tokens)


def described(sender: object, ready: bool = True, **given: Any) -> bool:
    asked = SimpleNamespace(disagg_kv_sender=sender, rid="r1", sampling_params=SimpleNamespace())
    asked.__dict__.update({"origin_input_ids": range(7)} | given)
    return describe_request(ready, None, asked)


def test_a_request_is_described_once_it_is_ready() -> None:
    sender = Described()
    assert not described(sender, ready=False)
    assert sender.told == []
    assert described(sender)
    assert (sender.told, sender.failed) == ([7], [])


@pytest.mark.parametrize(("error", "given"), [(ValueError("a test's"), {}), (None, {"origin_input_ids": None})])
def test_a_request_that_cannot_be_described_goes_on_and_is_counted(
    error: Exception | None, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    sender = Described(error)
    assert described(sender, **given)
    assert (sender.told, sender.failed) == ([], ["describe"])
    assert "'r1'" in caplog.text


def test_the_sender_of_another_backend_is_left_alone() -> None:
    assert described(object())
    assert described(None)
