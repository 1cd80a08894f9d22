"""A component whose module is a package."""

from __future__ import annotations

from collections.abc import Sequence

from kvserve_core.policy import Candidate, Choice, Policy, ServiceContext


class First(Policy):
    """Always the first candidate."""

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        """Index 0."""
        return Choice(0, "first")
