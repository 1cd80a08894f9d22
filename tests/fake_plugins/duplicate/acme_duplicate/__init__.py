"""Takes a built-in's name, declares one name twice, and leaves a name undotted."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl


@hookimpl
def kvserve_policies() -> Iterator[Component]:
    """Four declarations, of which two stand."""
    yield Component("static", "acme_duplicate.policies:Static", "Taken by a built-in.")
    yield Component("dup.twice", "acme_duplicate.policies:First", "The first of two.")
    yield Component("dup.twice", "acme_duplicate.policies:Second", "The second of two.")
    yield Component("undotted", "acme_duplicate.policies:Undotted", "Free, but not dotted.")
