"""A plugin of which one hook raises half-way, and the other works."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl


@hookimpl
def kvserve_codecs() -> Iterator[Component]:
    """Declares one codec, then fails."""
    yield Component("raising.before", "acme_raising.codecs:Before", "Declared before the failure.")
    raise RuntimeError("no licence\nfound")


@hookimpl
def kvserve_policies() -> Iterator[Component]:
    """Works."""
    yield Component("raising.policy", "acme_raising.policies:Fine", "Declared by the other hook.")
