"""Yields a class, text, and manifests with mistakes in them, between two good ones."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl


@hookimpl
def kvserve_quantizers() -> Iterator[object]:
    """What people get wrong."""
    yield Component("odd.first", "acme_not_a_component.parts:First", "Good, before.")
    yield dict
    yield "odd.text"
    yield Component("Odd Name", "acme_not_a_component.parts:Name")
    yield Component("odd.target", "acme_not_a_component.parts.Target")
    yield Component("odd.requires", "acme_not_a_component.parts:Requires", requires="zstandard")  # type: ignore[arg-type]  # the mistake that is tested
    yield Component("odd.api", "acme_not_a_component.parts:Api", api="1")  # type: ignore[arg-type]  # the mistake that is tested
    yield Component("odd.last", "acme_not_a_component.parts:Last", "Good, after.")
