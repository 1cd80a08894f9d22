"""The marker was forgotten."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component


def kvserve_codecs() -> Iterator[Component]:
    """Never called."""
    yield Component("unmarked.codec", "acme_no_hook.codecs:Never")
