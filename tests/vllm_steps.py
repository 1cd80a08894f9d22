"""The scheduler side of the connector without an engine: requests, steps, and what an engine would ask of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.v1.request import RequestStatus

from fake_engine import dense
from kvserve_core.deployment import Deployment
from kvserve_core.handshake import peer_info
from kvserve_core.policy import Outcome
from kvserve_core.registry import default_registry
from kvserve_core.settings import Settings
from kvserve_core.spec import whole
from kvserve_core.transport import Endpoint, Locator
from kvserve_vllm.metadata import Profile, RankInfo
from kvserve_vllm.scheduler.offering import Offering
from kvserve_vllm.scheduler.side import SchedulerSide
from kvserve_vllm.spec import ServedModel
from kvserve_vllm.stats import StatsBuffer

KV = dense()
LENGTH = 200
TOTAL = LENGTH - 1
BOTH = SimpleNamespace(is_kv_producer=True, is_kv_consumer=True)
OFFER = {"do_remote_decode": True}
OUTCOME = Outcome("t", "raw", 1000, 1000, transfer_s=1.0, total_s=1.0)
PEER = peer_info(KV, whole(KV), default_registry())
LOCATOR = Locator("source", TOTAL, (Endpoint("tcp://y:1", whole(KV)),), "raw")


def request(req_id: str = "r", transfer_id: str = "t", arrived: float | None = None, **params: Any) -> Any:
    return SimpleNamespace(
        request_id=req_id,
        num_prompt_tokens=LENGTH,
        prompt_token_ids=list(range(LENGTH)),
        lora_request=None,
        mm_features=[],
        arrival_time=time.time() if arrived is None else arrived,
        num_output_tokens=1,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
        kv_transfer_params=OFFER | params | {"kvserve": {"transfer_id": transfer_id} | params.get("kvserve", {})},
    )


def step(
    new: Mapping[str, int] | None = None,
    more: Mapping[str, tuple[int, int]] | None = None,
    preempted: Sequence[str] = (),
    computed: int = 0,
) -> Any:
    """new: tokens of requests scheduled first. more: ``(computed, tokens)`` of running ones, which get block 3."""
    new, more = new or {}, more or {}
    cached = SimpleNamespace(
        req_ids=list(more),
        new_block_ids=[([3],) for _ in more],
        num_computed_tokens=[at for at, _ in more.values()],
        resumed_req_ids=set(),
    )
    return SimpleNamespace(
        preempted_req_ids=set(preempted),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=([1, 2],), num_computed_tokens=computed) for name in new
        ],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={**new, **{name: count for name, (_, count) in more.items()}},
    )


def with_lossless(accept: str) -> SchedulerSide:
    """An engine that prefers ``lossless``, whose stages decode anywhere."""
    policy = {"name": "static", "configuration": {"profile": "lossless"}}
    deployment = Deployment(Settings.model_validate({"policy": policy, "peers": {"accept": accept}}), KV)
    made = SchedulerSide(BOTH, [64], ServedModel(KV, (), 1, 1, 1), deployment, True)
    built = deployment.pipelines(whole(KV))
    profiles = {name: Profile(tuple(p.chains), frozenset(p.used_artefacts)) for name, p in built.items()}
    made.meet({(0, 0): RankInfo(Endpoint("tcp://x:1", whole(KV)), profiles, None)})
    return made


def offered(side: SchedulerSide, name: str, **params: Any) -> str:
    """The profile that the next request is offered with, under a transfer id that is its own name."""
    asked = request(name, name, **params)
    side.arrived(asked)
    (op,) = side.plan(step({name: LENGTH})).open
    side.finished(asked)
    return op.decision.profile


def blocks(*ids: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def both_halves() -> SchedulerSide:
    """Both halves of an engine of one rank, with sync loads."""
    made = SchedulerSide(BOTH, [64], ServedModel(KV, (), 1, 1, 1), Deployment(Settings(), KV), True)
    made.meet({(0, 0): RankInfo(Endpoint("tcp://x:1", whole(KV)), {"raw": Profile((), frozenset())}, None)})
    return made


def failures(stats: StatsBuffer) -> dict[str, float]:
    """Hooks that failed, as they are reported."""
    taken = stats.take()
    assert taken is not None
    return {labels[0]: count for labels, count in taken.data.get("hook_failures", [])}


def offering(side: SchedulerSide) -> Offering:
    assert side._offering is not None
    return side._offering


def locator() -> dict[str, Any]:
    return dict(msgspec.to_builtins(LOCATOR))
