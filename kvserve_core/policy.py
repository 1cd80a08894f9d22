"""What a policy implements, and the values that pass between controller, policy and adapter. Imports no torch."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, field, fields, make_dataclass
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import structs

from kvserve_core.component import ComponentConfig

RAW = "raw"
LOSSLESS = "lossless"
"""Built-in profile names that need no library."""


Fields = dict[str, Field[Any]]


class ServiceContext(msgspec.Struct, frozen=True, gc=False):
    """What is known when a decision is made.

    nbytes: V, original bytes to move. bandwidth: B in bytes/s, or None for the controller's own estimate.
    slo_s: the latency budget left, None for none. min_quality: q_min. workload: w.
    model_s: T_model. link: which estimate of B applies; for a store, the link it will be read over.
    acceptable: profiles the peer can decode, None for all.

    Instead of reckoning itself, a caller may say ``tokens`` (to prefill; with queue they become a part of T_model),
    ``output_tokens`` (to generate; they count when ``slo_kind`` is "jct") and ``elapsed_s`` (of ``slo_s``, since the
    request arrived). active: transfers on the link now, None when that is not known.

    A struct, like the others here: a frozen dataclass takes twenty times as long to build, and several are built for
    every decision.
    """

    __dataclass_fields__: ClassVar[Fields]

    nbytes: int
    workload: str = "default"
    bandwidth: float | None = None
    slo_s: float | None = None
    min_quality: float | None = None
    model_s: float = 0.0
    link: str = "default"
    intent: Literal["transfer", "store"] = "transfer"
    acceptable: frozenset[str] | None = None
    tokens: int | None = None
    output_tokens: int = 0
    elapsed_s: float = 0.0
    slo_kind: Literal["ttft", "jct"] = "ttft"
    active: int | None = None


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A profile that passed the quality filter, with its estimated latency (eq. 1) for this request."""

    profile: str
    cr: float
    latency_s: float
    encode_s: float
    transfer_s: float
    decode_s: float
    quality: float = 1.0


class Choice(msgspec.Struct, frozen=True, gc=False):
    """What a policy answers: an index into the candidates, and why, in a word or a sentence."""

    index: int
    reason: str


class Decision(msgspec.Struct, frozen=True, gc=False):
    """One decision per request. ``explain()`` renders the candidates lazily.

    context: the request's, with T_model and the deadline left as the controller reckoned them.
    """

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


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What a transfer cost, in durations only: the consumer's report joined with the producer's figures.

    wire_bytes counts frames as sent, metadata included. transfer_s is time on the link as the consumer saw it. total_s
    is the consumer's, from the fetch to decoded KV.

    For policies the controller adds, once it has learned from the report: spent_s, what eq. 1 without T_model is about,
    and expected_s, what it now expects of such a transfer; where the report says what each stage took, and that is no
    surprise, just that, for the model follows these itself. Their difference is what the model does not explain.
    """

    __dataclass_fields__: ClassVar[Fields]

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
    spent_s: float = 0.0
    expected_s: float = 0.0


def joined(parts: Sequence[Outcome]) -> Outcome:
    """One transfer over several ranks: bytes add up, the slowest rank's seconds count."""
    return structs.replace(
        parts[0],
        raw_bytes=sum(p.raw_bytes for p in parts),
        wire_bytes=sum(p.wire_bytes for p in parts),
        encode_s=max(p.encode_s for p in parts),
        transfer_s=max(p.transfer_s for p in parts),
        decode_s=max(p.decode_s for p in parts),
        total_s=max(p.total_s for p in parts),
        ok=all(p.ok for p in parts),
        reason="; ".join(p.reason for p in parts if p.reason),
    )


def _fields(kind: type[msgspec.Struct]) -> Fields:
    """What ``dataclasses.replace`` asks of a type: engines and policies treat these structs as any dataclass."""
    known = structs.fields(kind)
    named = [(f.name, f.type, field() if f.required else field(default=f.default)) for f in known]
    return {f.name: f for f in fields(make_dataclass(kind.__name__, named))}


ServiceContext.__dataclass_fields__ = _fields(ServiceContext)
Outcome.__dataclass_fields__ = _fields(Outcome)


class Policy(ABC):
    """Picks one of the candidates the controller hands it: the lower envelope at this bandwidth and its neighbours.

    clock: seconds that never fall, for policies that keep time. It is :func:`time.monotonic` until a controller starts
    the policy, and then the controller's own, which in a simulation is the simulated time.
    library: a digest of the profile library that the controller serves from, "" without one, before it is started:
    what was learned with another is of no use.
    rehearsal: True in a simulation, before it is started: nothing may be written that outlives the policy.
    """

    Config: ClassVar[type[ComponentConfig]] = ComponentConfig

    config: ComponentConfig
    wants: tuple[str, ...] = ()
    """Profiles that must be among the candidates wherever they are feasible, on the envelope or not."""

    clock: Callable[[], float]
    library: str = ""
    rehearsal: bool = False

    def __init__(self, config: ComponentConfig) -> None:
        self.config = config
        self.clock = time.monotonic

    def start(self, clock: Callable[[], float]) -> None:
        """Called once by the controller that will ask, before it does. What is to be read or dated is so here."""
        self.clock = clock

    @abstractmethod
    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        """An index into ``candidates`` (never empty; raw is one of them), ordered by estimated latency."""

    def residuals(self, decision: Decision) -> Mapping[str, float]:
        """Seconds by which the policy thinks the estimates of ``decision`` are short, by profile, for explanations."""
        del decision
        return {}

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        """Learn from what the decision cost. The default learns nothing."""
        del decision, outcome
