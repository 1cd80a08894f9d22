"""Hooks with arguments that the specification lacks."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl


@hookimpl
def kvserve_codecs(registry: object) -> Iterator[Component]:
    """Takes an argument."""
    yield Component("signature.codec", "acme_signature.codecs:Never")
