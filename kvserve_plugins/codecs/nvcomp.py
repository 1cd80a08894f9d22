"""nvCOMP's codecs on the GPU: one table of algorithms, one class for all, batched, with sizes left on the device.

A part becomes chunks of ``chunk_bytes``; one nvCOMP call codes the chunks of all parts; one Triton kernel packs each
part's chunks into one blob (:mod:`kvserve_plugins.kernels.nvcomp_layout`). See docs/adr/0003. nvCOMP does not validate
what it decodes: take frames with these codecs from trusted peers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from kvserve_core.component import ANY, Capabilities, ComponentConfig, Tunable
from kvserve_core.errors import FrameError, UnavailableComponentError
from kvserve_core.stages import Codec
from kvserve_core.tensor import Encoded, Part
from kvserve_plugins.kernels.launching import launch
from kvserve_plugins.kernels.nvcomp_api import FLOAT16, UCHAR, Algorithm, Batch, NvcompCalls, Results, Way
from kvserve_plugins.kernels.nvcomp_layout import I64, Layout, Plan, aligned, to_device

if TYPE_CHECKING:
    from kvserve_core.artefacts import Artefacts
    from kvserve_core.spec import KVSpec, Region

ALGORITHMS = {
    "ans": Algorithm("ANS", ("ii", (0, UCHAR)), ("ii", (0, UCHAR))),
    "bitcomp": Algorithm("Bitcomp", ("ii", (0, UCHAR))),
    "cascaded": Algorithm("Cascaded", ("iiQQQB", (UCHAR, 1, 1, 0, 7, 3)), ("iiiiQQ", (0, 0, UCHAR, 1, 1, 0))),
    "deflate": Algorithm("Deflate", ("i", (1,))),
    "gdeflate": Algorithm("Gdeflate", ("i", (1,))),
    "lz4": Algorithm("LZ4", ("i", (UCHAR,)), ("iii", (0, 0, UCHAR))),
    "zstd": Algorithm("Zstd"),
}
"""ANS: type, data type. Bitcomp: algorithm, data type. Cascaded: data type, asymmetric mode, bit packing, no coarse and
all fine encodings, level 3; on the way back a backend and its padding come first. Deflate, GDeflate: algorithm.
LZ4: data type; on the way back after backend and sort flag."""


class NvcompCodec(Codec):
    """What the codecs below share; ``algorithm`` is their key in :data:`ALGORITHMS`."""

    class Config(ComponentConfig):
        """chunk_bytes: larger ones compress better and decode slower. batch_bytes: codes to allocate scratch for."""

        chunk_bytes: int = Tunable(2**16, choices=(2**16, 2**18, 2**20), ge=2**12, le=2**24)
        batch_bytes: int = 2**26

    config: Config
    caps = Capabilities(
        exact=True,
        encode_on=frozenset({"cuda"}),
        decode_on=frozenset({"cuda"}),
        planes=ANY,
        head_local=True,
        async_size=True,
        max_alphabet=2**15,
    )
    algorithm: ClassVar[str]

    @property
    def variant(self) -> Algorithm:
        """What nvCOMP is asked for."""
        return ALGORITHMS[self.algorithm]

    _calls: NvcompCalls
    _device: torch.device
    _plans: dict[tuple[int, ...], Plan]
    _slots: Tensor

    def bind(self, at: Region, spec: KVSpec, device: torch.device, artefacts: Artefacts) -> Self:
        """Load the library. Scratch for a batch of codes comes with the first that is encoded, on the stream of that;
        a larger one grows it.

        Raises:
            UnavailableComponentError: no GPU, or no nvCOMP.
        """
        bound = super().bind(at, spec, device, artefacts)
        if device.type != "cuda":
            raise UnavailableComponentError(f"nvCOMP works on an NVIDIA GPU, not on {device.type!r}; use 'zstd' there")
        bound._calls, bound._device, bound._plans = NvcompCalls(self.variant), device, {}
        bound._slots = bound._bytes(0)
        return bound

    def bound(self, part: Part) -> int:
        """Table of chunk sizes, plus nvCOMP's bound of each chunk."""
        return int(Layout.of([part.nbytes], self.config.chunk_bytes, self._calls.chunk_bound).caps[0])

    def encode(self, parts: Sequence[Part]) -> list[Encoded]:
        """Blobs are slices of one fresh buffer, so results of several launches stay valid until dropped."""
        plan = self._plan(parts)
        blobs = self._bytes(sum(plan.caps))
        some = torch.zeros if 0 in plan.lengths else torch.empty
        totals = some(len(parts), dtype=torch.int64, device=self._device)
        if plan.chunks:
            codes = [aligned(p.codes) for p in parts]
            self._compress(plan, tuple([c.data_ptr() for c in codes]), blobs, totals)
        return list(map(Encoded, blobs.split(plan.caps), totals.unbind()))

    def _compress(self, plan: Plan, where: tuple[int, ...], blobs: Tensor, totals: Tensor) -> None:
        from kvserve_plugins.kernels.nvcomp_kernels import BLOCK, pack_kernel  # Triton comes with a CUDA build of torch

        if plan.room > self._slots.numel():
            chunks = -(-self.config.batch_bytes // self.config.chunk_bytes)
            self._slots = self._bytes(max(plan.room, chunks * self._calls.chunk_bound(self.config.chunk_bytes)))
        call = plan.kept.get((where, self._slots.data_ptr()), lambda: self._chunks(plan, where))
        sizes, status, temp = self._scratch(plan, "Compress")
        first = call.data_ptr()
        batch = Batch(first, plan.table.data_ptr(), plan.chunks, plan.largest)
        out = Results(first + 8 * plan.chunks, sizes.data_ptr(), status.data_ptr())
        self._calls.compress(batch, (temp.data_ptr(), temp.numel()), out, self._stream())
        given = {
            "plan": plan.table, "slots": self._slots, "sizes": sizes, "status": status, "blobs": blobs,
            "totals": totals, "chunks": plan.chunks, "width": plan.width, "block": BLOCK,
        }  # fmt: skip
        launch(pack_kernel, plan.chunks, plan.kind, given)

    def _chunks(self, plan: Plan, where: tuple[int, ...]) -> Tensor:
        """Addresses of the chunks of streams that begin at ``where``, and of the slots for what they become."""
        source = np.array(where, np.int64)[plan.layout.part] + plan.layout.within
        return to_device(self._device, source, plan.slots + self._slots.data_ptr())

    def decode(self, blobs: Sequence[Encoded], like: Sequence[Part]) -> list[Tensor]:
        """Codes again. What only the device can see is left in ``ok``, 1 or 0 a blob, for after the fence.

        Raises:
            FrameError: a blob shorter than its own table.
        """
        plan = self._plan(like)
        limits = np.array([b.data.numel() for b in blobs], np.int64)
        if (limits < plan.layout.header).any():
            raise FrameError(f"a blob of {limits.min()} bytes is shorter than its own table of chunk sizes")
        out = self._bytes(sum(plan.padded))
        self.ok = torch.ones(len(blobs), dtype=torch.uint8, device=self._device)
        if plan.chunks:
            data = [aligned(b.data) for b in blobs]
            source = np.array([d.data_ptr() for d in data], np.int64)
            self._decompress(plan, source[plan.layout.part], limits[plan.layout.part], out)
        pieces = zip(out.split(plan.padded), plan.lengths, like, strict=True)
        return [piece[:n].view(part.codes.dtype) for piece, n, part in pieces]

    def _decompress(self, plan: Plan, source: I64, limits: I64, out: Tensor) -> None:
        from kvserve_plugins.kernels.nvcomp_kernels import BLOCK, unpack_kernel, verdict_kernel

        call = to_device(self._device, source, limits, plan.target + out.data_ptr(), limits, limits)
        given = {"plan": plan.table, "call": call, "chunks": plan.chunks, "width": plan.width}
        launch(unpack_kernel, plan.chunks, plan.kind, given)
        actual, status, temp = self._scratch(plan, "Decompress")
        first, row = call.data_ptr(), 8 * call.shape[1]
        batch = Batch(first + 3 * row, first + 4 * row, plan.chunks, plan.largest)
        results = Results(first + 2 * row, actual.data_ptr(), status.data_ptr())
        room = plan.table.data_ptr()
        self._calls.decompress(batch, room, (temp.data_ptr(), temp.numel()), results, self._stream())
        given = {
            "plan": plan.table, "actual": actual, "status": status, "ok": self.ok, "chunks": plan.chunks, "block": BLOCK
        }  # fmt: skip
        launch(verdict_kernel, -(-plan.chunks // BLOCK), plan.kind, given)

    def _plan(self, parts: Sequence[Part]) -> Plan:
        lengths = tuple([p.nbytes for p in parts])
        if lengths not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[lengths] = Plan(lengths, self.config.chunk_bytes, self._device, self._calls)
        return self._plans[lengths]

    def _scratch(self, plan: Plan, way: Way) -> tuple[Tensor, Tensor, Tensor]:
        counts = torch.empty(plan.chunks, dtype=torch.int64, device=self._device)
        status = torch.empty(plan.chunks, dtype=torch.int32, device=self._device)
        return counts, status, self._bytes(plan.temp[way])

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream


MAX_PLANS = 256
"""Batches by their lengths whose plans are kept."""


class NvcompANS(NvcompCodec):
    """nvCOMP's rANS on an NVIDIA GPU: the fastest entropy coder there, for quantized codes.

    ``data_type`` f16 is for the bytes of bf16 or f16 values (behind ``identity``): it models exponents and passes
    mantissas on, in one pass over the cache.
    """

    class Config(NvcompCodec.Config):
        """data_type: u8 for codes; f16 for two-byte floats, which a part of odd length cannot be."""

        data_type: Literal["u8", "f16"] = "u8"

    config: Config
    algorithm = "ans"

    @property
    def variant(self) -> Algorithm:
        """Compression and decompression name the same type."""
        kind = UCHAR if self.config.data_type == "u8" else FLOAT16
        return Algorithm("ANS", ("ii", (0, kind)), ("ii", (0, kind)))


class NvcompBitcomp(NvcompCodec):
    """nvCOMP's Bitcomp on an NVIDIA GPU: faster than rANS to encode, for codes of few levels.

    Decoding waits for the stream: nvCOMP reads the blobs on the host first. For 16 levels 436 GB/s of codes to encode
    and 93 to decode, where rANS has 378 and 613 (one H200, 32 MiB).
    """

    algorithm = "bitcomp"


class NvcompCascaded(NvcompCodec):
    """nvCOMP's Cascaded on an NVIDIA GPU: runs, differences and bit packing, for regular codes."""

    algorithm = "cascaded"


class NvcompDeflate(NvcompCodec):
    """nvCOMP's Deflate on an NVIDIA GPU: the common format, slow to encode."""

    algorithm = "deflate"


class NvcompGDeflate(NvcompCodec):
    """nvCOMP's GDeflate on an NVIDIA GPU: Deflate laid out for a GPU's threads."""

    algorithm = "gdeflate"


class NvcompLZ4(NvcompCodec):
    """nvCOMP's LZ4 on an NVIDIA GPU: repeated strings only, no entropy coder."""

    algorithm = "lz4"


class NvcompZstd(NvcompCodec):
    """nvCOMP's Zstandard on an NVIDIA GPU: the best ratio for text-like bytes, slow to encode."""

    algorithm = "zstd"
