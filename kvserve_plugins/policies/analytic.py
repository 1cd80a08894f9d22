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

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._enough = 1.0 - config.min_gain

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        """The first, for candidates come fastest first; or a simpler one, when the gain over it is too small."""
        del context
        best, limit_s, enough = 0, candidates[0].latency_s, self._enough
        for i in range(1, len(candidates)):
            other = candidates[i]
            if enough * other.latency_s >= limit_s:  # so is that of all that follow
                break
            if _simpler(other, candidates[best]):
                best, limit_s = i, other.latency_s
        return Choice(best, SIMPLER) if best else FASTEST


def _simpler(other: Candidate, than: Candidate) -> bool:
    """Raw is simpler than all, what loses nothing than what does."""
    if RAW in (other.profile, than.profile):
        return other.profile == RAW != than.profile
    return other.quality >= EXACT > than.quality
