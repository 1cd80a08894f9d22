"""Profiles with ratio and speed measured on this device, through pipelines, seals and decoders as sessions use them.

Quality is no measurement: weights are made up, so each profile gets a record that says so and passes every floor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from gpu_cases import STAGED, split, uniform
from torch import Tensor

from kvserve_core.bodies import host_bytes, piece_hashes
from kvserve_core.decoder import Decoder
from kvserve_core.library import RAW_PROFILE, Profile, ProfileLibrary, QualityRecord
from kvserve_core.pipeline import Pipeline
from kvserve_core.plan import Planned
from kvserve_core.session.sealing import Hasher, seal_all
from kvserve_core.spec import KVSpec, Region, whole
from kvserve_core.speed import fit
from kvserve_core.wire import Codebook

LARGE: dict[str, Any] = {"segment_tokens": 2048, "head_groups": 1, "layer_block": 14, "sink_tokens": 0}
ANS = {"name": "nvcomp_ans", "configuration": {"chunk_bytes": 2**17, "batch_bytes": 2**27}}
DUMMY = QualityRecord(value=1.0, lower=1.0, upper=1.0, metric="none: made-up weights", samples=1)


class Cost(NamedTuple):
    """One request: bytes on the wire over original bytes, and seconds."""

    raw_bytes: int
    wire_bytes: int
    encode_s: float
    decode_s: float


def chains(device: str) -> dict[str, dict[str, Any]]:
    """What the profiles are made of."""
    codec: Any = ANS if device == "cuda" else "zstd"
    levels = {name: uniform(n) for name, n in (("high", 8), ("low", 4))}
    mixed = {"name": "mixhq", "configuration": {"scores": [[3.0, 2.0, 1.0, 0.0]], **levels}}
    return {
        "hadamard-16": {"transforms": ["hadamard"], "quantizer": uniform(16), "codec": codec},
        "hadamard-mixhq": {"transforms": ["hadamard"], "quantizer": mixed, "codec": codec},
    }


def library(kv: KVSpec, device: torch.device, on_device: bool, lengths: Sequence[int]) -> ProfileLibrary:
    """All profiles, raw too. on_device: bodies stay there, as a device transport has them."""
    layers = len(kv.group(0).layers)
    profiles = [_measured("raw", {}, kv, device, on_device, lengths)]
    for name, chain in chains(device.type).items():
        if "mixhq" in name:
            chain["quantizer"]["configuration"]["scores"] *= layers
        cut = LARGE | {"layer_block": min(LARGE["layer_block"], layers)} if device.type == "cuda" else {}
        profiles.append(_measured(name, {"planes": {"*": chain}, **cut}, kv, device, on_device, lengths))
    return ProfileLibrary(
        model_id=kv.model_id,
        fingerprint=kv.fingerprint,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        created="in this run",
        provenance={"quality": "none: made-up weights", "bodies": "device" if on_device else "host"},
        profiles=tuple(profiles),
    )


def _measured(
    name: str, spec: dict[str, Any], kv: KVSpec, device: torch.device, on_device: bool, lengths: Sequence[int]
) -> Profile:
    pipeline = Pipeline.build(spec or RAW_PROFILE.on(device.type).pipeline, kv, whole(kv), device)
    costs = [costs_of(pipeline, tokens, on_device) for tokens in lengths]
    sizes = [c.raw_bytes for c in costs]
    encode, decode = (fit(sizes, [getattr(c, way) for c in costs]) for way in ("encode_s", "decode_s"))
    cr = sum(sizes) / sum(c.wire_bytes for c in costs)
    fields: dict[str, Any] = {"name": name, "cr": cr, "encode": encode, "decode": decode}
    if spec:
        fields |= {"pipeline": pipeline.spec, "quality": {"default": DUMMY}}
    return Profile(**fields)


def costs_of(pipeline: Pipeline, tokens: int, on_device: bool, repeats: int = 5) -> Cost:
    """Medians after two warm-ups; seconds are the host's, from an idle device to an idle device."""
    header, planned = pipeline.header("speed", tokens, "measured")
    decoder, book = Decoder(header, pipeline.kv, pipeline.device), Codebook(header)
    hashes = _hashes(pipeline.device)
    batches = split([(p, _values(pipeline, p.at)) for p in planned], STAGED)
    encode, decode, wire = [], [], 0
    for _ in range(repeats + 2):
        began = time.perf_counter()
        sealed = [s for batch in batches for s in seal_all(book, pipeline.encode(batch, on_device), hashes)]
        _wait(pipeline.device)
        encoded = time.perf_counter()
        for some in _groups(sealed, pipeline, planned):
            bodies = [s.body for s in some]
            found = hashes([b for b in bodies if isinstance(b, Tensor)]) if on_device else [None] * len(bodies)
            decoder.decode([book.unseal(type(s)(s.index, s.head, s.body, h)) for s, h in zip(some, found, strict=True)])
        _wait(pipeline.device)
        encode.append(encoded - began)
        decode.append(time.perf_counter() - encoded)
        wire = sum(s.nbytes for s in sealed)
    return Cost(header.raw_bytes, wire, statistics.median(encode[2:]), statistics.median(decode[2:]))


def _groups(sealed: Sequence[Any], pipeline: Pipeline, planned: Sequence[Planned]) -> Iterable[list[Any]]:
    count = max(1, STAGED // pipeline.kv.nbytes(planned[0].at))
    return [list(sealed[i : i + count]) for i in range(0, len(sealed), count)]


def _values(pipeline: Pipeline, at: Region) -> Tensor:
    plane = pipeline.kv.group(at.group).plane(at.plane)
    shape = (len(at.layers), len(at.heads), at.num_tokens, plane.dim)
    dtype = torch.bfloat16 if plane.dtype.itemsize == 2 else torch.float32
    return torch.randn(shape, device=pipeline.device).to(dtype)


def _hashes(device: torch.device) -> Hasher:
    if device.type == "cuda":
        from kvserve_plugins.kernels.digest import piece_hashes as on_gpu

        return on_gpu
    return lambda bodies: [piece_hashes(host_bytes(b)) for b in bodies]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
