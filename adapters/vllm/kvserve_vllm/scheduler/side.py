"""What the connector does in the scheduler: route requests to the offering and the fetching half."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvserve_core.deployment import Deployment
from kvserve_core.errors import ConfigError
from kvserve_vllm.guard import isolated
from kvserve_vllm.metadata import RankInfo, StepMeta, WorkerReport
from kvserve_vllm.params import TransferParams, description
from kvserve_vllm.prefix.scheduler import Prefixes
from kvserve_vllm.scheduler.fetching import Fetching
from kvserve_vllm.scheduler.offering import Offering
from kvserve_vllm.scheduler.pollution import Pollution
from kvserve_vllm.spec import ServedModel
from kvserve_vllm.stats import StatsBuffer

log = logging.getLogger(__name__)
NOTHING = TransferParams()


class SchedulerSide:
    """One per engine. wait: loads end before the forward pass of the step that needs them. store: of prefixes."""

    def __init__(
        self,
        role: Any,
        block_sizes: list[int],
        model: ServedModel,
        deployment: Deployment,
        wait: bool,
        store: str = "",
    ) -> None:
        self.stats = StatsBuffer(deployment.counters)
        self.stats.add("library_loaded", float(deployment.library is not None))
        self._deployment = deployment
        if role.is_kv_producer or store:  # what decides is made, or refused, before the first request comes
            _ = deployment.controller, deployment.classifier
        self._pollution = Pollution(deployment.settings.lossy_prefix_cache, block_sizes, self.stats)
        ranks = model.tp_size * model.pp_size
        self._offering = Offering(deployment, model, self.stats) if role.is_kv_producer else None
        self._fetching = Fetching(model, ranks, wait, self._pollution) if role.is_kv_consumer else None
        self._prefixes: Prefixes | None = None
        if store:
            self._prefixes = Prefixes(deployment, model, store, role, wait, self._pollution, self.stats)
        self._params: dict[str, TransferParams] = {}
        self._ranks: list[RankInfo] = []

    def meet(self, ranks: Mapping[tuple[int, int], RankInfo]) -> None:
        """The workers have opened their sessions; by (pipeline rank, tensor-parallel rank)."""
        self._ranks = [ranks[key] for key in sorted(ranks)]
        if self._offering is not None:
            self._offering.meet(self._ranks)
        if self._prefixes is not None:
            self._prefixes.meet(self._ranks)

    def bind(self, block_pool: Any) -> None:
        """The engine's block pool."""
        self._pollution.bind(block_pool)

    def arrived(self, request: Any) -> None:
        """A new request. What it says wrongly is logged and ignored: it is computed as without us."""
        try:
            params = TransferParams.parse(request.kv_transfer_params)
        except ConfigError as error:
            log.warning("request %r: %.500s; its KV is neither offered nor fetched", request.request_id, error)
            return  # not from the store either: what it wanted of its quality is not known
        self._params[request.request_id] = params
        if params.offer and (offering := self._offering) is not None:
            self._isolated("on_new_request", lambda: offering.arrived(request, params))
        if params.fetch and (fetching := self._fetching) is not None:
            self._isolated("on_new_request", lambda: fetching.arrived(request, params))
        if (prefixes := self._prefixes) is not None:
            self._isolated("on_new_request", lambda: prefixes.arrived(request, params))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the computed ones: from the peer it names, else from the store."""
        if self._prefixes is not None and not self._params.get(request.request_id, NOTHING).fetch:
            return self._prefixes.matched(request, computed)
        return self._fetching.matched(request, computed) if self._fetching is not None else (0, False)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Blocks are there."""
        ids = tuple(list(group) for group in blocks.get_block_ids())
        hook = "update_state_after_alloc"
        self._isolated(hook, lambda: self._pollution.allocated(request.request_id, ids))
        if (fetching := self._fetching) is not None:
            self._isolated(hook, lambda: fetching.allocated(request, ids, external))
        if (prefixes := self._prefixes) is not None:
            self._isolated(hook, lambda: prefixes.allocated(request, ids, external))

    def plan(self, output: Any) -> StepMeta:
        """What the workers are to do in this step."""
        meta, hook = StepMeta(idle=getattr(output, "total_num_scheduled_tokens", None) == 0), "build_connector_meta"
        self._isolated(hook, lambda: self._pollution.plan(output))
        if (fetching := self._fetching) is not None:
            self._isolated(hook, lambda: fetching.plan(meta))
        if (prefixes := self._prefixes) is not None:
            self._isolated(hook, lambda: prefixes.plan(output, meta))
        if (offering := self._offering) is not None:
            self._isolated(hook, lambda: offering.plan(output, meta, loads_within(meta)))
        return meta

    def learn(self, report: WorkerReport) -> None:
        """What the workers saw."""
        for half in (self._offering, self._fetching, self._prefixes):
            if half is not None:
                self._isolated("update_connector_output", partial(half.learn, report))

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """``(keep its blocks, what the router gets)``."""
        params = self._params.pop(request.request_id, NOTHING)
        self._isolated("request_finished", lambda: self._pollution.finished(request.request_id))
        if (fetching := self._fetching) is not None:
            self._isolated("request_finished", lambda: fetching.finished(request))
        keep, answer = self._end_offer(request, params)
        if answer is None and params.describe:
            peer = next((rank.peer for rank in self._ranks if rank.peer is not None), None)
            answer = description(peer) if peer is not None else None
        if (prefixes := self._prefixes) is not None:
            needed = self._held(prefixes, request.request_id, True)
            keep |= isolated(self.stats, "request_finished", lambda: prefixes.finished(request), needed)
        return keep, answer

    def _end_offer(self, request: Any, params: TransferParams) -> tuple[bool, dict[str, Any] | None]:
        """Blocks that the workers hold stay theirs whatever fails: the engine ends when it is handed back what it has
        freed already."""
        offering, req_id = self._offering, request.request_id
        if offering is None:
            return False, None
        needed = self._held(offering, req_id, params.offer)
        ended = isolated(self.stats, "request_finished", lambda: offering.finished(request), None)
        if ended is None:
            self._isolated("request_finished", lambda: offering.give_up(req_id))
        return ended or (needed, None)

    def _held(self, half: Offering | Prefixes, req_id: str, in_doubt: bool) -> bool:
        return isolated(self.stats, "request_finished", lambda: half.holds(req_id), in_doubt)

    def _isolated(self, hook: str, part: Callable[[], None]) -> None:
        isolated(self.stats, hook, part, None)

    def close(self) -> None:
        """Nothing runs here that would not end by itself; sockets of this process are closed."""
        self._deployment.close()


def loads_within(meta: StepMeta) -> set[str]:
    """Requests whose load ends within the step, before the forward pass that goes on from it."""
    return {load.req_id for load in (*meta.load, *meta.prefix_load) if load.wait}
