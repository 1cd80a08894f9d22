"""What a policy implements, and the values that pass between controller, policy and adapter. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import msgspec

from kvserve_core.component import ComponentConfig

RAW = "raw"
LOSSLESS = "lossless"
"""Built-in profile names that need no library."""


@dataclass(frozen=True)
class ServiceContext:
    """What is known when a decision is made.

    nbytes: V, original bytes to move. bandwidth: B in bytes/s, or None for the controller's own estimate.
    slo_s: the latency budget left, None for none. min_quality: q_min. workload: w.
    model_s: T_model. link: which estimate of B applies. acceptable: profiles the peer can decode, None for all.
    """

    nbytes: int
    workload: str = "default"
    bandwidth: float | None = None
    slo_s: float | None = None
    min_quality: float | None = None
    model_s: float = 0.0
    link: str = "default"
    intent: Literal["transfer", "store"] = "transfer"
    acceptable: frozenset[str] | None = None


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A profile that passed the quality filter, with its estimated latency (eq. 1) for this request.

    A struct, like :class:`Choice` and :class:`Decision`: a frozen dataclass takes six times as long to build, and
    several are built for every decision.
    """

    profile: str
    cr: float
    latency_s: float
    encode_s: float
    transfer_s: float
    decode_s: float
    quality: float = 1.0


class Choice(msgspec.Struct, frozen=True, gc=False):
    """What a policy answers: an index into the candidates, and one word why."""

    index: int
    reason: str


class Decision(msgspec.Struct, frozen=True, gc=False):
    """One decision per request. ``explain()`` renders the candidates lazily."""

    profile: str
    reason: str
    context: ServiceContext
    bandwidth: float
    candidates: tuple[Candidate, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    _explain: Callable[[Decision], str] | None = None

    def explain(self) -> str:
        """Why: candidates with their estimates, and who was filtered by what."""
        return self._explain(self) if self._explain else f"{self.profile}: {self.reason}"


@dataclass(frozen=True)
class Outcome:
    """What a transfer cost, in durations only: the consumer's report joined with the producer's figures.

    wire_bytes counts frames as sent, metadata included. transfer_s is time on the link as the consumer saw it.
    """

    transfer_id: str
    profile: str
    raw_bytes: int
    wire_bytes: int
    encode_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    ok: bool = True
    reason: str = ""
    link: str = "default"


class Policy(ABC):
    """Picks one of the candidates the controller hands it: the lower envelope at this bandwidth and its neighbours."""

    Config: ClassVar[type[ComponentConfig]] = ComponentConfig

    config: ComponentConfig
    wants: tuple[str, ...] = ()
    """Profiles that must be among the candidates wherever they are feasible, on the envelope or not."""

    def __init__(self, config: ComponentConfig) -> None:
        self.config = config

    @abstractmethod
    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        """An index into ``candidates`` (never empty; raw is one of them), ordered by estimated latency."""

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        """Learn from what the decision cost. The default learns nothing."""
        del decision, outcome
