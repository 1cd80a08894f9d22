"""Build, cut, encode, decode: the data path of every engine and transport.

``encode`` is a loop over transforms, one quantizer call and one batched codec call; it never synchronises. What can
not be represented (NaN, Inf) or does not pay is sent raw, segment by segment, and the frame says so.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.chains import ChainSet, chains_of_frame
from kvserve_core.errors import FrameError, KVServeError, UnsupportedSpecError
from kvserve_core.payload import Unpacked, as_bytes, pack
from kvserve_core.plan import RAW_CHAIN_ID, ChainTraits, Planned, lanes, plan, planes_of
from kvserve_core.profile import LOSSLESS_PLANES, PipelineSpec
from kvserve_core.registry import Registry, default_registry
from kvserve_core.spec import KVSpec, Plane, Region, Shard
from kvserve_core.tensor import TORCH, Encoded, Params, Part, Quantized
from kvserve_core.wire import Buffer, FrameHeader, Segment, tables

CPU = torch.device("cpu")


@dataclass
class _Draft:
    """A segment after T, Q and the launch of C."""

    planned: Planned
    x: Tensor
    stages: list[Params]
    parts: tuple[Part, ...]
    encoded: list[Encoded]
    finite: Tensor | None


class Launched:
    """Segments whose kernels are queued. ``finish`` reads sizes, so call it after the fence."""

    def __init__(self, pipeline: Pipeline, drafts: list[_Draft]) -> None:
        self._pipeline, self._drafts = pipeline, drafts

    def finish(self) -> list[Segment]:
        """The segments, each no larger than raw plus its fixed overhead."""
        return [self._pipeline.finish(draft) for draft in self._drafts]


class Pipeline:
    """A :class:`PipelineSpec` bound to a model, a shard and a device: the encoding side."""

    def __init__(self, spec: PipelineSpec, kv: KVSpec, shard: Shard, chains: ChainSet, ids: dict[Plane, int]) -> None:
        self.spec, self.kv, self.shard = spec, kv, shard
        self._chains, self._ids = chains, ids
        self._lanes = lanes(spec, kv, shard, self._traits)
        for lane in self._lanes:
            chains.bound(lane.chain.id, Region(lane.group.id, lane.plane.name, lane.layers, lane.heads, 0, 1))
            chains.bound(RAW_CHAIN_ID, Region(lane.group.id, lane.plane.name, lane.layers, lane.heads, 0, 1))

    @classmethod
    def build(
        cls,
        spec: PipelineSpec,
        kv: KVSpec,
        shard: Shard,
        device: torch.device = CPU,
        registry: Registry | None = None,
        artefacts: Artefacts = NONE,
        path: str = "",
    ) -> Pipeline:
        """Check, create and bind everything. ``path`` prefixes errors: ``profiles.balanced``.

        Raises:
            ConfigError: a bad name or field; the message starts with its path.
            UnsupportedSpecError: a stage or the cut does not fit this model or shard.
        """
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
        return cls(
            spec, kv, shard, ChainSet(paths, kv, device, registry or default_registry(), artefacts, "encode"), ids
        )

    def _traits(self, plane: Plane) -> ChainTraits:
        return self._chains.traits(self._ids[plane])

    @property
    def chains(self) -> tuple[tuple[str, ...], ...]:
        """``("transform:hadamard@1", "quantizer:uniform@1", "codec:zstd@1")`` per chain, for negotiation."""
        return tuple(info.stages for info in self._chains.infos)

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

    def header(self, transfer_id: str, total: int, profile: str) -> tuple[FrameHeader, list[Planned]]:
        """The frame header of one request, and its whole plan."""
        planned = list(self.regions(range(total), total))
        planes, layer_blocks, head_groups = tables(p.at for p in planned)
        header = FrameHeader(
            transfer_id=transfer_id,
            fingerprint=self.kv.fingerprint,
            profile=profile,
            num_tokens=total,
            num_segments=len(planned),
            raw_bytes=sum(self.kv.nbytes(p.at) for p in planned),
            nonce=secrets.randbits(64),
            shard=self.shard,
            chains=self._chains.infos,
            planes=planes,
            layer_blocks=layer_blocks,
            head_groups=head_groups,
            artefacts=tuple(sorted(self._chains.used_artefacts)),
        )
        return header, planned

    def encode(self, batch: Sequence[tuple[Planned, Tensor]]) -> list[Segment]:
        """Compress tensors ``[L, H, T, D]`` of the plane's dtype. :meth:`launch` and ``finish`` in one."""
        return self.launch(batch).finish()

    def launch(self, batch: Sequence[tuple[Planned, Tensor]]) -> Launched:
        """Queue T, Q and C for a batch on the current stream, without a synchronisation on a GPU."""
        drafts = [self._quantize(planned, x) for planned, x in batch]
        by_chain: dict[int, list[_Draft]] = defaultdict(list)
        for draft in drafts:
            by_chain[draft.planned.chain].append(draft)
        for chain, members in by_chain.items():
            encoded = iter(self._chains.codec(chain).encode([part for d in members for part in d.parts]))
            for draft in members:
                draft.encoded = [next(encoded) for _ in draft.parts]
        return Launched(self, drafts)

    def _quantize(self, planned: Planned, x: Tensor) -> _Draft:
        bound = self._chains.bound(planned.chain, planned.at)
        finite = None if bound.exact else torch.isfinite(x.sum(dtype=torch.float32))
        if finite is not None and x.device.type == "cpu" and not finite:
            return self._quantize(replace(planned, chain=RAW_CHAIN_ID), x)
        stages, quantized = bound.quantize(x, planned.at)
        return _Draft(planned, x, stages, quantized.parts, [], finite)

    def finish(self, draft: _Draft) -> Segment:
        """Sizes are final: pack, or send raw what is not finite or does not pay."""
        planned, raw_bytes = draft.planned, draft.x.numel() * draft.x.element_size()
        if planned.chain != RAW_CHAIN_ID:
            if draft.finite is not None and not draft.finite:
                return self._raw(planned, draft.x)
            blobs = [_blob(part, e) for part, e in zip(draft.parts, draft.encoded, strict=True)]
            meta, body = pack(draft.stages, draft.parts, blobs)
            if len(meta) + len(body) < raw_bytes:
                return Segment(planned.index, planned.at, planned.chain, meta, body)
        return self._raw(planned, draft.x)

    def _raw(self, planned: Planned, x: Tensor) -> Segment:
        stages, quantized = self._chains.bound(RAW_CHAIN_ID, planned.at).quantize(x, planned.at)
        meta, body = pack(stages, quantized.parts, [None] * len(quantized.parts))
        return Segment(planned.index, planned.at, RAW_CHAIN_ID, meta, body)


