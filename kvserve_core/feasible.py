"""Which profiles may serve a request at all, and why the others may not; and which requests cannot be.

Cold: asked once per kind of request, and for figures that are out of the usual range.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf, nan, nextafter
from typing import NamedTuple

from kvserve_core.bandwidth import MAX_BYTES, MAX_NAME, MAX_SECONDS
from kvserve_core.errors import ConfigError, did_you_mean
from kvserve_core.library import DEFAULT_WORKLOAD, LOSSLESS_PROFILE, RAW_PROFILE, Profile, ProfileLibrary
from kvserve_core.policy import LOSSLESS, RAW, ServiceContext
from kvserve_core.pricing import shown

INTENTS = ("transfer", "store")
SLO_KINDS = ("ttft", "jct")
BELOW_EXACT = nextafter(1.0, 0.0)
"""A task can be answered better than uncompressed by chance; what may lose something is not exact for that."""
SHOWN = 5
"""Workloads that a refusal names."""
COUNTS: Mapping[str, float] = {"tokens": 2**40, "output_tokens": 2**40, "elapsed_s": MAX_SECONDS}
"""Fields that T_model and the deadline are reckoned from, and the most that is believed of each."""
MAX_FIGURE = 1e15
"""Bytes/s and seconds of a context that are believed; infinity is too, as no limit."""
MIN_RATE = 1e-3
"""Bytes/s below which a link is down; from here on no time of a transfer is infinite."""
MAX_ACTIVE = 2**40


class Request(NamedTuple):
    """The part of a context that decides what is feasible: the key of a menu."""

    workload: str
    min_quality: float | None
    acceptable: frozenset[str] | None
    intent: str


def check_quality(value: object) -> None:
    """Refuse what is no quality.

    Raises:
        ConfigError: it is not a number from 0 to 1.
    """
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigError(
            f"{shown(value)} is no quality; give a number from 0 (anything goes) to 1 (as good as uncompressed)",
            "min_quality",
        )


def check_request(request: Request) -> None:
    """Refuse a kind of request that cannot be.

    Raises:
        ConfigError: the quality floor is not from 0 to 1, the intent is unknown, or the workload's name too long to be
            kept.
    """
    if len(request.workload) > MAX_NAME:
        raise ConfigError(f"a name of {len(request.workload)} characters; expected at most {MAX_NAME}", "workload")
    if request.min_quality is not None:
        check_quality(request.min_quality)
    if request.intent not in INTENTS:
        raise ConfigError(did_you_mean(str(request.intent), INTENTS, "intent"), "intent")


def check_context(context: ServiceContext) -> None:
    """Refuse figures that no decision can be made with.

    Raises:
        ConfigError: with the field as its path.
    """
    _check(context.nbytes, 0 <= _number(context.nbytes) <= MAX_BYTES, f"from 0 to {MAX_BYTES} bytes", "nbytes")
    _check(context.model_s, 0 <= _number(context.model_s) <= MAX_SECONDS, f"from 0 to {MAX_SECONDS} s", "model_s")
    if context.slo_s is not None:
        _check(
            context.slo_s,
            abs(_number(context.slo_s)) <= MAX_FIGURE or context.slo_s == inf,
            f"a number of s up to {MAX_FIGURE:g}, infinity, or None",
            "slo_s",
        )
    good = context.active is None or 0 <= _number(context.active) <= MAX_ACTIVE
    _check(context.active, good, f"from 0 to {MAX_ACTIVE} fetches, or None", "active")
    if (bandwidth := context.bandwidth) is not None:
        good = MIN_RATE <= _number(bandwidth) <= MAX_FIGURE or bandwidth == inf
        _check(bandwidth, good, f"from {MIN_RATE:g} to {MAX_FIGURE:g} bytes/s, infinity, or None", "bandwidth")


def check_reckoning(context: ServiceContext) -> None:
    """Refuse tokens and times that T_model and the deadline cannot be reckoned from.

    Raises:
        ConfigError: with the field as its path.
    """
    for name, most in COUNTS.items():
        value = getattr(context, name)
        _check(value, (name == "tokens" and value is None) or 0 <= _number(value) <= most, f"from 0 to {most}", name)
    if context.slo_kind not in SLO_KINDS:
        raise ConfigError(did_you_mean(str(context.slo_kind), SLO_KINDS, "slo_kind"), "slo_kind")


def check_chunk(chunk_bytes: float | None) -> float | None:
    """Refuse what is no size of a chunk.

    Raises:
        ConfigError: it is neither None nor above 0 and finite.
    """
    if chunk_bytes is not None and not 0 < _number(chunk_bytes) <= MAX_BYTES:
        raise ConfigError(
            f"{shown(chunk_bytes)} is no size of a chunk; expected above 0 to {MAX_BYTES} bytes, or None", "chunk_bytes"
        )
    return chunk_bytes


def _number(value: object) -> float:
    """NaN, which is in no range, for what is no number."""
    return value if isinstance(value, (int, float)) else nan


def _check(value: object, good: bool, expected: str, path: str) -> None:
    if not good:
        raise ConfigError(f"{shown(value)} is out of range; expected {expected}", path)


def known_profiles(
    library: ProfileLibrary | None, self_test: Callable[[], Iterable[Profile]] | None = None
) -> tuple[Profile, ...]:
    """Raw and lossless (of the library, else self-tested, else cautious defaults), then the library's others."""
    found = {p.name: p for p in (library.profiles if library else ())}
    measured = {p.name: p for p in self_test()} if self_test and not found.keys() >= {RAW, LOSSLESS} else {}
    default = {RAW: RAW_PROFILE, LOSSLESS: LOSSLESS_PROFILE}
    exact = {name: found.get(name) or measured.get(name) or profile for name, profile in default.items()}
    return tuple((exact | {n: p for n, p in found.items() if n not in exact}).values())


