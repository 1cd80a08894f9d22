"""Classes that cannot serve as policies."""

from __future__ import annotations

from kvserve_core.policy import Candidate, Choice, Policy, ServiceContext


class NoBase:
    """Is not a Policy."""


class NoConfig(Policy):
    """Its Config is not a ComponentConfig."""

    Config = dict  # type: ignore[assignment]  # the mistake that is tested

    def choose(self, context: ServiceContext, candidates: list[Candidate]) -> Choice:
        """Index 0."""
        return Choice(0, "first")


class Abstract(Policy):
    """Implements nothing."""


def a_function() -> None:
    """Is not a class."""
