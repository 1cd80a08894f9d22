"""A hook wrapper, which kvserve does not have."""

from __future__ import annotations

from collections.abc import Generator

from kvserve_core.hookspecs import hookimpl


@hookimpl(wrapper=True)
def kvserve_codecs() -> Generator[None, object, object]:
    """Wraps nothing."""
    return (yield)
