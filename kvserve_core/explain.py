"""A decision in words: the candidates with their estimates, then every other profile with the reason it is not one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvserve_core.latency import threshold
from kvserve_core.overlap import SEQUENTIAL, Form
from kvserve_core.policy import Candidate, Decision
from kvserve_core.pricing import Priced
from kvserve_core.units import format_bandwidth, format_bytes, format_duration


class Explainer:
    """Renders a decision lazily, with raw first in ``feasible``. A pickled one explains what the decision holds."""

    __slots__ = ("_feasible", "_form", "note")

    def __init__(self, feasible: Sequence[Priced] = (), form: Form = SEQUENTIAL, note: str | None = None) -> None:
        self._feasible = feasible
        self._form = form
        self.note = note

    def __call__(self, decision: Decision) -> str:
        """One line for the decision, and one for each profile."""
        refused = (f"- {name}: {reason}" for name, reason in decision.rejected)
        said = [f"- {self.note}"] if self.note else []
        return "\n".join([*_offered(decision), *_left_out(decision, self._feasible, self._form), *refused, *said])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Explainer)  # how a decision is rendered is no part of what was decided

    def __hash__(self) -> int:
        return hash(Explainer)

    def __reduce__(self) -> tuple[type[Explainer], tuple[()]]:
        return Explainer, ()


def _offered(decision: Decision) -> Iterator[str]:
    context = decision.context
    size, rate = format_bytes(context.nbytes), format_bandwidth(decision.bandwidth)
    slo = "no SLO" if context.slo_s is None else f"SLO {format_duration(context.slo_s)}"
    yield f"{decision.profile}: {decision.reason} ({size} at {rate}, {slo}, workload {context.workload!r})"
    for candidate in decision.candidates:
        yield _row(candidate, candidate.profile == decision.profile, context.slo_s)


def _row(candidate: Candidate, chosen: bool, slo_s: float | None) -> str:
    parts = {"encode": candidate.encode_s, "transfer": candidate.transfer_s, "decode": candidate.decode_s}
    spent = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts.items())
    late = "; misses the SLO" if slo_s is not None and candidate.latency_s > slo_s else ""
    total, known = format_duration(candidate.latency_s), f"cr {candidate.cr:.3g}, quality {candidate.quality:.4g}"
    return f"{'*' if chosen else ' '} {candidate.profile}: {total} ({spent}; {known}){late}"


def _left_out(decision: Decision, feasible: Sequence[Priced], form: Form) -> Iterator[str]:
    """What is feasible but not near the envelope here, at the costs known now."""
    nbytes, bandwidth = decision.context.nbytes, decision.bandwidth
    offered = {c.profile for c in decision.candidates}
    for priced in feasible:
        if (name := priced.profile.name) in offered:
            continue
        encode_s, decode_s, wire = priced.costs(nbytes)
        total_s = decision.context.model_s + form.seconds(encode_s, wire / bandwidth, decode_s, nbytes)
        yield f"- {name}: {format_duration(total_s)}; {_why(priced, feasible[0], decision, form)}"


def _why(priced: Priced, raw: Priced, decision: Decision, form: Form) -> str:
    """Where it would beat raw: told by Theorem 6.1, which is about stages one after another."""
    limit = threshold(priced.line(decision.context.nbytes, form), raw.line(decision.context.nbytes, form))
    if form.chunk_bytes or limit > decision.bandwidth:
        return "slower than those above"
    return f"no benefit, pays below {format_bandwidth(limit)}" if limit else "no benefit at any bandwidth"
