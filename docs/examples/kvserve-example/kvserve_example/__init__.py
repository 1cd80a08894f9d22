"""A kvserve plugin. It declares components; their classes, and torch, are imported when they are used."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core import Component, hookimpl


@hookimpl
def kvserve_quantizers() -> Iterator[Component]:
    """The quantizers of this package."""
    yield Component(
        "example.sign",
        "kvserve_example.sign:Sign",
        "One bit a value: above or below the mean of its head and token, or channel.",
    )


@hookimpl
def kvserve_codecs() -> Iterator[Component]:
    """The codecs of this package."""
    yield Component(
        "example.rle",
        "kvserve_example.rle:RunLength",
        "Run-length codes: a value and how often it is repeated.",
    )
