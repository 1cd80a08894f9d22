"""Demands on policies: an index that exists, a reason, and nothing changed."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.policy import RAW, Candidate, Decision, Outcome, Policy, ServiceContext
from kvserve_core.testing.check import check
from kvserve_core.testing.subject import Subject, require

CONTEXTS = (
    ServiceContext(nbytes=0),
    ServiceContext(nbytes=10**9, bandwidth=1e9),
    ServiceContext(nbytes=10**9, bandwidth=1.0, slo_s=0.0, min_quality=1.0, workload="unheard", link="new"),
    ServiceContext(nbytes=2**50, bandwidth=1e12, slo_s=1e6, intent="store"),
)


def candidates(policy: Policy) -> Iterator[tuple[Candidate, ...]]:
    """What a controller may hand over: raw alone, raw among others, and what the policy wants."""
    raw = Candidate(RAW, 1.0, 1.0, 0.0, 1.0, 0.0)
    many = tuple(Candidate(f"p{i}", 2.0 + i, 0.1 * i, 0.01, 0.05, 0.02, 0.9) for i in range(8))
    wanted = tuple(Candidate(name, 3.0, 0.5, 0.1, 0.2, 0.2) for name in policy.wants if name != RAW)
    yield (raw,)
    yield (*wanted, raw)
    yield (*many, *wanted, raw)


@check("policy")
def chooses_a_candidate(subject: Subject) -> None:
    """Whatever the context and the candidates, it answers with the index of one and with a reason."""
    policy: Policy = subject.create()
    for context in CONTEXTS:
        for given in candidates(policy):
            choice = policy.choose(context, given)
            require(0 <= choice.index < len(given), f"index {choice.index} of {len(given)} candidates in {context}")
            require(choice.reason, "it gives no reason")


@check("policy")
def learns_from_any_outcome(subject: Subject) -> None:
    """Outcomes that failed, took no time or belong to a profile it never chose do not break it."""
    policy: Policy = subject.create()
    for context in CONTEXTS:
        for given in candidates(policy):
            choice = policy.choose(context, given)
            decision = Decision(given[choice.index].profile, choice.reason, context, 1e9, given)
            for ok, seconds, profile in ((True, 0.0, decision.profile), (False, 9.0, RAW), (True, 1.0, "unheard")):
                policy.observe(decision, Outcome("t", profile, 100, 50, seconds, seconds, seconds, seconds, ok))
    for given in candidates(policy):
        require(0 <= policy.choose(CONTEXTS[1], given).index < len(given), "it chose no candidate after outcomes")
