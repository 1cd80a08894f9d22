"""Built-in transforms."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl


@hookimpl
def kvserve_transforms() -> Iterator[Component]:
    """Declare the transforms."""
    yield Component(
        "identity",
        "kvserve_plugins.transforms.identity:Identity",
        "Passes values on unchanged.",
    )
    yield Component(
        "hadamard",
        "kvserve_plugins.transforms.hadamard:Hadamard",
        "Spreads outliers over a head's channels with a randomised Hadamard rotation.",
    )
