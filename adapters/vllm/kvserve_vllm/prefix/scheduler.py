"""Stored prefixes on the scheduler side: look up what a prompt can load, and keep the cells that it computes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from kvserve_core.deployment import Deployment
from kvserve_core.policy import LOSSLESS, RAW, Outcome
from kvserve_core.prefix import classes_for
from kvserve_core.spec import SEGMENT_TOKENS
from kvserve_core.transport import Locator
from kvserve_vllm import compat
from kvserve_vllm.arrival import Arrival
from kvserve_vllm.metadata import Blocks, RankInfo, StepMeta, WorkerReport, common_profiles
from kvserve_vllm.params import TransferParams
from kvserve_vllm.prefix.entry import Entry, Stage
from kvserve_vllm.prefix.keeping import Keeping
from kvserve_vllm.prefix.keys import prompt_keys
from kvserve_vllm.prefix.lookup import Hit, Index, Prices, names_of
from kvserve_vllm.prefix.meta import PrefixLoad, PrefixLoaded
from kvserve_vllm.scheduler.pollution import Pollution
from kvserve_vllm.scheduler.refusals import not_decodable
from kvserve_vllm.spec import ServedModel
from kvserve_vllm.stats import StatsBuffer

log = logging.getLogger(__name__)
LOOKUP_S = 0.5
"""How long the answer of a lookup holds: the engine may ask for a waiting request in every step."""


class Prefixes:
    """The store half of the scheduler side. wait: load before the forward pass (sync) instead of between steps."""

    def __init__(
        self,
        deployment: Deployment,
        model: ServedModel,
        store: str,
        role: Any,
        wait: bool,
        pollution: Pollution,
        stats: StatsBuffer,
    ) -> None:
        self._deployment, self._model, self._wait = deployment, model, wait
        self._pollution, self._stats = pollution, stats
        self._reads, self._writes = bool(role.is_kv_consumer), bool(role.is_kv_producer)
        self._index = Index(deployment.store(store))
        self._prices = Prices(deployment, link_name(store))
        self._shards = model.everyone()
        self._scales: tuple[str | None, ...] | None = None
        self._windowed = any(group.window is not None for group in model.kv.groups)
        self._keeping = Keeping(deployment, model, self._index, self._prices, stats)
        self._entries: dict[str, Entry] = {}
        self._loading: dict[str, str] = {}
        self._loads: list[PrefixLoad] = []
        self._cancels: list[str] = []

    @property
    def open_requests(self) -> int:
        """Requests that are followed, and loads and stores under way; 0 once none is left."""
        return len(self._entries) + len(self._loading) + len(self._keeping.storing)

    def meet(self, ranks: Sequence[RankInfo]) -> None:
        """What all ranks can encode, and the scales of their caches."""
        self._scales = tuple(rank.kv_scales for rank in ranks)
        grid = {p.name for p in self._deployment.controller.profiles if p.pipeline.segment_tokens == SEGMENT_TOKENS}
        self._prices.acceptable = (self._deployment.acceptable(common_profiles(ranks), None) & grid) | {RAW}

    def arrived(self, request: Any, params: TransferParams) -> None:
        """A new request. One that fetches its prompt loads nothing here, and is kept only if that is exact and came
        before the forward pass that goes on from it: a failed load must not be stored."""
        locator = params.locator if params.fetch else None
        stores = self._writes and (locator is None or (_exact(locator) and not self._wait))
        reads = self._reads and locator is None
        if self._scales is None or request.num_prompt_tokens < SEGMENT_TOKENS or not (reads or stores):
            return
        keys = prompt_keys(request, self._model.kv, self._shards, self._scales)
        if keys is None:
            return
        stage = Stage.OPEN if reads else Stage.DONE
        exact = params.offer  # what is sent on may lose something again
        self._entries[request.request_id] = Entry(
            request, params.options, keys, exact, stores, Arrival.of(request), stage
        )

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """``(tokens beyond the computed ones, between steps)``; None: ask again. Changes nothing that matters."""
        entry = self._entries.get(request.request_id)
        if entry is None or entry.stage is not Stage.OPEN:
            return 0, False
        hit = self._looked_up(entry, computed)
        if hit is None:
            return 0, False
        if hit.quality == 1.0 and self._is_loading(hit):
            return None, False  # another request loads it: what the engine then caches serves this one too
        return hit.stop - computed, not self._wait

    def _is_loading(self, hit: Hit) -> bool:
        return hit.names[min(hit.names)][0] in self._loading

    def _looked_up(self, entry: Entry, computed: int) -> Hit | None:
        now = time.monotonic()
        if entry.looked_s == 0.0 or entry.computed != computed or now - entry.looked_s > LOOKUP_S:
            entry.hit, entry.computed, entry.looked_s = self._look_up(entry, computed), computed, now
        return entry.hit

    def _look_up(self, entry: Entry, computed: int) -> Hit | None:
        """Cells from the first one that is not computed, if loading them pays."""
        floor = 1.0 if entry.exact else self._prices.floor(entry.options)
        found = self._index.cells(entry.keys, computed // SEGMENT_TOKENS, classes_for(floor))
        usable = self._model.sendable(entry.request.num_prompt_tokens)
        if self._windowed and found and usable < (max(found) + 1) * SEGMENT_TOKENS - 1:
            del found[max(found)]  # its windows end with the cell, and lack what is seen from before that
        stop = min((max(found, default=-1) + 1) * SEGMENT_TOKENS, usable)
        if stop <= computed:
            return None
        hit = Hit({i: names_of(entry.keys, i, quality) for i, quality in found.items()}, found, stop)
        pays, _ = self._prices.pays(entry.options, stop - computed, hit.quality)
        return hit if pays else None

    def allocated(self, request: Any, ids: Blocks, external: int) -> None:
        """The engine gave a request its blocks. external: tokens that it counts on us for."""
        entry = self._entries.get(request.request_id)
        if entry is None:
            return
        if not entry.seen and self._pollution.tainted(ids):
            entry.stores = False  # computed after KV of unknown quality
        entry.seen = True
        if entry.stage is not Stage.OPEN:
            return
        entry.stage = Stage.DONE
        if external > 0 and entry.hit is not None:
            self._load(entry, ids, entry.computed, entry.computed + external, entry.hit)

    def _load(self, entry: Entry, ids: Blocks, start: int, stop: int, hit: Hit) -> None:
        req_id = entry.request.request_id
        cells = {i: names for i, names in hit.names.items() if i * SEGMENT_TOKENS < stop}
        _, profile = self._prices.pays(entry.options, stop - start, hit.quality)
        entry.stage, entry.ranks, entry.valid, entry.held = Stage.LOADING, len(self._shards), stop, hit.quality
        self._loading.update((of_ranks[0], req_id) for of_ranks in cells.values())
        self._loads.append(PrefixLoad(req_id, start, stop, cells, ids, profile, self._wait))
        if hit.first_lossy is not None:
            self._pollution.loading(req_id, ids, max(start, hit.first_lossy))

    def plan(self, output: Any, meta: StepMeta) -> None:
        """What the workers are to do in this step."""
        meta.prefix_load, self._loads = self._loads, []
        meta.prefix_cancel, self._cancels = self._cancels, []
        for entry in self._entries.values():
            self._keeping.time(entry)
        for req_id in compat.preempted(output) & self._entries.keys():
            self._preempted(self._entries[req_id], meta)
        for each in compat.scheduled(output):
            entry = self._entries.get(each.req_id)
            if entry is None:
                continue
            try:
                self._scheduled(entry, each, output.num_scheduled_tokens[each.req_id], meta)
            except Exception:  # its block table may be short by now: nothing of it is kept
                log.exception("the prefix of request %r is not kept", each.req_id)
                self._stats.hook_failed("build_connector_meta")
                entry.stores = False

    def _preempted(self, entry: Entry, meta: StepMeta) -> None:
        """Its blocks are lost: what is not kept yet is given up, and what is kept may be loaded again."""
        meta.prefix_drop.append(entry.request.request_id)
        entry.done, entry.timing, entry.looked_s = 0, None, 0.0
        if entry.stage is Stage.DONE and self._reads and not (entry.failed or entry.told):
            entry.stage = Stage.OPEN

    def _scheduled(self, entry: Entry, each: compat.Scheduled, count: int, meta: StepMeta) -> None:
        if each.fresh:
            entry.blocks = each.blocks or ()
            entry.timing = (time.monotonic(), each.num_computed)
            self._forget_loading(each.req_id)
        elif each.blocks is not None and each.num_computed < entry.request.num_prompt_tokens:
            for table, ids in zip(entry.blocks, each.blocks, strict=True):
                table.extend(ids)
        self._keeping.scheduled(entry, each, count, meta)

    def learn(self, report: WorkerReport) -> None:
        """Stores and loads that ended."""
        for stored in report.prefix_stored:
            self._keeping.stored(stored)
        for loaded in report.prefix_loaded:
            self._loaded(loaded)

    def _loaded(self, end: PrefixLoaded) -> None:
        entry = self._entries.get(end.req_id)
        if entry is None or entry.stage is not Stage.LOADING:
            return
        entry.ranks -= 1
        entry.valid = min(entry.valid, end.valid)
        if end.reason:
            entry.failed = True
            self._pollution.failed(end.req_id, end.valid)
            self._learn_refusal(entry, end)
        entry.outcomes.append(end.outcome)
        if entry.ranks > 0:
            return
        entry.stage = Stage.DONE
        self._learn_link(entry.outcomes)
        if entry.failed or entry.gone:
            self._forget_loading(end.req_id)
        if entry.gone:
            del self._entries[end.req_id]

    def _learn_refusal(self, entry: Entry, end: PrefixLoaded) -> None:
        """Lossy cells that this side lacks the library for would fail each request that meets them."""
        if entry.hit is not None and not_decodable(end.reason):
            lossy = (i for i, quality in entry.hit.classes.items() if quality < 1.0)
            self._index.unreadable(name for i in lossy for name in entry.hit.names[i])

    def _learn_link(self, outcomes: list[Outcome]) -> None:
        """Goodput only: what profile the cells have is not known here. Ranks load at once, the slowest counts."""
        seconds = max(outcome.transfer_s for outcome in outcomes)
        links = self._deployment.controller.links
        links.observe(self._prices.link, sum(outcome.wire_bytes for outcome in outcomes), seconds)
        self._stats.add("goodput_bytes_per_second", links.estimate(self._prices.link), self._prices.link)

    def _forget_loading(self, req_id: str) -> None:
        for name in [name for name, who in self._loading.items() if who == req_id]:
            del self._loading[name]

    def holds(self, req_id: str) -> bool:
        """Whether the workers may still store what is in the blocks of a request, and will hand them back."""
        entry = self._entries.get(req_id)
        return entry is not None and entry.told and entry.stage is not Stage.LOADING

    def finished(self, request: Any) -> bool:
        """A request ended: whether the workers still need its blocks, and will hand them back."""
        entry = self._entries.get(request.request_id)
        if entry is None:
            return False
        if entry.stage is Stage.LOADING:  # the engine keeps its blocks until the load has ended
            entry.gone = True
            self._cancels.append(request.request_id)
            return False
        del self._entries[request.request_id]
        self._forget_loading(request.request_id)
        self._keeping.time(entry)
        return entry.told


def link_name(store: str) -> str:
    """Under which name goodput from a store is kept."""
    return f"store:{store}"


def _exact(locator: Locator) -> bool:
    return locator.profile in (RAW, LOSSLESS)
