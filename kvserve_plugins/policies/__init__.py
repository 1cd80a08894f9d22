"""Built-in policies. Manifests only: the classes are imported when they are used."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl


@hookimpl
def kvserve_policies() -> Iterator[Component]:
    """The policies that come with kvserve."""
    here = "kvserve_plugins.policies"
    yield Component("analytic", f"{here}.analytic:Analytic", "The candidate with the lowest estimated latency.")
    yield Component(
        "bandit",
        f"{here}.bandit:Bandit",
        "Eq. 1 plus learned residuals, with rare and SLO-safe tries of the envelope's neighbours.",
    )
    yield Component("static", f"{here}.static:Static", "Always the named profile; raw where it is not feasible.")
