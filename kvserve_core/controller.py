"""Picks a profile per request and learns from what it cost: feasible -> envelope -> policy, then observe."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from operator import attrgetter

from kvserve_core.bandwidth import BandwidthEstimator
from kvserve_core.errors import ConfigError, UnknownNameError, did_you_mean
from kvserve_core.feasible import Filter, Request
from kvserve_core.library import LOSSLESS_PROFILE, RAW_PROFILE, Profile, ProfileLibrary
from kvserve_core.menu import Menu
from kvserve_core.policy import LOSSLESS, RAW, Candidate, Decision, Outcome, Policy, ServiceContext
from kvserve_core.pricing import Priced

PRIOR_BANDWIDTH = 1.25e9
"""10 Gbps, in bytes/s."""
MAX_MENUS = 256
"""Kinds of request that are remembered: workloads x quality floors x peers."""
_log = logging.getLogger(__name__)
_latency = attrgetter("latency_s")


class Controller:
    """One per scheduler. ``choose`` takes no lock and costs microseconds; both methods are thread-safe.

    library: None offers ``raw`` and ``lossless`` only. min_quality: for requests that name none.
    prior_bandwidth: bytes/s, until a link was used. fingerprint: of the model served.
    allow_unprofiled: profiles that may be used without a quality record.
    self_test: measures ``raw`` and ``lossless`` here, asked once, and only for those the library does not hold.

    Raises:
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if library is None:
            _say_no_library()
        self.policy = policy
        self.links = BandwidthEstimator(prior_bandwidth, clock=clock)
        self._priced = {p.name: Priced(p) for p in known_profiles(library, self_test)}
        self._check_names(policy.wants, "policy.configuration.profile")
        self._check_names(allow_unprofiled, "allow_unprofiled")
        self._filter = Filter(library, min_quality, fingerprint, frozenset(allow_unprofiled))
        self._menus: dict[tuple[object, ...], Menu] = {}
        self._lock = threading.Lock()

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """All profiles known here, feasible or not: raw, lossless, then the library's in its order."""
        return tuple(p.profile for p in self._priced.values())

    def choose(self, context: ServiceContext) -> Decision:
        """The profile for one request, with the candidates it was picked from, fastest first.

        Raises:
            ConfigError: the bandwidth in the context is not above 0.
        """
        key = (context.workload, context.min_quality, context.acceptable, context.intent)
        menu = self._menus.get(key) or self._menu(key)
        bandwidth = context.bandwidth
        if bandwidth is None:
            bandwidth = self.links.estimate(context.link)
        elif not bandwidth > 0:
            raise ConfigError(f"bandwidth must be above 0 bytes/s, got {bandwidth!r}; leave it out to use the estimate")
        nbytes = context.nbytes
        candidates = _price(menu.near(nbytes if nbytes > 0 else 1, bandwidth), nbytes, bandwidth, context.model_s)
        choice = self.policy.choose(context, candidates)
        chosen, reason = candidates[choice.index], choice.reason
        if context.slo_s is not None and chosen.latency_s > context.slo_s:
            reason = _late(reason, candidates[0].latency_s > context.slo_s)
        return Decision(chosen.profile, reason, context, bandwidth, tuple(candidates), menu.rejected, menu.explain)

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        """Learn from a finished transfer: goodput of its link, speeds and ratio of its profile, then the policy.

        Failed transfers only reach the policy: what they took says nothing of the link or the profile.
        """
        if outcome.ok:
            for link in {decision.context.link, outcome.link}:
                self.links.observe(link, outcome.wire_bytes, outcome.transfer_s)
            self._reprice(outcome)
        self.policy.observe(decision, outcome)

    def _reprice(self, outcome: Outcome) -> None:
        priced = self._priced.get(outcome.profile)
        if priced is None:
            return
        with self._lock:
            if priced.observe(outcome):
                for menu in self._menus.values():
                    menu.tables = {}

    def _menu(self, key: tuple[str, float | None, frozenset[str] | None, str]) -> Menu:
        request, items, rejected = Request(*key), [], []
        for name, priced in self._priced.items():
            if reason := self._filter.refusal(priced.profile, request):
                rejected.append((name, reason))
            else:
                items.append((priced, self._filter.quality(priced.profile, request.workload) or 0.0))
        menu = Menu(items, rejected, (RAW, *self.policy.wants))
        with self._lock:
            while len(self._menus) >= MAX_MENUS:
                del self._menus[next(iter(self._menus))]
            return self._menus.setdefault(key, menu)

    def _check_names(self, names: Iterable[str], path: str) -> None:
        for name in names:
            if name not in self._priced:
                raise UnknownNameError(did_you_mean(name, self._priced, "profile"), path)


def known_profiles(
    library: ProfileLibrary | None, self_test: Callable[[], Iterable[Profile]] | None = None
) -> tuple[Profile, ...]:
    """Raw and lossless (of the library, else self-tested, else cautious defaults), then the library's others."""
    found = {p.name: p for p in (library.profiles if library else ())}
    measured = {p.name: p for p in self_test()} if self_test and not found.keys() >= {RAW, LOSSLESS} else {}
    default = {RAW: RAW_PROFILE, LOSSLESS: LOSSLESS_PROFILE}
    exact = {name: found.get(name) or measured.get(name) or profile for name, profile in default.items()}
    return tuple((exact | {n: p for n, p in found.items() if n not in exact}).values())


def _price(items: Iterable[tuple[Priced, float]], nbytes: float, bandwidth: float, model_s: float) -> list[Candidate]:
    """Exact estimates (eq. 1) at the live costs, fastest first; equal ones in the order of the menu."""
    raw_s = nbytes / bandwidth
    candidates = []
    for priced, quality in items:
        name, cr, wire, encode_fixed, encode_each, decode_fixed, decode_each = priced.terms
        encode_s = encode_fixed + encode_each * nbytes
        decode_s = decode_fixed + decode_each * nbytes
        transfer_s = wire * raw_s
        total_s = model_s + encode_s + transfer_s + decode_s
        candidates.append(Candidate(name, cr, total_s, encode_s, transfer_s, decode_s, quality))
    candidates.sort(key=_latency)
    return candidates


def _late(reason: str, all_late: bool) -> str:
    return f"{reason}; no profile meets the SLO, least violating" if all_late else f"{reason}; misses the SLO"


@lru_cache(maxsize=1)
def _say_no_library() -> None:
    _log.warning("no profile library: only 'raw' and 'lossless' are offered; make a library with 'kvserve profile'")
