"""Manifests that look right, of classes that are not."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl


@hookimpl
def kvserve_policies() -> Iterator[Component]:
    """Each is found out when it is imported."""
    for name in ("NoBase", "NoConfig", "Abstract", "Absent", "a_function"):
        yield Component(f"unfit.{name.lower()}", f"acme_unfit.policies:{name}", "Unfit.")
    yield Component("unfit.crash", "acme_unfit.crash:Crash", "Fails when imported.")
    yield Component("unfit.nowhere", "acme_unfit.nowhere:Nowhere", "Has no module.")
    yield Component("unfit.device", "acme_unfit.policies:NoBase", "Needs a device.", needs=("abacus",))
