"""Trusts the latency model: eq. 1 with learned bandwidth and speeds."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from kvserve_core.component import ComponentConfig
from kvserve_core.policy import RAW, Candidate, Choice, Policy, ServiceContext

FASTEST = Choice(0, "fastest")
SIMPLER = "nothing gains enough over it"
EXACT = 1.0


class Analytic(Policy):
    """The candidate with the lowest estimated latency.

    With ``min_gain`` a profile that loses something must beat the fastest one that loses nothing by this share of the
    latter's latency, and that one raw in turn. Estimates are not better than a few per cent: a gain within that is not
    worth a loss, nor the cores that coding takes; and a link is known best from raw transfers, which are the largest.
    """

    class Config(ComponentConfig):
        """min_gain: a share of the latency, T_model included; 0 is eq. 1 to the letter."""

        min_gain: float = Field(0.0, ge=0.0, lt=1.0)

    config: Config

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        """The first, for candidates come fastest first; or a simpler one, when the gain over it is too small."""
        del context
        best, enough = 0, 1.0 - self.config.min_gain
        if enough < 1.0:
            for i, other in enumerate(candidates):
                if _simpler(other, candidates[best]) and candidates[best].latency_s > enough * other.latency_s:
                    best = i
        return FASTEST if best == 0 else Choice(best, SIMPLER)


def _simpler(other: Candidate, than: Candidate) -> bool:
    """Raw is simpler than all, what loses nothing than what does."""
    if RAW in (other.profile, than.profile):
        return other.profile == RAW != than.profile
    return other.quality >= EXACT > than.quality
