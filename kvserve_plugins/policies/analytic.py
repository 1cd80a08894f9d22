"""Trusts the latency model: eq. 1 with learned bandwidth and speeds."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from kvserve_core.component import ComponentConfig
from kvserve_core.policy import Candidate, Choice, Policy, ServiceContext

FASTEST = Choice(0, "fastest")
EXACT = 1.0


class Analytic(Policy):
    """The candidate with the lowest estimated latency.

    With ``min_gain`` a profile that loses something must beat the fastest one that loses nothing by this share of the
    latter's latency; estimates are not better than a few per cent, and a gain within that is not worth a loss.
    """

    class Config(ComponentConfig):
        """min_gain: a share of the latency, T_model included; 0 is eq. 1 to the letter."""

        min_gain: float = Field(0.0, ge=0.0, lt=1.0)

    config: Config

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        """The first, for candidates come fastest first; or the first exact one when the gain is too small."""
        del context
        if self.config.min_gain and candidates[0].quality < EXACT:
            for i, other in enumerate(candidates):
                if other.quality >= EXACT:
                    gain = 1.0 - candidates[0].latency_s / other.latency_s
                    return FASTEST if gain >= self.config.min_gain else Choice(i, "fastest without loss")
        return FASTEST
