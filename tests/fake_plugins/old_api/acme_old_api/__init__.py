"""Components written for other plugin apis."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl


@hookimpl
def kvserve_codecs() -> Iterator[Component]:
    """One too old, one too new."""
    yield Component("old.codec", "acme_old_api.codecs:Old", "Too old.", api=0)
    yield Component("new.codec", "acme_old_api.codecs:New", "Too new.", api=99)
