"""What the two exact profiles cost on this device, for a deployment without a library: a second of made-up cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvserve_core.errors import KVServeError
from kvserve_core.library import EXACT, Profile, built_in
from kvserve_core.pipeline import Pipeline
from kvserve_core.session.events import gather_region
from kvserve_core.spec import KVSpec, Region, Shard
from kvserve_core.speed import measure_speed
from kvserve_core.tensor import TORCH

BYTES = 16 * 2**20
MAX_TOKENS = 2048
"""Original bytes and tokens of the longest measurement, whichever is less."""
REPEATS = 2


def measure_exact(kv: KVSpec, shard: Shard, device: torch.device, *, nbytes: int = BYTES) -> Iterator[Profile]:
    """``raw`` and ``lossless`` with the speeds of this device and the ratio of made-up values.

    Values are normal with a channel scale of their own, as a cache's are roughly: bit patterns of a bfloat16 plane
    then compress about as much. Transfers correct all three figures.
    """
    longest = min(MAX_TOKENS, max(2, nbytes // max(1, kv.token_bytes())))
    lengths = sorted({max(1, longest // 8), max(1, longest // 2), longest})
    for name, spec in EXACT.items():
        pipeline = Pipeline.build(spec, kv, shard, device)
        encode, decode = measure_speed(pipeline, lambda at: made_up(kv, at, device), lengths=lengths, repeats=REPEATS)
        yield built_in(name, _ratio(pipeline, longest, device), encode, decode)


def made_up(kv: KVSpec, at: Region, device: torch.device) -> Tensor:
    """``[L, H, T, D]`` of seeded values; bytes where the plane is opaque."""
    plane = kv.group(at.group).plane(at.plane)
    shape = (len(at.layers), len(at.heads), at.num_tokens, plane.dim)
    seeded = torch.Generator().manual_seed(at.start + 1)
    if not plane.dtype.is_float:
        return torch.randint(0, 256, shape, generator=seeded, dtype=torch.uint8).view(TORCH[plane.dtype]).to(device)
    scale = torch.rand((1, shape[1], 1, shape[3]), generator=seeded) * 2 + 0.1
    return (torch.randn(shape, generator=seeded) * scale).to(device, TORCH[plane.dtype])


def _ratio(pipeline: Pipeline, tokens: int, device: torch.device) -> float:
    header, planned = pipeline.header("self-test", tokens, "self-test")
    read = [(p, gather_region(lambda _, at: made_up(pipeline.kv, at, device), "", p.at)) for p in planned]
    sent = sum(len(s.meta) + len(s.body) for s in pipeline.encode(read))
    if not sent:
        raise KVServeError("the self-test encoded nothing; the model's cache has no layers on this rank")
    return max(1.0, header.raw_bytes / sent)
