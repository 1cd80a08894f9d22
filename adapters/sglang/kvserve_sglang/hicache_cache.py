"""What HiCache's storage does with the page hashes that SGLang hands it: find, load, keep."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvserve_core.deployment import Deployment
from kvserve_core.policy import Decision, Outcome
from kvserve_core.prefix import CLASSES, classes_for
from kvserve_core.requests import RequestOptions
from kvserve_sglang.hicache_quality import Held, class_of, page_name
from kvserve_sglang.hicache_store import Ended, PageStore, Placed, link_seconds
from kvserve_sglang.metrics import Exporter

Prefix = Sequence[str] | None
"""Hashes of all pages before those of a call; None where SGLang does not say (``hicache_storage_pass_prefix_keys``)."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PageCache:
    """One per rank. space: what all names start from. acceptable: profiles that every reader can read.
    alone: whether the server has one rank. Others may have loaded with loss what this one loaded exactly, and what is
    computed next mixes both, so then every loaded page counts as the worst that is allowed.

    Exact pages are numbered from 0 and need no position. Lossy ones are numbered by their place in the prompt, which
    position-dependent stages and sinks need, so they are written and read only where SGLang tells the prefix.
    """

    deployment: Deployment
    store: PageStore
    space: str
    acceptable: frozenset[str]
    exporter: Exporter
    held: Held
    alone: bool = True

    @property
    def _lowest(self) -> float:
        """SGLang's radix cache hands a page to any request, so loss needs the operator's word."""
        settings = self.deployment.settings
        return settings.min_quality if settings.lossy_prefix_cache == "allow" else 1.0

    def _floor(self, prefix: Prefix) -> float:
        """What a call may use and store: loss only where a page's place in the prompt is known."""
        return self._lowest if prefix is not None else 1.0

    def leading(self, keys: Sequence[str], prefix: Prefix) -> int:
        """How many of the first pages are there in a class that this server may use; 0 where the store is silent."""
        return len(self._found(keys, self._floor(prefix)))

    def load(self, keys: Sequence[str], pages: Sequence[int], prefix: Prefix) -> list[bool]:
        """Restore pages into the host pool; which of them came."""
        found = self._found(keys, self._floor(prefix))
        placed = [self._placed(keys[i], pages[i], quality, prefix, i) for i, quality in enumerate(found)]
        first = {p.name: p for p in reversed(placed)}  # a page has one place; a caller that names it again gets none
        started = time.perf_counter()
        ended = self.store.read([p for p in placed if first[p.name] is p])
        self._learn(ended, time.perf_counter() - started)
        came = [first[p.name] is p and self._came(p, ended) for p in placed]
        for key, quality, ok in zip(keys, found, came, strict=False):
            if ok:
                self._loaded(key, quality)
        return came + [False] * (len(keys) - len(came))

    def _learn(self, ended: Ended, wall_s: float) -> None:
        """What reading gets out of the store, which is what pages are stored for."""
        outcomes = [outcome for outcome in ended.values() if isinstance(outcome, Outcome)]
        links = self.deployment.controller.links
        links.observe(self.store.link, sum(o.wire_bytes for o in outcomes), link_seconds(outcomes, wall_s))
        self.exporter.set("goodput_bytes_per_second", links.estimate(self.store.link), link=self.store.link)

    def _loaded(self, key: str, quality: float) -> None:
        self.held.loaded([key], quality if self.alone else min(quality, self._lowest))
        if quality < 1.0:
            self._count_tokens("lossy_cache_tokens")

    def keep(self, keys: Sequence[str], pages: Sequence[int], prefix: Prefix) -> list[bool]:
        """Store the pages that are not there yet; which of them are there now."""
        held = self.held.of(None if prefix is None else [*prefix, *keys])
        if held < 1.0 and prefix is None:
            log.warning("pages computed after lossy ones are not stored: set 'hicache_storage_pass_prefix_keys'")
            return [False] * len(keys)
        decision = self._decide(len(keys), held, self._floor(prefix))
        quality = class_of(self.deployment, decision.profile, held)
        absent = self._absent(keys, quality)
        if absent is None:
            return [False] * len(keys)
        placed = {i: self._placed(keys[i], pages[i], quality, prefix, i) for i in absent}
        ended = self.store.write(list(placed.values()), decision)
        for outcome in ended.values():
            self._wrote(decision, outcome)
        return [i not in placed or isinstance(ended.get(placed[i].name), Outcome) for i in range(len(keys))]

    def _found(self, keys: Sequence[str], floor: float) -> list[float]:
        """The class of each leading page, the best that is there."""
        return self.store.lookup([], lambda: self._best(keys, floor))

    def _absent(self, keys: Sequence[str], quality: float) -> list[int] | None:
        """Which pages are not there in a class or a better one; None where the store does not answer in time."""
        return self.store.lookup(None, lambda: [i for i, key in enumerate(keys) if not self._has(key, quality)])

    def _best(self, keys: Sequence[str], floor: float) -> list[float]:
        classes = classes_for(floor)
        found: list[float] = []
        while len(found) < len(keys):
            runs = ((self._run(keys[len(found) :], quality), quality) for quality in classes)
            run, quality = next(((n, q) for n, q in runs if n), (0, 0.0))
            if run == 0:
                break
            found += [quality] * run
        return found

    def _run(self, keys: Sequence[str], quality: float) -> int:
        return self.store.leading([page_name(self.space, key, quality) for key in keys])

    def _has(self, key: str, quality: float) -> bool:
        return any(self._run([key], known) for known in CLASSES if known >= quality)

    def _placed(self, key: str, page: int, quality: float, prefix: Prefix, i: int) -> Placed:
        start = 0 if quality == 1.0 else (len(prefix or ()) + i) * self.store.pages.page_size
        return Placed(page_name(self.space, key, quality), page, start)

    def _decide(self, count: int, held: float, floor: float) -> Decision:
        """One decision a call; exact where loss would sum up below the floor."""
        tokens = count * self.store.pages.page_size
        decision = self._choose(tokens, floor)
        if class_of(self.deployment, decision.profile, held) < floor:
            decision = self._choose(tokens, 1.0)
        self.exporter.count("decisions", profile=decision.profile, reason=decision.reason.split(";")[0])
        one = replace(decision.context, nbytes=decision.context.nbytes // count)
        return Decision(decision.profile, decision.reason, one, decision.bandwidth)

    def _choose(self, tokens: int, quality: float) -> Decision:
        options = RequestOptions(min_quality=quality)
        context = self.deployment.context(tokens, options, link=self.store.link, acceptable=self.acceptable, store=True)
        return self.deployment.controller.choose(context)

    def _wrote(self, decision: Decision, outcome: Outcome | Exception) -> None:
        if isinstance(outcome, Outcome):
            self.deployment.controller.observe(decision, outcome)
            self.exporter.transfer(outcome, "producer")
        else:
            log.warning("a page was not stored: %s", outcome)
            self.exporter.count("transfers", side="producer", ok="false")

    def _came(self, placed: Placed, ended: Ended) -> bool:
        outcome = ended[placed.name]
        if isinstance(outcome, Outcome):
            self.exporter.transfer(outcome, "consumer")
            self._count_tokens("external_tokens")
            return True
        log.warning("the page %r does not come, it is computed: %s", placed.name, outcome)
        self.exporter.count("transfers", side="consumer", ok="false")
        return False

    def _count_tokens(self, series: str) -> None:
        self.exporter.count(series, self.store.pages.page_size)
