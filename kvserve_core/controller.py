"""Picks a profile per request and learns from what it cost: feasible -> envelope -> policy, then observe."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from kvserve_core.bandwidth import MIN_BYTES, BandwidthEstimator
from kvserve_core.contexts import Key, check, menu_key, usual
from kvserve_core.costs import Costs
from kvserve_core.errors import TransferTimeout, UnknownNameError, did_you_mean
from kvserve_core.feasible import Filter, Request, check_chunk, check_quality, check_request, known_profiles
from kvserve_core.library import Profile, ProfileLibrary
from kvserve_core.menu import Item, Menu, price
from kvserve_core.model_time import LoadDecision, ModelTime, cannot_load, weigh
from kvserve_core.overlap import Form
from kvserve_core.policy import RAW, Candidate, Choice, Decision, Outcome, Policy, ServiceContext
from kvserve_core.pricing import Priced, plain, refusal

PRIOR_BANDWIDTH = 1.25e9
"""10 Gbps, in bytes/s."""
MAX_MENUS = 256
"""Kinds of request that are remembered: workloads x quality floors x peers."""
MAX_NOTES = 32
"""Workloads of which it is said once that they were not measured; clients may name any number."""
TIMED_OUT = TransferTimeout.__name__
"""What the reason of a fetch begins with that was not there by its deadline."""
_log = logging.getLogger(__name__)


class Controller:
    """One per scheduler. ``choose`` and ``observe`` are thread-safe and cost microseconds.

    ``choose`` takes a lock for a kind of request that it has not seen, to count a failure of the policy and, where it
    is free, to let what was learned fade; what the policy locks is its own matter. ``observe`` takes it for a moment.

    Nothing that a policy or a peer does gets out of them: a policy that fails gives way to ``raw`` and is counted in
    ``policy_failures``; a report that cannot be true is dropped and counted in ``refused_outcomes``.

    library: None offers ``raw`` and ``lossless`` only. min_quality: for requests that name none.
    prior_bandwidth: bytes/s, until a link was used. fingerprint: of the model served.
    allow_unprofiled: profiles that may be used without a quality record.
    self_test: measures ``raw`` and ``lossless`` here, asked once, and only for those the library does not hold.
    chunk_bytes: original bytes that are encoded, sent and decoded at a time, where these overlap (see
    :mod:`~kvserve_core.overlap`); None where they follow each other. priors: bytes/s by link. clock: seconds that never
    fall, also for the policy.

    Raises:
        ConfigError: ``min_quality`` or ``prior_bandwidth`` is out of range.
        UnknownNameError: the policy or ``allow_unprofiled`` names a profile that does not exist.
    """

    def __init__(
        self,
        library: ProfileLibrary | None,
        policy: Policy,
        *,
        min_quality: float = 0.99,
        prior_bandwidth: float = PRIOR_BANDWIDTH,
        fingerprint: str | None = None,
        allow_unprofiled: Collection[str] = (),
        self_test: Callable[[], Iterable[Profile]] | None = None,
        chunk_bytes: float | None = None,
        priors: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if library is None:
            _say_no_library()
        check_quality(min_quality)
        self.policy = policy
        self._teaches = type(policy).observe is not Policy.observe
        self.min_quality = min_quality
        self.policy_failures = 0
        self.refused_outcomes = 0
        self._lock = threading.Lock()
        self.links = BandwidthEstimator(prior_bandwidth, priors=priors, clock=clock, lock=self._lock)
        self.model = ModelTime()
        self.form = Form(check_chunk(chunk_bytes))
        self._forms = {"transfer": self.form, "store": replace(self.form, stored=True)}
        self._priced = {p.name: Priced(p) for p in known_profiles(library, self_test)}
        self._check_names(policy.wants, "policy.configuration.profile")
        self._check_names(allow_unprofiled, "allow_unprofiled")
        self._filter = Filter(library, min_quality, fingerprint, frozenset(allow_unprofiled))
        self._menus: dict[tuple[object, ...], Menu] = {}
        self._clock = clock
        self._costs = Costs(self._priced.values())
        self._said: set[str] = set()
        self._noted: set[str] = set()
        policy.library = library.digest if library else ""
        policy.start(clock)

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """All profiles known here, feasible or not: raw, lossless, then the library's in its order."""
        return tuple(p.profile for p in self._priced.values())

    def choose(self, context: ServiceContext) -> Decision:
        """The profile for one request, with the candidates it was picked from, fastest first.

        Raises:
            ConfigError: a figure in the context is not finite or out of range, or a name is none; its path names the
                field.
        """
        context, menu, bandwidth, candidates = self._offer(context)
        try:
            choice = self.policy.choose(context, candidates)
            if not isinstance(choice, Choice) or not isinstance(choice.reason, str) or choice.index < 0:
                raise ValueError(f"{choice!r:.80} is not a Choice with an index from 0 and a reason")
            chosen, reason = candidates[choice.index], choice.reason
        except Exception as error:  # noqa: BLE001  # a plugin's failure must not end the engine's loop
            chosen = next(c for c in candidates if c.profile == RAW)
            reason = f"policy failed: {self._failed('choose', error)}"
        if context.slo_s is not None and chosen.latency_s > context.slo_s:
            reason = _late(reason, candidates[0].latency_s > context.slo_s)
        return Decision(chosen.profile, reason, context, bandwidth, candidates, menu.rejected, menu.explain)

    def _offer(self, context: ServiceContext) -> tuple[ServiceContext, Menu, float, tuple[Candidate, ...]]:
        """The request as it is reckoned with, what may serve it, the bandwidth, and the candidates."""
        if not usual(context):
            check(context)
        nbytes, bandwidth, now = context.nbytes, context.bandwidth, self._clock()
        if now >= self._costs.fade_s:
            self._fade(now)
        if bandwidth is None:
            bandwidth = self.links.estimate(context.link, context.active, now)
        key = context.workload, context.min_quality, context.acceptable, context.intent  # as ``menu_key``
        menu = self._menus.get(key) or self._menu(key)
        if context.tokens is not None or context.elapsed_s or context.output_tokens:
            context = self.model.reckon(context)
        items = menu.near(nbytes if nbytes > 0 else 1, bandwidth, now)
        return context, menu, bandwidth, price(items, nbytes, bandwidth, context.model_s, menu.form)

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        """Learn from a finished transfer: goodput of its link, speeds and ratio of its profile, then the policy.

        An outcome is of the whole transfer: over several ranks, bytes are summed and the slowest rank's seconds count.
        Failed transfers reach the policy, but what they took says nothing of the profile, nor of the link unless they
        timed out. Reports that cannot be true (see :func:`~kvserve_core.pricing.refusal`) are dropped.
        """
        if not plain(outcome) and (reason := refusal(outcome)):
            self._count(False)
            self._say_once(f"report {reason.split()[0]}", f"dropped a report on {outcome.transfer_id!r:.80}: {reason}")
            return
        if outcome.ok:
            outcome = self._learn(decision.context, outcome)
        else:
            self._failed_fetch(outcome)
        if not self._teaches:
            return
        try:
            self.policy.observe(decision, outcome)
        except Exception as error:  # noqa: BLE001  # a plugin's failure must not end the engine's loop
            self._failed("observe", error)

    def _learn(self, context: ServiceContext, outcome: Outcome) -> Outcome:
        """From a whole transfer; the report, with what it did not teach: that is left for the policy."""
        now, link, nbytes = self._clock(), outcome.link, context.nbytes
        priced = self._priced.get(outcome.profile)
        with self._lock:
            self.links.add(link, outcome.wire_bytes, outcome.transfer_s, now)
            if context.link != link and context.intent != "store":  # a store's is the one it will be read over
                self.links.add(context.link, outcome.wire_bytes, outcome.transfer_s, now)
            if priced is not None:
                priced.observe(outcome, nbytes, now)
                self._costs.learned(priced, now)
        if priced is None or not self._teaches:
            return outcome
        followed = priced.follows(outcome, nbytes)
        bandwidth = None if followed else context.bandwidth or self.links.estimate(link, context.active, now)
        return priced.judged(outcome, nbytes, bandwidth, self._forms.get(context.intent, self.form))

    def _failed_fetch(self, outcome: Outcome) -> None:
        """One that timed out took at least so long for what came (or the least that tells): no link is faster."""
        if outcome.transfer_s > 0 and isinstance(outcome.reason, str) and outcome.reason.startswith(TIMED_OUT):
            nbytes = max(outcome.wire_bytes, MIN_BYTES)
            if nbytes < self.links.estimate(outcome.link) * outcome.transfer_s:
                self.links.observe(outcome.link, nbytes, outcome.transfer_s)

    def feasible(self, context: ServiceContext) -> tuple[Priced, ...]:
        """The profiles that may serve a request, raw first, at what they cost now."""
        return tuple(priced for priced, _ in self._menu(menu_key(context)).items)

    def note(self, context: ServiceContext) -> str | None:
        """What there is to say of a request besides the decision: whose records stood in for its workload's."""
        return self._filter.stands_in(context.workload)

    def estimate(self, priced: Priced, decision: Decision, bandwidth: float | None = None) -> Candidate:
        """Eq. 1 of a feasible profile for the request of ``decision``, near the envelope or not; for explanations."""
        context = decision.context
        quality = self._filter.quality(priced.profile, context.workload) or 0.0
        at = bandwidth or decision.bandwidth
        return price([(priced, quality)], context.nbytes, at, context.model_s, self._forms[context.intent])[0]

    def decide_load(self, tokens: int, context: ServiceContext, profile: str | None = None) -> LoadDecision:
        """Whether to load a cached prefix of ``tokens`` (``context.nbytes`` bytes) or to compute it anew.

        profile: what it is stored as, so that it is only to be fetched and decoded; None where it is still to be
        encoded, by the fastest: the policy is not asked, so nothing is tried and nothing counted. The queue and the
        rest of the prompt are common to both ways. Costs are lines over the prefix length, so a part of a prefix is
        never better than all or none of it.

        What may not serve this request (the peer cannot decode it, it is not good enough) is not loaded.

        Raises:
            ConfigError: a figure is out of range.
            UnknownNameError: there is no such profile here.
        """
        check(replace(context, tokens=tokens))
        asked, menu, bandwidth, candidates = self._offer(context)
        fastest = candidates[0].profile
        load = Decision(fastest, "fastest", asked, bandwidth, candidates, menu.rejected, menu.explain)
        name = fastest if profile is None else profile
        self._check_names((name,), "profile")
        chosen = self._priced[name]
        if reason := self._filter.refusal(chosen.profile, Request(*menu_key(context))):
            return cannot_load(tokens, f"{name}: {reason}", load, self.model.prefill_s(tokens))
        encode_s, decode_s, wire = chosen.costs(context.nbytes)
        fixed_encode_s, fixed_s, _ = chosen.costs(0)
        if profile is None:
            fixed_s += fixed_encode_s
        else:
            encode_s = 0.0
        load_s = self.form.seconds(encode_s, wire / bandwidth, decode_s, context.nbytes)
        return weigh(tokens, load, load_s, fixed_s, self.model.prefill_s_per_token)

    def observe_prefill(self, tokens: int, seconds: float, queue_s: float = 0.0) -> None:
        """What a prefill of ``tokens`` took, and how long it waited: for ``T_model`` and ``decide_load``."""
        self._count(self.model.observe_prefill(tokens, seconds, queue_s))

    def observe_decode(self, tokens: int, seconds: float) -> None:
        """What it took to generate ``tokens`` of one request: for ``slo_kind`` "jct"."""
        self._count(self.model.observe_decode(tokens, seconds))

    def _count(self, believed: bool) -> None:
        if not believed:
            with self._lock:
                self.refused_outcomes += 1

    def _failed(self, method: str, error: Exception) -> str:
        with self._lock:
            self.policy_failures += 1
        kind = f"{type(error).__name__} in {method}"
        try:
            text = f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001  # an exception of a plugin may fail to say what it is
            text = type(error).__name__
        instead = "raw is used" if method == "choose" else "it has not learned from this outcome"
        self._say_once(kind, f"policy {type(self.policy).__name__} failed to {method}, {instead}: {text}")
        return text

    def _say_once(self, kind: str, text: str) -> None:
        with self._lock:
            new = kind not in self._said
            self._said.add(kind)
        if new:
            _log.warning("%s (said once)", text)

    def _fade(self, now: float) -> None:
        if self._lock.acquire(False):  # else another thread is at it, or learns: the next decision will see
            try:
                self._costs.fade(now)
            finally:
                self._lock.release()

    def _menu(self, key: Key) -> Menu:
        request = Request(*key)
        check_request(request)
        items: list[Item | None] = []
        rejected = []
        for name, priced in self._priced.items():
            reason = self._filter.refusal(priced.profile, request)
            rejected += [(name, reason)] if reason else []
            items.append(None if reason else (priced, self._filter.quality(priced.profile, request.workload) or 0.0))
        note = self._filter.stands_in(request.workload)
        if note and len(self._noted) < MAX_NOTES:
            self._noted.add(request.workload)
            self._say_once(f"workload {request.workload}", note)
        menu = Menu(self._costs, items, rejected, (RAW, *self.policy.wants), self._forms[request.intent], note)
        with self._lock:
            while len(self._menus) >= MAX_MENUS:
                del self._menus[next(iter(self._menus))]
            return self._menus.setdefault(key, menu)

    def _check_names(self, names: Iterable[str], path: str) -> None:
        for name in names:
            if name not in self._priced:
                raise UnknownNameError(did_you_mean(name, self._priced, "profile"), path)


def _late(reason: str, all_late: bool) -> str:
    return f"{reason}; no profile meets the SLO, least violating" if all_late else f"{reason}; misses the SLO"


@lru_cache(maxsize=1)
def _say_no_library() -> None:
    _log.warning("no profile library: only 'raw' and 'lossless' are offered; make a library with 'kvserve measure'")
