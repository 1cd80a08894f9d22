"""Which profiles may serve a request at all, and why the others may not. Cold: asked once per kind of request."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from kvserve_core.library import Profile, ProfileLibrary
from kvserve_core.policy import RAW


class Request(NamedTuple):
    """The part of a context that decides what is feasible: the key of a menu."""

    workload: str
    min_quality: float | None
    acceptable: frozenset[str] | None
    intent: str


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
        """The lower confidence bound on this model, or None when it was not measured."""
        if profile.exact:
            return 1.0
        record = profile.quality_for(workload) if self._same_model() else None
        return record.lower if record else None

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
        quality = self.quality(profile, request.workload)
        if quality is not None:
            floor = self.min_quality if request.min_quality is None else request.min_quality
            return None if quality >= floor else f"quality {quality:.4g} (lower bound) is below {floor:.4g}"
        if profile.name in self.allow_unprofiled:
            return None
        if not self._same_model():
            return "the library was measured on another model (fingerprint differs); profile this one"
        return f"no quality record for workload {request.workload!r}; profile it, or name it in allow_unprofiled"

    def _same_model(self) -> bool:
        return self.library is None or self.fingerprint is None or self.library.fingerprint == self.fingerprint
