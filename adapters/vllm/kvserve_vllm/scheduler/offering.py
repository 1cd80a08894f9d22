"""Prompts to offer: one decision each, tokens announced as prefill chunks are scheduled, a locator at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

from vllm.v1.request import RequestStatus

from kvserve_core.deployment import Deployment
from kvserve_core.peer import PeerInfo
from kvserve_core.policy import Decision
from kvserve_core.spec import SEGMENT_TOKENS
from kvserve_core.transport import Endpoint, Locator
from kvserve_vllm import compat
from kvserve_vllm.arrival import Arrival
from kvserve_vllm.compat import Scheduled
from kvserve_vllm.metadata import Open, Profile, RankInfo, StepMeta, WorkerReport, common_profiles
from kvserve_vllm.params import TransferParams, answer, prompt_digest
from kvserve_vllm.scheduler.settling import Settling
from kvserve_vllm.scheduler.wanted import Wanted, leave_last_token
from kvserve_vllm.spec import ServedModel
from kvserve_vllm.stats import StatsBuffer
from kvserve_vllm.worker.offers import PREEMPTED

log = logging.getLogger(__name__)
BROKEN = "its offer failed"
NOT_LOADED = "the load that it went on from failed"
DONE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class Offering:
    """The producing half of the scheduler side."""

    def __init__(self, deployment: Deployment, model: ServedModel, stats: StatsBuffer) -> None:
        self._deployment, self._model, self._stats = deployment, model, stats
        self._endpoints: tuple[Endpoint, ...] = ()
        self._profiles: dict[str, Profile] = {}
        self._wanted: dict[str, Wanted] = {}
        self._drops: dict[str, str] = {}
        self._late: dict[str, Wanted] = {}
        self._ranks = 1
        self._unsettled = Settling(deployment, stats)

    def meet(self, ranks: Sequence[RankInfo]) -> None:
        """What the ranks can encode: a profile must be one of every rank."""
        self._ranks = len(ranks)
        self._endpoints = tuple(rank.endpoint for rank in ranks if rank.endpoint is not None)
        self._unsettled.ranks = len(self._endpoints)
        self._profiles = common_profiles(ranks)

    def arrived(self, request: Any, params: TransferParams) -> None:
        """A request asks for its KV to be offered."""
        total = self._model.sendable(request.num_prompt_tokens)
        if total > 0 and self._endpoints:
            self._wanted[request.request_id] = Wanted(
                request, params, total, prompt_digest(request), Arrival.of(request)
            )
            if self._model.has_state:
                leave_last_token(request)

    def plan(self, output: Any, meta: StepMeta, loading: Collection[str] = ()) -> None:
        """What the workers are to do for the requests of this step. loading: those whose load ends within the step."""
        meta.drop.update(self._drops)
        self._drops = {}
        self._plan_late(meta)
        lost, entries = self._read(output)
        for req_id in lost & self._wanted.keys():
            self._lose(self._wanted[req_id], meta)
        for entry in entries:
            wanted = self._wanted.get(entry.req_id)
            if wanted is None:
                continue
            try:
                if entry.req_id in loading:
                    wanted.loads, wanted.not_loaded = self._ranks, False
                self._plan(wanted, entry, output.num_scheduled_tokens[entry.req_id], meta)
            except Exception:  # one request's trouble: the others of the step go on
                log.exception("request %r is not offered", entry.req_id)
                self._stats.hook_failed("build_connector_meta")
                self._break(wanted)

    def _read(self, output: Any) -> tuple[frozenset[str], list[Scheduled]]:
        """Requests that lost their blocks, and those of this step. A missed block puts later ones out of place."""
        try:
            return compat.preempted(output), list(compat.scheduled(output))
        except Exception:
            for wanted in self._wanted.values():
                self._break(wanted)
            raise

    def _plan_late(self, meta: StepMeta) -> None:
        """Requests that ended in the step of their load, once that load is known to have ended well or not."""
        for req_id, wanted in list(self._late.items()):
            if wanted.not_loaded:
                meta.drop[req_id] = NOT_LOADED
            elif wanted.loads <= 0:
                meta.ready[req_id] = wanted.total
            else:
                continue
            del self._late[req_id]

    def _lose(self, wanted: Wanted, meta: StepMeta) -> None:
        """What it was offered from is gone: its blocks, or what is in them."""
        if wanted.transfer_id is not None:
            meta.drop[wanted.request.request_id] = PREEMPTED
            wanted.transfer_id = None

    def _break(self, wanted: Wanted) -> None:
        """The workers end what they hold of it, and give its blocks back when it ends."""
        wanted.failed = True
        if wanted.transfer_id is not None:
            self._drops[wanted.request.request_id] = BROKEN

    def _plan(self, wanted: Wanted, entry: Scheduled, count: int, meta: StepMeta) -> None:
        if entry.fresh:
            wanted.blocks = entry.blocks or ()
            self._lose(wanted, meta)
            self._open(wanted, entry.num_computed, meta)
        elif wanted.failed:
            return
        else:
            self._go_on(wanted, entry, meta)
        wanted.computed = min(entry.num_computed + count, wanted.total)
        if wanted.transfer_id is None or wanted.loads > 0:
            return  # a load that fails in this step leaves garbage behind the tokens that it lacks
        if wanted.computed > wanted.announced:
            meta.ready[entry.req_id] = wanted.announced = wanted.computed

    def _go_on(self, wanted: Wanted, entry: Scheduled, meta: StepMeta) -> None:
        new = entry.blocks
        if new is not None:
            wanted.blocks = tuple([*held, *ids] for held, ids in zip(wanted.blocks, new, strict=True))
        if wanted.not_loaded:
            self._lose(wanted, meta)
            self._open(wanted, entry.num_computed, meta)
        elif new is not None and wanted.transfer_id is not None:
            meta.grow[entry.req_id] = new

    def _open(self, wanted: Wanted, computed: int, meta: StepMeta) -> None:
        """A preempted request is offered anew, under an id of its own: what was read before is not to be mixed in."""
        suffix = f".{wanted.attempts}" if wanted.attempts else ""
        transfer_id = wanted.params.transfer_id + suffix
        wanted.attempts += 1
        wanted.announced, wanted.not_loaded, wanted.failed = 0, False, False
        wanted.started_s, wanted.started_at = time.monotonic(), computed
        if transfer_id in self._unsettled:
            log.warning("transfer %r is not offered: the id is in use, name a fresh one per request", transfer_id)
            return
        decision = self._decide(wanted)
        slim = Decision(decision.profile, decision.reason, decision.context, decision.bandwidth)
        blocks = tuple(list(ids) for ids in wanted.blocks)
        req_id = wanted.request.request_id
        meta.open.append(Open(req_id, transfer_id, wanted.total, slim, wanted.params.peer, blocks))
        wanted.transfer_id, wanted.profile = transfer_id, decision.profile
        self._unsettled.add(transfer_id, decision, named=wanted.params.peer is not None)

    def _decide(self, wanted: Wanted) -> Decision:
        peer = wanted.params.peer
        context = self._deployment.context(
            wanted.total,
            wanted.params.options,
            link=peer.link if peer else "default",
            elapsed_s=wanted.arrival.waited_s(),
            acceptable=self._acceptable(peer),
        )
        decision = self._deployment.controller.choose(context)
        self._stats.add("decisions", 1, decision.profile, decision.reason.split(";")[0])
        return decision

    def _acceptable(self, peer: PeerInfo | None) -> frozenset[str]:
        found = self._deployment.acceptable(self._profiles, peer)
        return found if peer is not None else self._unsettled.refusals.without(found)

    def holds(self, req_id: str) -> bool:
        """Whether the workers need the blocks of a request that has not ended yet, and will hand them back."""
        wanted = self._wanted.get(req_id)
        return wanted is not None and wanted.transfer_id is not None

    def give_up(self, req_id: str) -> None:
        """The request ended and its answer names no transfer: workers that hold its blocks are to hand them back."""
        self._wanted.pop(req_id, None)
        self._drops[req_id] = BROKEN

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """``(keep its blocks, what the router gets)``. The workers hand the blocks back once they are encoded."""
        wanted = self._wanted.pop(request.request_id, None)
        if wanted is None or wanted.transfer_id is None:
            return False, None
        try:
            problem = self._problem(wanted, request)
            answered = None if problem else self._answer(wanted)
        except Exception:  # the workers hold its blocks: they must give them back, whatever is answered
            log.exception("request %r is answered without its transfer", request.request_id)
            self._stats.hook_failed("request_finished")
            self._late.pop(request.request_id, None)
            problem, answered = BROKEN, None
        if problem:
            self._drops[request.request_id] = problem
        return True, answered

    def _answer(self, wanted: Wanted) -> dict[str, Any]:
        if wanted.announced < wanted.total:
            self._late[wanted.request.request_id] = wanted
        self._learn_prefill(wanted)
        locator = Locator(wanted.transfer_id or "", wanted.total, self._endpoints, wanted.profile)
        return answer(locator, wanted.prompt)

    def _problem(self, wanted: Wanted, request: Any) -> str | None:
        """Why the KV of a request that ended is of no use."""
        if wanted.failed:
            return BROKEN
        if wanted.not_loaded:
            return NOT_LOADED
        complete = wanted.announced >= wanted.total or (wanted.loads > 0 and wanted.computed >= wanted.total)
        if request.status in DONE and complete:
            return None
        return f"the request ended as {request.status.name.lower()}"

    def _learn_prefill(self, wanted: Wanted) -> None:
        """How long prompts take here, and wait: a request that went on to generate says nothing of that."""
        if wanted.request.num_output_tokens > 1 or wanted.attempts > 1:
            return
        tokens = wanted.request.num_prompt_tokens - wanted.started_at
        if wanted.started_at > 0 and tokens < SEGMENT_TOKENS:
            return  # nearly all of it was cached: what is left says nothing of that either
        seconds = time.monotonic() - wanted.started_s
        self._deployment.controller.observe_prefill(tokens, seconds, max(0.0, wanted.arrival.waited_s() - seconds))

    def learn(self, report: WorkerReport) -> None:
        """Outcomes of the workers: the controller sees a transfer once, when all ranks have told theirs."""
        for outcome in report.outcomes:
            self._unsettled.ended(outcome)
        for transfer_id, reason in report.failed:
            if self._unsettled.failed(transfer_id, reason):
                self._fail(transfer_id)
        for end in (*report.loads, *report.prefix_loaded):
            wanted = self._wanted.get(end.req_id) or self._late.get(end.req_id)
            if wanted is not None and wanted.loads > 0:
                wanted.loads -= 1
                wanted.not_loaded = wanted.not_loaded or bool(end.reason)

    def _fail(self, transfer_id: str) -> None:
        """On some rank a running request is not offered; what the others hold of it ends."""
        for wanted in self._wanted.values():
            if wanted.transfer_id == transfer_id:
                self._break(wanted)
