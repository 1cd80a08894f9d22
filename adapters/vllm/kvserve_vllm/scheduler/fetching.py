"""Prompts to fetch: how many tokens the engine may count on, their blocks, and at most one attempt each."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvserve_core.policy import LOSSLESS, RAW
from kvserve_core.transport import Locator
from kvserve_vllm.metadata import Blocks, Load, StepMeta, WorkerReport
from kvserve_vllm.params import TransferParams, prompt_digest
from kvserve_vllm.scheduler.pollution import Pollution
from kvserve_vllm.spec import ServedModel

log = logging.getLogger(__name__)
MAX_SPENT = 4096
"""Transfer ids remembered as loaded, so that a second sample of the same prompt does not ask for one again."""


class Stage(Enum):
    """Where a fetch is. USED: loaded, failed or not needed; the request is served without us from here on."""

    OFFERED = "offered"
    LOADING = "loading"
    USED = "used"


@dataclass
class Wanted:
    """A request that brings a locator.

    computed: tokens held locally when it was last asked for. ranks: reports still to come. gone: the request ended.
    """

    locator: Locator
    stage: Stage = Stage.OFFERED
    computed: int = 0
    ranks: int = 0
    gone: bool = False


class Fetching:
    """The consuming half of the scheduler side.

    wait: load before the forward pass of the step (sync) instead of between steps.
    """

    def __init__(self, model: ServedModel, ranks: int, wait: bool, pollution: Pollution) -> None:
        self._model, self._ranks, self._wait, self._pollution = model, ranks, wait, pollution
        self._wanted: dict[str, Wanted] = {}
        self._loading: dict[str, str] = {}
        self._spent: OrderedDict[str, None] = OrderedDict()
        self._loads: list[Load] = []
        self._cancels: list[str] = []
        self._releases: list[Locator] = []

    def arrived(self, request: Any, params: TransferParams) -> None:
        """A request brings a locator; one that is of another prompt is not used."""
        locator = params.locator
        if locator is None:
            return
        if problem := self._mismatch(request, params, locator):
            log.warning("transfer %r is not fetched, the prompt is computed here: %s", locator.transfer_id, problem)
            self._releases.append(locator)
            return
        self._wanted[request.request_id] = Wanted(locator)

    def _mismatch(self, request: Any, params: TransferParams, locator: Locator) -> str | None:
        expected = self._model.sendable(request.num_prompt_tokens)
        if locator.num_tokens != expected:
            return f"it holds {locator.num_tokens} tokens, {expected} are of use to a prompt of this length"
        if params.prompt is not None and params.prompt != prompt_digest(request):
            return "it was made from another prompt"
        return None

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """``(tokens beyond the computed ones, between steps)``; None: ask again. Changes nothing that matters."""
        wanted = self._wanted.get(request.request_id)
        if wanted is None or wanted.stage is not Stage.OFFERED:
            return 0, False
        if wanted.locator.transfer_id in self._loading:
            return None, False  # another sample of the same prompt loads it: what it caches serves this one too
        if wanted.locator.transfer_id in self._spent:
            return 0, False
        wanted.computed = computed
        more = max(0, wanted.locator.num_tokens - computed)
        return more, more > 0 and not self._wait

    def allocated(self, request: Any, ids: Blocks, external: int) -> None:
        """The engine gave a request its blocks. external: tokens that it counts on us for."""
        wanted = self._wanted.get(request.request_id)
        if wanted is None or wanted.stage is not Stage.OFFERED:
            return
        if external == 0:
            self._give_up(wanted)
            return
        wanted.stage, wanted.ranks = Stage.LOADING, self._ranks
        self._loading[wanted.locator.transfer_id] = request.request_id
        start = wanted.computed
        self._loads.append(Load(request.request_id, wanted.locator, start, start + external, ids, self._wait))
        if wanted.locator.profile not in (RAW, LOSSLESS):
            self._pollution.loading(request.request_id, ids, start)

    def plan(self, meta: StepMeta) -> None:
        """What the workers are to do in this step."""
        meta.load, self._loads = self._loads, []
        meta.cancel, self._cancels = self._cancels, []
        meta.release, self._releases = self._releases, []

    def finished(self, request: Any) -> None:
        """A request ended, perhaps before its KV came: the engine keeps its blocks until the load has ended."""
        wanted = self._wanted.get(request.request_id)
        if wanted is None:
            return
        if wanted.stage is Stage.LOADING:
            wanted.gone = True
            self._cancels.append(request.request_id)
            return
        del self._wanted[request.request_id]
        if wanted.stage is Stage.OFFERED:
            self._give_up(wanted)

    def learn(self, report: WorkerReport) -> None:
        """Loads that ended: one report of every rank."""
        for end in report.loads:
            wanted = self._wanted.get(end.req_id)
            if wanted is None:
                continue
            wanted.ranks -= 1
            if end.reason:
                self._pollution.failed(end.req_id, wanted.computed + end.valid)
            if wanted.ranks <= 0:
                wanted.stage = Stage.USED
                self._loading.pop(end.transfer_id, None)
                self._spend(end.transfer_id)
                if wanted.gone:
                    del self._wanted[end.req_id]

    def _give_up(self, wanted: Wanted) -> None:
        wanted.stage = Stage.USED
        transfer_id = wanted.locator.transfer_id
        if transfer_id not in self._loading and transfer_id not in self._spent:
            self._releases.append(wanted.locator)
            self._spend(transfer_id)

    def _spend(self, transfer_id: str) -> None:
        self._spent[transfer_id] = None
        if len(self._spent) > MAX_SPENT:
            self._spent.popitem(last=False)
