"""Which of the cells that a prompt's computation makes final go into the store, and in which class."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from kvserve_core.deployment import Deployment
from kvserve_core.policy import Decision
from kvserve_core.spec import SEGMENT_TOKENS
from kvserve_vllm.compat import Scheduled
from kvserve_vllm.metadata import StepMeta
from kvserve_vllm.prefix.entry import Entry, Stage
from kvserve_vllm.prefix.keys import Keys
from kvserve_vllm.prefix.lookup import Index, Prices, names_of
from kvserve_vllm.prefix.meta import PrefixStore, PrefixStored
from kvserve_vllm.spec import ServedModel
from kvserve_vllm.stats import StatsBuffer

log = logging.getLogger(__name__)


class Keeping:
    """The writing half. ``storing``: decisions by the first rank's name of a cell that is under way."""

    def __init__(
        self, deployment: Deployment, model: ServedModel, index: Index, prices: Prices, stats: StatsBuffer
    ) -> None:
        self._controller, self._kv = deployment.controller, model.kv
        self._index, self._prices, self._stats = index, prices, stats
        self._windowed = any(group.window is not None for group in model.kv.groups)
        self.storing: dict[str, Decision] = {}

    def scheduled(self, entry: Entry, each: Scheduled, count: int, meta: StepMeta) -> None:
        """``count`` more tokens of a request are computed in this step.

        Nothing is kept while it loads: in sync mode the forward pass goes on even where the load fails.
        """
        if self._windowed:  # of what was computed before, the engine holds the last window only
            entry.done = max(entry.done, each.num_computed // SEGMENT_TOKENS)
        final = min((each.num_computed + count) // SEGMENT_TOKENS, len(entry.keys[0]))
        if entry.stores and entry.stage is not Stage.LOADING and final > entry.done:
            self._keep(entry, range(entry.done, final), meta)
            entry.done = final

    def _keep(self, entry: Entry, cells: range, meta: StepMeta) -> None:
        """Store the cells that are in nobody's hands yet."""
        decision = entry.decision = entry.decision or self._decide(entry)
        quality = self._prices.stored_class(decision.profile, entry.held)
        new = {i: names_of(entry.keys, i, quality) for i in cells if self._is_new(entry.keys, i, quality)}
        if not new:
            return
        decision = self._of_one_cell(decision)
        self.storing.update((names[0], decision) for names in new.values())
        blocks = tuple(list(table) for table in entry.blocks)
        meta.prefix_store.append(PrefixStore(entry.request.request_id, blocks, decision, new))
        entry.told = True

    def _decide(self, entry: Entry) -> Decision:
        decision = self._prices.choose(entry.options, len(entry.keys[0]) * SEGMENT_TOKENS, entry.held)
        self._stats.add("decisions", 1, decision.profile, decision.reason.split(";")[0])
        return decision

    def _is_new(self, keys: Keys, cell: int, quality: float) -> bool:
        name = names_of(keys, cell, quality)[0]
        return name not in self.storing and not self._index.holds(keys, cell, quality)

    def _of_one_cell(self, decision: Decision) -> Decision:
        """The same, slim enough to travel, for one cell: what the workers report is of one."""
        context = replace(decision.context, nbytes=SEGMENT_TOKENS * self._kv.token_bytes())
        return Decision(decision.profile, decision.reason, context, decision.bandwidth)

    def stored(self, end: PrefixStored) -> None:
        """The first rank stands for all: a cell that lacks a rank's part is not found, and stored again."""
        decision = self.storing.pop(end.name, None)
        if decision is None:
            return
        if end.outcome is None:
            log.info("the cell %r was not stored: %s", end.name, end.reason)
            return
        self._controller.observe(decision, end.outcome)
        self._stats.transferred(end.outcome, "store")
        self._stats.add("encode_seconds", end.outcome.encode_s)

    def time(self, entry: Entry) -> None:
        """How long prompts take here, once there is a first token; a few tokens say nothing of that."""
        if entry.timing is None or entry.request.num_output_tokens < 1:
            return
        (started_s, computed), entry.timing = entry.timing, None
        tokens = entry.request.num_prompt_tokens - computed
        if tokens < SEGMENT_TOKENS:
            return
        seconds = time.monotonic() - started_s
        queue_s = max(0.0, entry.arrival.waited_s() - seconds)
        self._controller.observe_prefill(tokens, seconds, queue_s)
