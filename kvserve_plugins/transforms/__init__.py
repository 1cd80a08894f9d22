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
    yield Component(
        "derope",
        "kvserve_plugins.transforms.derope:Derope",
        "Undoes the rotary embedding of keys, which hides what their channels have in common.",
    )
    yield Component(
        "center",
        "kvserve_plugins.transforms.center:Center",
        "Subtracts the mean of each channel of a head over the segment.",
    )
    yield Component(
        "affine",
        "kvserve_plugins.transforms.affine:Affine",
        "Brings each channel of a head to one scale over the segment, and to mean 0 if asked.",
    )
    yield Component(
        "klt",
        "kvserve_plugins.transforms.klt:KLT",
        "Projects a block of layers onto the calibrated components that carry its variance.",
        requires=("safetensors",),
        extra="kvserve[hf]",
    )
    yield Component(
        "delta",
        "kvserve_plugins.transforms.delta:Delta",
        "Replaces the tokens of a group by their differences to its first token, the anchor.",
    )
