"""A plugin with a misspelt hook, an optional unknown one, and a right one."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl


@hookimpl
def kvserve_codec() -> Iterator[Component]:
    """The s is missing."""
    yield Component("misspelt.never", "acme_misspelt.codecs:Never")


@hookimpl(optionalhook=True)
def kvserve_of_a_later_version() -> Iterator[Component]:
    """Unknown here, and marked so."""
    yield Component("misspelt.later", "acme_misspelt.codecs:Later")


@hookimpl
def kvserve_transforms() -> Iterator[Component]:
    """Right."""
    yield Component("misspelt.right", "acme_misspelt.transforms:Right", "Declared by a right hook.")
