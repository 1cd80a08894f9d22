"""For baselines, and for operators who have made up their mind."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from kvserve_core.component import ComponentConfig
from kvserve_core.policy import RAW, Candidate, Choice, Policy, ServiceContext


class Static(Policy):
    """Always the named profile; raw where it is not feasible."""

    class Config(ComponentConfig):
        """profile: a name in the library, or ``raw`` or ``lossless``; checked when the controller is built."""

        profile: str = Field(min_length=1)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.wants = (config.profile,)

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        """The named profile, else raw: the decision's ``rejected`` says why it is not among the candidates."""
        del context
        names = [c.profile for c in candidates]
        if self.config.profile in names:
            return Choice(names.index(self.config.profile), "static")
        return Choice(names.index(RAW), f"{self.config.profile} is not feasible")
