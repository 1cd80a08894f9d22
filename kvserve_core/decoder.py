"""The decoding side: what a frame says, within what this side has installed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.chains import ChainSet, chains_of_frame
from kvserve_core.errors import FrameError, UnsupportedSpecError
from kvserve_core.payload import Unpacked
from kvserve_core.registry import Registry, default_registry
from kvserve_core.spec import KVSpec, Region
from kvserve_core.stages import Fusion
from kvserve_core.tensor import TORCH, Encoded, Part, Quantized
from kvserve_core.wire import Buffer, FrameHeader, Segment

CPU = torch.device("cpu")


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
        versions = tuple(info.stages for info in header.chains)
        self._chains = ChainSet(chains, kv, device, registry or default_registry(), artefacts, versions)
        self._kv, self._device, self._count = kv, device, len(chains) + 1

    def decode(self, batch: Sequence[Segment]) -> list[tuple[Region, Tensor]]:
        """Tensors ``[L, H, T, D]`` in the plane's dtype.

        Raises:
            FrameError: a segment is not what its region and chain call for; the destination is untouched.
        """
        batch = _uploaded(batch, self._device) if self._device.type == "cuda" else batch
        unpacked = [self._unpack(segment) for segment in batch]
        together = self._fusable(batch, unpacked)
        codes: dict[tuple[int, int], Tensor] = {}
        by_chain: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for i, u in enumerate(unpacked):
            for j, part in enumerate(u.parts):
                if i in together and together[i].with_codec:
                    continue
                if part.coded:
                    by_chain[batch[i].chain].append((i, j))
                else:
                    codes[i, j] = u.blobs[j].view(_width(part.width)).to(self._device)
        checks: list[tuple[Tensor, list[Region]]] = []
        for chain, keys in by_chain.items():
            self._decode_parts(chain, keys, unpacked, codes, checks)
        done = self._fused(batch, unpacked, together, codes)
        for i, (s, u) in enumerate(zip(batch, unpacked, strict=True)):
            if i not in done:
                done[i] = self._restore(s, u, codes, i)
        _require_ok(checks)
        return [(s.at, done[i]) for i, s in enumerate(batch)]

    def _fusable(self, batch: Sequence[Segment], unpacked: list[Unpacked]) -> dict[int, Fusion]:
        """Segments that a kernel for their whole chain can decode."""
        found = {}
        for i, (segment, u) in enumerate(zip(batch, unpacked, strict=True)):
            fusion = self._chains.fusion(segment.chain, u.at)
            if fusion is not None and fusion.reads(u.stages, u.parts, u.at):
                found[i] = fusion
        return found

    def _fused(
        self,
        batch: Sequence[Segment],
        unpacked: list[Unpacked],
        together: dict[int, Fusion],
        codes: dict[tuple[int, int], Tensor],
    ) -> dict[int, Tensor]:
        """The segments that kernels decoded, without those that must go stage by stage after all."""
        by_chain: dict[int, list[int]] = defaultdict(list)
        for i in together:
            by_chain[batch[i].chain].append(i)
        done: dict[int, Tensor] = {}
        for members in by_chain.values():
            fusion = together[members[0]]
            given = []
            for i in members:
                u = unpacked[i]
                data = u.blobs if fusion.with_codec else [codes[i, j] for j in range(len(u.parts))]
                given.append((u.at, u.stages, data))
            try:
                tensors, ok = fusion.decode(given)
                done.update((i, x) for i, x, good in zip(members, tensors, ok.tolist(), strict=True) if good)
            except Exception as error:  # noqa: BLE001  # as in the pipeline: the stages can do what a kernel cannot
                self._chains.without_fusion(batch[members[0]].chain, error)
            if fusion.with_codec and (left := [i for i in members if i not in done]):
                plain = self._plain([batch[i] for i in left], [unpacked[i] for i in left])
                done.update(zip(left, plain, strict=True))
        return done

    def _plain(self, batch: Sequence[Segment], unpacked: list[Unpacked]) -> list[Tensor]:
        """Segments stage by stage, codec included."""
        codes: dict[tuple[int, int], Tensor] = {}
        checks: list[tuple[Tensor, list[Region]]] = []
        for i, u in enumerate(unpacked):
            self._decode_parts(batch[i].chain, [(i, j) for j in range(len(u.parts))], unpacked, codes, checks)
        _require_ok(checks)
        return [self._restore(s, u, codes, i) for i, (s, u) in enumerate(zip(batch, unpacked, strict=True))]

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
        self,
        chain: int,
        keys: list[tuple[int, int]],
        unpacked: list[Unpacked],
        codes: dict[tuple[int, int], Tensor],
        checks: list[tuple[Tensor, list[Region]]],
    ) -> None:
        blobs, like = [], []
        for i, j in keys:
            part, data = unpacked[i].parts[j], unpacked[i].blobs[j].to(self._device)
            blobs.append(Encoded(data, torch.tensor(part.nbytes)))
            empty = torch.empty(part.length, dtype=_width(part.width), device="meta")
            like.append(Part(empty, part.alphabet, part.rows, part.table))
            self._chains.bound(chain, unpacked[i].at)
        codec = self._chains.codec(chain)
        try:
            codes.update(zip(keys, codec.decode(blobs, like), strict=True))
        except Exception as error:  # also a codec library's own error for bytes that it cannot read
            if len(keys) == 1:
                raise _located(error, unpacked[keys[0][0]].at) from error
            for key in keys:  # one by one, so that the error names the segment
                self._decode_parts(chain, [key], unpacked, codes, checks)
            return
        if codec.ok is not None:
            checks.append((codec.ok, [unpacked[i].at for i, _ in keys]))

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
        except Exception as error:  # inconsistent sizes from the sender surface as torch or key errors
            raise _located(error, at) from error
        if x.shape != shape or x.dtype != TORCH[plane.dtype]:
            raise FrameError(f"decoded to {tuple(x.shape)}, expected {shape}", at)
        return x


def _uploaded(batch: Sequence[Segment], device: torch.device) -> list[Segment]:
    """The segments with bodies on a GPU; pinned ones are not copied on the host before."""
    found, kept = [], []
    for segment in batch:
        body = segment.body
        if not isinstance(body, Tensor):
            host = _tensor(body)
            host = host if host.is_pinned() else host.pin_memory()
            kept.append(host)
            body = host.to(device, non_blocking=True)
        found.append(replace(segment, body=body))
    if kept:
        torch.cuda.current_stream(device).synchronize()  # before pinned memory is used again
    return found


def _tensor(body: Buffer) -> Tensor:
    if not len(body):
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.frombuffer(body, np.uint8)) if not memoryview(body).readonly else _copied(body)


def _copied(body: Buffer) -> Tensor:
    """torch takes no read-only memory."""
    host = torch.empty(len(body), dtype=torch.uint8, pin_memory=True)
    host.numpy()[:] = np.frombuffer(body, np.uint8)
    return host


def _located(error: Exception, at: Region) -> FrameError:
    """What a stage raised on bytes from a peer, as a FrameError that names the region; out of memory stays itself."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        raise error
    reason = error.reason if isinstance(error, FrameError) else f"{type(error).__name__}: {error}"
    return FrameError(f"the segment does not decode: {reason}", at)


def _require_ok(checks: list[tuple[Tensor, list[Region]]]) -> None:
    """Read the flags of device codecs, once everything is queued."""
    for ok, places in checks:
        for good, at in zip(ok.tolist(), places, strict=True):
            if not good:
                raise FrameError("the codec could not decode a stream", at)


def _width(nbytes: int) -> torch.dtype:
    return torch.uint8 if nbytes == 1 else torch.int16
