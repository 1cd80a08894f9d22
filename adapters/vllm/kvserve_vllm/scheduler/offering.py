"""Prompts to offer: one decision each, tokens announced as prefill chunks are scheduled, a locator at the end."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.v1.request import RequestStatus

from kvserve_core.deployment import Deployment
from kvserve_core.latency import critical_bandwidth
from kvserve_core.peer import PeerInfo
from kvserve_core.policy import Decision, Outcome
from kvserve_core.transport import Endpoint, Locator
from kvserve_vllm import compat
from kvserve_vllm.compat import Scheduled
from kvserve_vllm.metadata import Open, Profile, RankInfo, StepMeta, WorkerReport
from kvserve_vllm.params import TransferParams, answer, prompt_digest
from kvserve_vllm.spec import ServedModel
from kvserve_vllm.stats import StatsBuffer
from kvserve_vllm.worker.offers import PREEMPTED

log = logging.getLogger(__name__)
MAX_UNSETTLED = 4096
"""Decisions kept until their outcomes come; the oldest give way."""
DONE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class Wanted:
    """A request that asks to be offered.

    total: tokens to send. prompt: its digest. transfer_id: None while nothing is open. started_s: when its prefill was
    first scheduled, on the monotonic clock.
    """

    request: Any
    params: TransferParams
    total: int
    prompt: str | None
    started_s: float = 0.0
    attempts: int = 0
    transfer_id: str | None = None
    announced: int = 0


@dataclass
class Unsettled:
    """A decision and the outcomes of the ranks so far."""

    decision: Decision
    outcomes: list[Outcome] = field(default_factory=list)


class Offering:
    """The producing half of the scheduler side."""

    def __init__(self, deployment: Deployment, model: ServedModel, stats: StatsBuffer) -> None:
        self._deployment, self._model, self._stats = deployment, model, stats
        self._endpoints: tuple[Endpoint, ...] = ()
        self._profiles: dict[str, Profile] = {}
        self._wanted: dict[str, Wanted] = {}
        self._drops: dict[str, str] = {}
        self._unsettled: OrderedDict[str, Unsettled] = OrderedDict()

    def meet(self, ranks: Sequence[RankInfo]) -> None:
        """What the ranks can encode: a profile must be one of every rank."""
        self._endpoints = tuple(rank.endpoint for rank in ranks if rank.endpoint is not None)
        common = set.intersection(*(set(rank.profiles) for rank in ranks))
        self._profiles = {name: ranks[0].profiles[name] for name in ranks[0].profiles if name in common}

    def arrived(self, request: Any, params: TransferParams) -> None:
        """A request asks for its KV to be offered."""
        total = self._model.sendable(request.num_prompt_tokens)
        if total > 0 and self._endpoints:
            self._wanted[request.request_id] = Wanted(request, params, total, prompt_digest(request))
            if self._model.has_state:
                leave_last_token(request)

    def plan(self, output: Any, meta: StepMeta) -> None:
        """What the workers are to do for the requests of this step."""
        meta.drop.update(self._drops)
        self._drops = {}
        for req_id in compat.preempted(output) & self._wanted.keys():
            if self._wanted[req_id].transfer_id is not None:
                meta.drop[req_id] = PREEMPTED
                self._wanted[req_id].transfer_id = None
        for entry in compat.scheduled(output):
            if wanted := self._wanted.get(entry.req_id):
                self._plan(wanted, entry, output.num_scheduled_tokens[entry.req_id], meta)

    def _plan(self, wanted: Wanted, entry: Scheduled, count: int, meta: StepMeta) -> None:
        if entry.fresh:
            if wanted.transfer_id is not None:  # its blocks are others now
                meta.drop[entry.req_id] = PREEMPTED
            self._open(wanted, entry, meta)
        elif wanted.transfer_id is None:
            return
        elif entry.blocks is not None:
            meta.grow[entry.req_id] = entry.blocks
        stop = min(entry.num_computed + count, wanted.total)
        if stop > wanted.announced:
            meta.ready[entry.req_id] = wanted.announced = stop

    def _open(self, wanted: Wanted, entry: Scheduled, meta: StepMeta) -> None:
        """A preempted request is offered anew, under an id of its own: what was read before is not to be mixed in."""
        suffix = f".{wanted.attempts}" if wanted.attempts else ""
        wanted.transfer_id = wanted.params.transfer_id + suffix
        wanted.attempts += 1
        wanted.announced = 0
        wanted.started_s = time.monotonic()
        decision = self._decide(wanted)
        self._unsettled[wanted.transfer_id] = Unsettled(decision)
        if len(self._unsettled) > MAX_UNSETTLED:
            self._unsettled.popitem(last=False)
        slim = Decision(decision.profile, decision.reason, decision.context, decision.bandwidth)
        blocks = entry.blocks or ()
        meta.open.append(Open(entry.req_id, wanted.transfer_id, wanted.total, slim, wanted.params.peer, blocks))

    def _decide(self, wanted: Wanted) -> Decision:
        peer = wanted.params.peer
        context = self._deployment.context(
            wanted.total,
            wanted.params.options,
            link=peer.link if peer else "default",
            elapsed_s=max(0.0, time.time() - wanted.request.arrival_time),
            acceptable=self._acceptable(peer),
        )
        decision = self._deployment.controller.choose(context)
        self._stats.add("decisions", 1, decision.profile, decision.reason.split(";")[0])
        return decision

    def _acceptable(self, peer: PeerInfo | None) -> frozenset[str]:
        return self._deployment.acceptable(self._profiles, peer)

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """``(keep its blocks, what the router gets)``. The workers hand the blocks back once they are encoded."""
        wanted = self._wanted.pop(request.request_id, None)
        if wanted is None or wanted.transfer_id is None:
            return False, None
        if request.status not in DONE or wanted.announced < wanted.total:
            self._drops[request.request_id] = f"the request ended as {request.status.name.lower()}"
            return True, None
        self._learn_prefill(wanted)
        profile = self._unsettled[wanted.transfer_id].decision.profile
        locator = Locator(wanted.transfer_id, wanted.total, self._endpoints, profile)
        return True, answer(locator, wanted.prompt)

    def _learn_prefill(self, wanted: Wanted) -> None:
        """How long prompts take here, and wait: a request that went on to generate says nothing of that."""
        if wanted.request.num_output_tokens > 1 or wanted.attempts > 1:
            return
        seconds = time.monotonic() - wanted.started_s
        queue_s = max(0.0, time.time() - wanted.request.arrival_time - seconds)
        self._deployment.controller.observe_prefill(wanted.request.num_prompt_tokens, seconds, queue_s)

    def learn(self, report: WorkerReport) -> None:
        """Outcomes of the workers: the controller sees a transfer once, when all ranks have told theirs."""
        for outcome in report.outcomes:
            unsettled = self._unsettled.get(outcome.transfer_id)
            if unsettled is None:
                continue
            unsettled.outcomes.append(outcome)
            if len(unsettled.outcomes) == len(self._endpoints):
                del self._unsettled[outcome.transfer_id]
                self._settle(unsettled)
        for transfer_id, reason in report.failed:
            if self._unsettled.pop(transfer_id, None) is not None:
                log.info("transfer %r was not delivered: %s", transfer_id, reason)
                self._stats.add("transfers", 1, "producer", "false")

    def _settle(self, unsettled: Unsettled) -> None:
        outcome, decision = joined(unsettled.outcomes), unsettled.decision
        self._deployment.controller.observe(decision, outcome)
        self._stats.transferred(outcome, "producer")
        self._stats.add("encode_seconds", outcome.encode_s)
        slo_s = decision.context.slo_s
        if slo_s is not None and decision.context.model_s + outcome.encode_s + outcome.total_s > slo_s:
            self._stats.add("slo_misses", 1)
        controller = self._deployment.controller
        goodput = controller.links.estimate(decision.context.link)
        self._stats.add("goodput_bytes_per_second", goodput, decision.context.link)
        nbytes = decision.context.nbytes
        for priced in controller.feasible(decision.context):
            if priced.profile.name == outcome.profile:
                encode_s, decode_s, wire_bytes = priced.costs(nbytes)
                pays_below = critical_bandwidth(nbytes / wire_bytes, nbytes / max(encode_s + decode_s, 1e-9))
                self._stats.add("break_even_bytes_per_second", pays_below, outcome.profile)


def leave_last_token(request: Any) -> None:
    """Stop the prefill one token short: recurrent state must be that of the tokens that are sent, not one more.

    The decode engine computes the last prompt token itself. What prefill samples instead is nobody's answer.
    """
    del request.prompt_token_ids[-1:]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """One transfer over several ranks: bytes add up, the slowest rank's seconds count."""
    first = outcomes[0]
    return replace(
        first,
        raw_bytes=sum(o.raw_bytes for o in outcomes),
        wire_bytes=sum(o.wire_bytes for o in outcomes),
        encode_s=max(o.encode_s for o in outcomes),
        transfer_s=max(o.transfer_s for o in outcomes),
        decode_s=max(o.decode_s for o in outcomes),
        total_s=max(o.total_s for o in outcomes),
        ok=all(o.ok for o in outcomes),
        reason="; ".join(o.reason for o in outcomes if o.reason),
    )
