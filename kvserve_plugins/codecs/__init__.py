"""Built-in codecs."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl


@hookimpl
def kvserve_codecs() -> Iterator[Component]:
    """Declare the codecs."""
    yield Component(
        "raw",
        "kvserve_plugins.codecs.raw:Raw",
        "Sends codes as they stand.",
    )
    yield Component(
        "bitpack",
        "kvserve_plugins.codecs.bitpack:Bitpack",
        "Packs codes at a fixed rate, in mixed radix where that is smaller than whole bits.",
    )
    yield Component(
        "zstd",
        "kvserve_plugins.codecs.zstd:Zstd",
        "Zstandard on the CPU, by default tuned for entropy coding of quantized codes.",
        requires=("zstandard",),
    )
