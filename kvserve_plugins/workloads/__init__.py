"""Built-in workload classifiers. Manifests only: the classes are imported when they are used."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl


@hookimpl
def kvserve_workload() -> Iterator[Component]:
    """The classifier that comes with kvserve."""
    yield Component(
        "rules",
        "kvserve_plugins.workloads.rules:Rules",
        "Code, maths, long documents and chat, told apart by countable signs.",
    )
