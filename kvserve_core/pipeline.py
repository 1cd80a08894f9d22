"""Build, cut, encode, decode: the data path of every engine and transport.

``encode`` is a loop over transforms, one quantizer call and one batched codec call; it never synchronises. What can
not be represented (NaN, Inf) or does not pay is sent raw, segment by segment, and the frame says so.
"""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.chains import ChainSet
from kvserve_core.errors import EscapeSegment, KVServeError, UnsupportedSpecError
from kvserve_core.launched import Draft, Launched, Settled
from kvserve_core.payload import as_bytes, bodies_on_device, body_bytes, pack, pack_meta
from kvserve_core.plan import RAW_CHAIN_ID, ChainTraits, Lane, Planned, check_size, lanes, plan, planes_of
from kvserve_core.profile import LOSSLESS_PLANES, RAW_CHAIN, PipelineSpec
from kvserve_core.registry import Registry, default_registry
from kvserve_core.spec import MAX_TOKENS, KVSpec, Plane, Region, Shard
from kvserve_core.wire import (
    MAX_META,
    MAX_SEGMENTS,
    FrameHeader,
    Segment,
    pack_header,
    tables,
)

CPU = torch.device("cpu")
MAX_NAME = 256
"""Transfer ids and profile names up to this many bytes are sure to fit in the header."""
log = logging.getLogger(__name__)


