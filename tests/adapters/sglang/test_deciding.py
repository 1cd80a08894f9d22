"""One decision a request, of the real controller; and what it learns from the ranks' reports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import small_models

from kvserve_core.deployment import Deployment
from kvserve_core.peer import PeerInfo
from kvserve_core.policy import RAW, Outcome
from kvserve_core.requests import RequestOptions
from kvserve_core.settings import Settings
from kvserve_core.spec import whole
from kvserve_sglang.deciding import REMEMBERED, Judge, as_decision
from kvserve_sglang.messages import Decided, Register

TOTAL = 4096
READS_RAW = {"codec:none": (1,)}


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    made = Deployment.load(Settings(bandwidth="100kbps"), small_models.model())
    yield made
    made.close()


@pytest.fixture
def judge(deployment: Deployment) -> Judge:
    return Judge(deployment, deployment.pipelines(whole(deployment.kv)))


class Lossy:
    """A pipeline that everybody can read."""

    lossless, chains, used_artefacts = False, (), frozenset()


def asked(deployment: Deployment, exact: bool = False, reads: dict[str, tuple[int, ...]] | None = None) -> Register:
    kv = deployment.kv
    consumer = deployment.consumer(whole(kv), lambda *args: None)
    peer: PeerInfo = consumer.peer
    consumer.close()
    if reads is not None:
        peer = PeerInfo(peer.wire, reads, peer.device, peer.fingerprint, peer.shard)
    return Register("127.0.0.1", 1, "session", peer, {}, exact)


def decide(judge: Judge, *peers: Register, ranks: int = 1, to_prefill: int = 0) -> Decided:
    given = {"ranks": ranks, "elapsed_s": 0.0, "to_prefill": to_prefill, "active": 1}
    return judge.decide(7, TOTAL, peers, RequestOptions(), **given)[0]


def outcome(decided: Decided, **more: float) -> Outcome:
    cost = {"raw_bytes": 1_000_000, "wire_bytes": 500_000, "transfer_s": 0.5, "encode_s": 0.1, **more}
    return Outcome(decided.transfer_id, decided.profile, link=decided.link, **cost)


def test_a_slow_link_is_sent_less_and_every_transfer_has_a_name_of_its_own(
    deployment: Deployment, judge: Judge
) -> None:
    first, second = (decide(judge, asked(deployment)) for _ in range(2))
    assert (first.room, first.profile) == (7, "lossless")
    assert first.transfer_id.startswith("7-")
    assert first.transfer_id != second.transfer_id


def test_the_profile_is_one_that_every_rank_can_read(deployment: Deployment, judge: Judge) -> None:
    assert decide(judge, asked(deployment), asked(deployment, reads=READS_RAW)).profile == RAW


def test_who_shares_prefixes_is_offered_exact_profiles_only(deployment: Deployment) -> None:
    pipelines = deployment.pipelines(whole(deployment.kv))
    judge = Judge(deployment, {**pipelines, "loss": Lossy()})
    assert "loss" in judge._acceptable([asked(deployment)])
    assert judge._acceptable([asked(deployment), asked(deployment, exact=True)]) == frozenset(pipelines)


def test_the_controller_learns_from_the_whole_when_the_last_rank_has_reported(
    deployment: Deployment, judge: Judge
) -> None:
    decided = decide(judge, asked(deployment), ranks=2)
    links = deployment.controller.links
    assert judge.report(0, outcome(decided)) is None
    assert judge.report(0, outcome(decided)) is None, "the same rank again is no other rank"
    assert links.estimate(decided.link) == 12_500
    ended = judge.report(1, outcome(decided, transfer_s=1.0))
    assert ended is not None
    decision, joined = ended
    assert decision.profile == decided.profile
    assert (joined.raw_bytes, joined.wire_bytes, joined.transfer_s) == (2_000_000, 1_000_000, 1.0)
    assert links.estimate(decided.link) > 50_000
    assert judge.report(1, outcome(decided)) is None, "it is settled"


def test_what_ended_without_reports_is_forgotten(deployment: Deployment, judge: Judge) -> None:
    decided = decide(judge, asked(deployment))
    judge.forget(decided.transfer_id)
    assert judge.report(0, outcome(decided)) is None


def test_decisions_that_nobody_reports_on_are_bounded(deployment: Deployment, judge: Judge) -> None:
    mine = asked(deployment)
    first = decide(judge, mine)
    for _ in range(REMEMBERED):
        decide(judge, mine)
    assert judge.report(0, outcome(first)) is None


def test_prefill_that_is_to_come_counts_as_the_engine_takes_it(deployment: Deployment, judge: Judge) -> None:
    deployment.controller.observe_prefill(1000, 2.0)
    given = {"ranks": 1, "elapsed_s": 0.25, "active": 1}
    _, now = judge.decide(1, TOTAL, [asked(deployment)], RequestOptions(), to_prefill=0, **given)
    _, later = judge.decide(2, TOTAL, [asked(deployment)], RequestOptions(), to_prefill=500, **given)
    assert (now.context.model_s, later.context.model_s) == (0.0, pytest.approx(1.0))
    assert later.context.slo_s == pytest.approx(deployment.settings.slo - 0.25)


def test_a_rank_that_cannot_serve_what_was_decided_says_so() -> None:
    decided = Decided(1, "t", "lossless", "fastest", "link")
    assert as_decision(decided, "lossless").reason == "fastest"
    fallback = as_decision(decided, RAW)
    assert (fallback.profile, fallback.reason, fallback.context.link) == (RAW, "fallback", "link")