def _key(spec: PipelineSpec, plane: Plane) -> Plane:
    return plane if plane in spec.planes else "*" if spec.chain_for(plane) == spec.planes.get("*") else plane


def _blob(part: Part, encoded: Encoded) -> Buffer | None:
    """The coded bytes, or None when storing the codes as they stand is no larger."""
    size = int(encoded.nbytes)
    return as_bytes(encoded.data[:size].cpu()) if size < part.nbytes else None


class Decoder:
    """The decoding side: it follows what the frame says, within what this side has installed."""

    def __init__(
        self,
        header: FrameHeader,
        kv: KVSpec,
        device: torch.device = CPU,
        registry: Registry | None = None,
        artefacts: Artefacts = NONE,
    ) -> None:
        if header.fingerprint != kv.fingerprint:
            raise FrameError(
                f"the frame holds the cache of model {header.fingerprint[:16]}, this engine serves"
                f" {kv.fingerprint[:16]}; both sides must load the same weights",
                "header",
            )
        chains = chains_of_frame(header.chains)
        self._chains = ChainSet(chains, kv, device, registry or default_registry(), artefacts, "decode")
        self._kv, self._device, self._count = kv, device, len(chains) + 1

    def decode(self, batch: Sequence[Segment]) -> list[tuple[Region, Tensor]]:
        """Tensors ``[L, H, T, D]`` in the plane's dtype.

        Raises:
            FrameError: a segment is not what its region and chain call for; the destination is untouched.
        """
        unpacked = [self._unpack(segment) for segment in batch]
        codes: dict[tuple[int, int], Tensor] = {}
        by_chain: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for i, u in enumerate(unpacked):
            for j, part in enumerate(u.parts):
                if part.coded:
                    by_chain[batch[i].chain].append((i, j))
                else:
                    codes[i, j] = u.blobs[j].view(_width(part.width)).to(self._device)
        for chain, keys in by_chain.items():
            self._decode_parts(chain, keys, unpacked, codes)
        return [(s.at, self._restore(s, u, codes, i)) for i, (s, u) in enumerate(zip(batch, unpacked, strict=True))]

    def _unpack(self, segment: Segment) -> Unpacked:
        at, where = segment.at, segment.at
        if segment.chain >= self._count:
            raise FrameError(f"chain {segment.chain} of {self._count}", where)
        try:
            group = self._kv.group(at.group)
            plane = group.plane(at.plane)
        except UnsupportedSpecError as error:
            raise FrameError(error.reason, where) from None
        if not set(at.layers) <= set(group.layers) or not set(at.heads) <= set(range(plane.num_heads)):
            raise FrameError("layers or heads that this model does not have", where)
        if len(set(at.layers)) < len(at.layers) or len(set(at.heads)) < len(at.heads):
            raise FrameError("a layer or head is named twice", where)
        return Unpacked(segment.meta, segment.body, self._kv.nbytes(at), at)

    def _decode_parts(
        self, chain: int, keys: list[tuple[int, int]], unpacked: list[Unpacked], codes: dict[tuple[int, int], Tensor]
    ) -> None:
        blobs, like = [], []
        for i, j in keys:
            part, data = unpacked[i].parts[j], unpacked[i].blobs[j].to(self._device)
            blobs.append(Encoded(data, torch.tensor(part.nbytes)))
            empty = torch.empty(part.length, dtype=_width(part.width), device="meta")
            like.append(Part(empty, part.alphabet, part.rows, part.table))
            self._chains.bound(chain, unpacked[i].at)
        try:
            codes.update(zip(keys, self._chains.codec(chain).decode(blobs, like), strict=True))
        except KVServeError:
            raise
        except Exception as error:  # a codec library's own error for bytes that it cannot read
            raise FrameError(f"the codec failed: {type(error).__name__}: {error}", unpacked[keys[0][0]].at) from error

    def _restore(self, segment: Segment, u: Unpacked, codes: dict[tuple[int, int], Tensor], i: int) -> Tensor:
        at = segment.at
        plane = self._kv.group(at.group).plane(at.plane)
        shape = (len(at.layers), len(at.heads), at.num_tokens, plane.dim)
        bound = self._chains.bound(segment.chain, at)
        if len(u.stages) != len(bound.transforms) + 1:
            raise FrameError(f"parameters for {len(u.stages)} stages, the chain has {len(bound.transforms) + 1}", at)
        parts = tuple(Part(codes[i, j], p.alphabet, p.rows, p.table) for j, p in enumerate(u.parts))
        stages = [{n: p.to(self._device) for n, p in stage.items()} for stage in u.stages]
        try:
            x = bound.restore(stages, Quantized(parts, stages[-1], bound.shape(shape)), at)
        except KVServeError:
            raise
        except Exception as error:  # inconsistent sizes from the sender surface as torch or key errors
            raise FrameError(f"the segment does not decode: {type(error).__name__}: {error}", at) from error
        if x.shape != shape or x.dtype != TORCH[plane.dtype]:
            raise FrameError(f"decoded to {tuple(x.shape)}, expected {shape}", at)
        return x


def _width(nbytes: int) -> torch.dtype:
    return torch.uint8 if nbytes == 1 else torch.int16