class Pipeline:
    """A :class:`PipelineSpec` bound to a model, a shard and a device: the encoding side."""

    def __init__(self, spec: PipelineSpec, kv: KVSpec, shard: Shard, chains: ChainSet, ids: dict[Plane, int]) -> None:
        self.spec, self.kv, self.shard = spec, kv, shard
        self._chains, self._ids = chains, ids
        self._plain = {i for name, i in ids.items() if spec.chain_for(name) == RAW_CHAIN}
        self._lanes = lanes(spec, kv, shard, self._traits)
        if not self._lanes:
            raise UnsupportedSpecError(f"this rank's layers {shard.layers} hold nothing of the model")
        for lane in self._lanes:
            check_size(spec, lane)
            chains.bound(lane.chain.id, Region(lane.group.id, lane.plane.name, lane.layers, lane.heads, 0, 1))
            chains.bound(RAW_CHAIN_ID, Region(lane.group.id, lane.plane.name, lane.layers, lane.heads, 0, 1))
        places = [Region(a.group.id, a.plane.name, a.layers, a.heads, 0, 1) for a in self._lanes]
        self._tables, self._infos = tables(places), chains.infos
        pack_header(self._header("x" * MAX_NAME, MAX_TOKENS, MAX_SEGMENTS, 0, "x" * MAX_NAME))

    @classmethod
    def build(
        cls,
        spec: PipelineSpec | Mapping[str, Any],
        kv: KVSpec,
        shard: Shard,
        device: torch.device = CPU,
        registry: Registry | None = None,
        artefacts: Artefacts = NONE,
        path: str = "",
    ) -> Pipeline:
        """Check, create and bind everything. ``spec`` may be its JSON as a dict.

        ``path`` prefixes errors: ``profiles.balanced``.

        Raises:
            ConfigError: a bad name or field; the message starts with its path.
            UnsupportedSpecError: a stage or the cut does not fit this model or shard.
        """
        spec = PipelineSpec.parse(spec, path)
        names = [p.name for group in kv.groups for p in planes_of(spec, group)]
        unused = [p for p in spec.planes if p not in names and p not in ("*", *LOSSLESS_PLANES)]
        if unused:
            where = ".".join(filter(None, (path, "planes", unused[0])))
            raise UnsupportedSpecError(f"this model has no plane {unused[0]!r}, only {sorted(set(names))}", where)
        prefix = f"{path}." if path else ""
        unique = {spec.chain_for(name): f"{prefix}planes.{_key(spec, name)}" for name in reversed(names)}
        order = list(unique)
        ids = {name: order.index(spec.chain_for(name)) + 1 for name in names}
        paths = [(unique[chain], chain) for chain in order]
        return cls(spec, kv, shard, ChainSet(paths, kv, device, registry or default_registry(), artefacts), ids)

    def _traits(self, plane: Plane) -> ChainTraits:
        return self._chains.traits(self._ids[plane])

    @property
    def chains(self) -> tuple[tuple[str, ...], ...]:
        """``("transform:hadamard@1", "quantizer:uniform@1", "codec:zstd@1")`` per chain, for negotiation."""
        return tuple(info.stages for info in self._infos)

    @property
    def device(self) -> torch.device:
        """Where it encodes."""
        return self._chains.device

    @property
    def used_artefacts(self) -> frozenset[str]:
        """Hashes that a consumer must hold."""
        return self._chains.used_artefacts

    @property
    def lossless(self) -> bool:
        """Whether every chain in use is exact."""
        return all(self._chains.lossless(i) for i in self._ids.values())

    def regions(self, ready: range, total: int) -> Iterator[Planned]:
        """Segments of a request of ``total`` tokens whose cell became final within ``ready``."""
        return plan(self.spec, self._lanes, total, ready)

    def raw_bytes(self, total: int, start: int = 0) -> int:
        """Original bytes of a request of ``total`` tokens on this shard from token ``start`` on; what a window drops is
        not counted."""
        return sum(self.kv.nbytes(_extent(lane, total, start)) for lane in self._lanes)

    def header(self, transfer_id: str, total: int, profile: str, start: int = 0) -> tuple[FrameHeader, list[Planned]]:
        """The frame header of one request, and its whole plan: of the cells from token ``start`` on.

        Raises:
            UnsupportedSpecError: the request has more segments than a frame can hold, or ``start`` begins no cell.
        """
        if start % self.spec.segment_tokens or not 0 <= start < total:
            raise UnsupportedSpecError(
                f"token {start} of {total} begins no cell of {self.spec.segment_tokens} tokens", "start"
            )
        planned = list(self.regions(range(start, total), total))
        if start:
            planned = [replace(p, index=i) for i, p in enumerate(planned)]
        if len(planned) > MAX_SEGMENTS:
            raise UnsupportedSpecError(
                f"{total} tokens make {len(planned)} segments, a frame holds {MAX_SEGMENTS}; use a larger 'layer_block'"
                " or 'segment_tokens', or fewer 'head_groups'"
            )
        return self._header(transfer_id, total, len(planned), self.raw_bytes(total, start), profile), planned

    def _header(self, transfer_id: str, total: int, num_segments: int, raw_bytes: int, profile: str) -> FrameHeader:
        planes, layer_blocks, head_groups = self._tables
        return FrameHeader(
            transfer_id=transfer_id,
            fingerprint=self.kv.fingerprint,
            profile=profile,
            num_tokens=total,
            num_segments=num_segments,
            raw_bytes=raw_bytes,
            nonce=secrets.randbits(64),
            shard=self.shard,
            chains=self._infos,
            planes=planes,
            layer_blocks=layer_blocks,
            head_groups=head_groups,
            artefacts=tuple(sorted(self.used_artefacts)),
        )

    def encode(self, batch: Sequence[tuple[Planned, Tensor]], on_device: bool = False) -> list[Segment]:
        """Compress tensors ``[L, H, T, D]`` of the plane's dtype. :meth:`launch` and ``finish`` in one."""
        return self.launch(batch).finish(on_device)

    def launch(self, batch: Sequence[tuple[Planned, Tensor]]) -> Launched:
        """Queue T, Q and C for a batch on the current stream, without a synchronisation on a GPU."""
        if self._plain:  # as chain 0 at once, not as what a chain that does not pay falls back to
            batch = [(replace(p, chain=RAW_CHAIN_ID) if p.chain in self._plain else p, x) for p, x in batch]
        return self._launch(self._drafts(batch))

    def _launch(self, drafts: list[Draft]) -> Launched:
        by_chain: dict[int, list[Draft]] = defaultdict(list)
        for draft in drafts:
            if not draft.encoded:
                by_chain[draft.planned.chain].append(draft)
        for chain, members in by_chain.items():
            parts = [part for d in members for part in d.parts]
            results = self._chains.codec(chain).encode(parts)
            if len(results) != len(parts):
                raise KVServeError(f"a codec gave {len(results)} results for {len(parts)} parts")
            encoded = iter(results)
            for draft in members:
                draft.encoded = [next(encoded) for _ in draft.parts]
        return Launched(self, drafts)

    def _drafts(self, batch: Sequence[tuple[Planned, Tensor]]) -> list[Draft]:
        """Each chain's segments through its kernel, if it has one, else stage by stage."""
        together: dict[int, list[int]] = defaultdict(list)
        for i, (planned, x) in enumerate(batch):
            fusion = self._chains.fusion(planned.chain, planned.at)
            if fusion is not None and fusion.takes(x, planned.at):
                together[planned.chain].append(i)
        made: dict[int, Draft] = {}
        for members in together.values():
            made.update(zip(members, self._fused([batch[i] for i in members]), strict=True))
        return [made[i] if i in made else self._quantize(*each) for i, each in enumerate(batch)]

    def _fused(self, batch: Sequence[tuple[Planned, Tensor]]) -> list[Draft]:
        planned = batch[0][0]
        fusion = self._chains.fusion(planned.chain, planned.at)
        try:
            results = fusion.encode([(p.at, x) for p, x in batch]) if fusion else []
        except Exception as error:  # Triton's own are no RuntimeError: a kernel that does not fit this GPU, say
            self._chains.without_fusion(planned.chain, error)
            return [self._quantize(*each) for each in batch]
        return [
            Draft(p, x, f.stages, f.quantized.parts, f.encoded or (), f.ok, True)
            for (p, x), f in zip(batch, results, strict=True)
        ]

    def by_stages(self, planned: Planned, x: Tensor) -> Segment:
        """One segment without kernels that take stages together."""
        (segment,) = self._launch([self._quantize(planned, x)]).finish()
        return segment

    def _quantize(self, planned: Planned, x: Tensor) -> Draft:
        bound = self._chains.bound(planned.chain, planned.at)
        finite = None if bound.exact else _finite(x)
        if finite is not None and x.device.type == "cpu" and not finite:
            return self._quantize(replace(planned, chain=RAW_CHAIN_ID), x)
        try:
            stages, quantized = bound.quantize(x, planned.at)
        except EscapeSegment:  # finite input may overflow inside a stage, or be unlike what it was calibrated on
            return self._quantize(replace(planned, chain=RAW_CHAIN_ID), x)
        except Exception as error:  # a third party's stage may raise anything; the segment must still arrive
            if planned.chain == RAW_CHAIN_ID:
                raise
            log.warning("sending %s raw, a stage failed: %s: %s", planned.at, type(error).__name__, error)
            return self._quantize(replace(planned, chain=RAW_CHAIN_ID), x)
        return Draft(planned, x, stages, quantized.parts, [], _both(finite, bound.ok))

    def packed(self, settled: Settled, data: Sequence[Tensor]) -> Segment:
        """``data``: of ``settled``, on the host. Raw if that is smaller."""
        draft, planned = settled.draft, settled.draft.planned
        host = iter(data)
        stages = [{name: next(host) for name in params} for params in draft.stages]
        streams = list(host)
        parts = [
            replace(p, codes=s) if not c else p for p, s, c in zip(draft.parts, streams, settled.coded, strict=True)
        ]
        blobs = [as_bytes(s) if c else None for s, c in zip(streams, settled.coded, strict=True)]
        meta, body = pack(stages, parts, blobs)
        if _pays(draft, meta, len(body)):
            return Segment(planned.index, planned.at, planned.chain, meta, body)
        return self.raw(planned, draft.x)

    def placed(self, settled: Sequence[Settled]) -> list[Segment]:
        """As :meth:`packed`, with bodies on the device: slices of one buffer."""
        chosen = [self._smaller(s) for s in settled]
        bodies = bodies_on_device([s.data for _, s in chosen], self.device)
        places = [s.draft.planned for _, s in chosen]
        return [
            Segment(p.index, p.at, p.chain, meta, body)
            for p, (meta, _), body in zip(places, chosen, bodies, strict=True)
        ]

    def _smaller(self, s: Settled) -> tuple[bytes, Settled]:
        """A settled segment with its metadata, or the same raw where that is no larger."""
        draft = s.draft
        meta = pack_meta(draft.stages, draft.parts, [x.nbytes for x in s.streams], s.coded)
        if _pays(draft, meta, body_bytes(s.data)):
            return meta, s
        plain = self._quantize(replace(draft.planned, chain=RAW_CHAIN_ID), draft.x)
        data = [v for params in plain.stages for v in params.values()] + [p.codes for p in plain.parts]
        return self._smaller(Settled(plain, [False] * len(plain.parts), data))

    def raw(self, planned: Planned, x: Tensor) -> Segment:
        """The segment as it is in the cache."""
        stages, quantized = self._chains.bound(RAW_CHAIN_ID, planned.at).quantize(x, planned.at)
        meta, body = pack(stages, quantized.parts, [None] * len(quantized.parts))
        return Segment(planned.index, planned.at, RAW_CHAIN_ID, meta, body)


def _extent(lane: Lane, total: int, start: int) -> Region:
    state = lane.group.unit == "state"
    start = max(start, total - lane.group.window) if lane.group.window else start
    stop = 1 if state else total
    return Region(lane.group.id, lane.plane.name, lane.layers, lane.heads, 0 if state else start, stop)


def _pays(draft: Draft, meta: bytes, nbytes: int) -> bool:
    """Whether a segment with a body of so many bytes goes as it is: it is smaller than raw, or is raw."""
    smaller = len(meta) + nbytes < draft.x.nbytes and len(meta) <= MAX_META
    return smaller or draft.planned.chain == RAW_CHAIN_ID


def _finite(x: Tensor) -> Tensor:
    """False when x holds NaN or Inf (or, at no harm, when its sum overflows). bf16 sums are accumulated in f32."""
    return torch.isfinite(x.sum() if x.dtype is torch.bfloat16 else x.sum(dtype=torch.float32))


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a & b


def _key(spec: PipelineSpec, plane: Plane) -> Plane:
    return plane if plane in spec.planes else "*" if spec.chain_for(plane) == spec.planes.get("*") else plane