@dataclass(frozen=True)
class Filter:
    """The rules of one controller.

    min_quality: for requests that name none. fingerprint: of the model served, None when it is not known.
    allow_unprofiled: profiles that may be used without a quality record.
    """

    library: ProfileLibrary | None
    min_quality: float
    fingerprint: str | None = None
    allow_unprofiled: Collection[str] = ()

    def quality(self, profile: Profile, workload: str) -> float | None:
        """The lower confidence bound on this model, or None when it was not measured; 1 only where nothing is lost."""
        if profile.exact:
            return 1.0
        record = profile.quality_for(workload) if self._same_model() else None
        return min(record.lower, BELOW_EXACT) if record else None

    def stands_in(self, workload: str) -> str | None:
        """Where profiles that were not measured on a workload are judged by the default records: a word on that."""
        judged = [p for p in self.library.profiles if not p.exact] if self.library and self._same_model() else []
        unmeasured = [p for p in judged if workload not in p.quality and DEFAULT_WORKLOAD in p.quality]
        if workload == DEFAULT_WORKLOAD or not unmeasured:
            return None
        measured = ", ".join(map(repr, sorted({name for p in judged for name in p.quality})[:SHOWN]))
        some = f"of {len(unmeasured)} of {len(judged)} profiles " if len(unmeasured) < len(judged) else ""
        return (
            f"workload {workload!r} was not measured {some}and is judged by the records of {DEFAULT_WORKLOAD!r}"
            f" (measured: {measured}); profile it, or check its name"
        )

    def refusal(self, profile: Profile, request: Request) -> str | None:
        """Why a profile may not serve a request, or None. Raw always may: every peer reads it."""
        if profile.name == RAW:
            return None
        if request.acceptable is not None and profile.name not in request.acceptable:
            return "the peer cannot decode it"
        if request.intent == "store" and profile.pipeline.recent_tokens:
            return "it keeps recent tokens raw, which depends on the prompt; a store needs recent_tokens 0"
        if self.library and (missing := self.library.missing(profile)):
            return f"the library lacks its artefact {missing[0][:16]!r}; restore the library"
        return self._quality_refusal(profile, request)

    def _quality_refusal(self, profile: Profile, request: Request) -> str | None:
        floor = self.min_quality if request.min_quality is None else request.min_quality
        if floor == 1.0 and not profile.exact:
            return "it may lose something, whatever was measured; a floor of 1 asks for exact KV"
        quality = self.quality(profile, request.workload)
        if quality is not None:
            return None if quality >= floor else f"quality {quality:.4g} (lower bound) is below {floor:.4g}"
        if profile.name in self.allow_unprofiled:
            return None
        if not self._same_model():
            return "the library was measured on another model (fingerprint differs); profile this one"
        known = ", ".join(map(repr, sorted(profile.quality)[:SHOWN])) or "none"
        return (
            f"no quality record for workload {request.workload!r} (measured: {known}); profile it,"
            " or name the profile in allow_unprofiled"
        )

    def _same_model(self) -> bool:
        return self.library is None or self.fingerprint is None or self.library.fingerprint == self.fingerprint
