"""Built-in codecs."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl

NVCOMP = (
    (
        "nvcomp_ans",
        "NvcompANS",
        "nvCOMP's rANS on an NVIDIA GPU: the fastest entropy coder there, for quantized codes.",
    ),
    (
        "nvcomp_bitcomp",
        "NvcompBitcomp",
        "nvCOMP's Bitcomp on an NVIDIA GPU: faster than rANS to encode, for codes of few levels.",
    ),
    (
        "nvcomp_cascaded",
        "NvcompCascaded",
        "nvCOMP's Cascaded on an NVIDIA GPU: runs, differences and bit packing, for regular codes.",
    ),
    ("nvcomp_deflate", "NvcompDeflate", "nvCOMP's Deflate on an NVIDIA GPU: the common format, slow to encode."),
    ("nvcomp_gdeflate", "NvcompGDeflate", "nvCOMP's GDeflate on an NVIDIA GPU: Deflate laid out for a GPU's threads."),
    ("nvcomp_lz4", "NvcompLZ4", "nvCOMP's LZ4 on an NVIDIA GPU: repeated strings only, no entropy coder."),
    (
        "nvcomp_zstd",
        "NvcompZstd",
        "nvCOMP's Zstandard on an NVIDIA GPU: the best ratio for text-like bytes, slow to encode.",
    ),
)
"""One library, one file, one line each."""


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
    for name, target, summary in NVCOMP:
        yield Component(
            name,
            f"kvserve_plugins.codecs.nvcomp:{target}",
            summary,
            requires=("nvidia.libnvcomp", "triton"),
            needs=("cuda",),
            extra="kvserve[nvcomp-cu13]",
        )
    yield Component(
        "rans",
        "kvserve_plugins.codecs.rans:Rans",
        "Entropy coder for centred codes: interleaved rANS under 64 tables, published or own.",
    )
