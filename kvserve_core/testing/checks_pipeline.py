"""Demands on a stage in a whole pipeline: what is refused, what is sent raw, and what the bytes may depend on."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvserve_core.errors import FrameError, UnsupportedSpecError
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import PipelineSpec
from kvserve_core.spec import DType, Shard, whole
from kvserve_core.testing.cases import plane
from kvserve_core.testing.chains import TOKENS, build, chain, decoder, frame, model_for, restored, same_segment
from kvserve_core.testing.check import STAGES, VALUES, check
from kvserve_core.testing.checks_far import faithful, registered
from kvserve_core.testing.data import generator, model, same_bits
from kvserve_core.testing.subject import Subject, require
from kvserve_core.wire import Segment

CHUNKS = (64, 100, 256, TOKENS)
FLIPS = 40
STRANGE = "no_such_plane"


def any_model(subject: Subject) -> bool:
    """Whether it is not tied to one model."""
    return subject.model is None


def lossy(subject: Subject) -> bool:
    """Whether a pipeline can name it, and it loses something."""
    return registered(subject) and not subject.caps.exact


def splits(subject: Subject) -> bool:
    """Whether ranks can share it; files that were calibrated over all heads together are of use on one rank only."""
    return registered(subject) and (subject.caps.head_local or not subject.caps.artefacts)


def refuses(subject: Subject, name: str, dtype: DType) -> bool:
    """Whether a pipeline over such a plane is refused while it is built."""
    kv = model(dtype, 64, name)
    spec = PipelineSpec(planes={name: chain(subject)}, head_groups=1)
    try:
        Pipeline.build(spec, kv, whole(kv), subject.device, subject.registry, subject.artefacts)
    except UnsupportedSpecError:
        return True
    return False


@check(*VALUES, when=lambda s: registered(s) and any_model(s) and not s.caps.artefacts)
def refusals(subject: Subject) -> None:
    """Planes and dtypes outside its capabilities are refused with UnsupportedSpecError when a pipeline is built."""
    caps = subject.caps
    if "*" not in caps.planes:
        require(refuses(subject, STRANGE, sorted(caps.dtypes)[0]), f"plane {STRANGE!r} is not refused")
    for dtype in sorted(set(DType) - caps.dtypes):
        require(refuses(subject, plane(caps), dtype), f"dtype {dtype.value!r} is not refused")


@check(*STAGES, when=registered)
def decodes_in_a_frame(subject: Subject) -> None:
    """A request of several cells, with raw sink tokens and a partial last cell, decodes to nearly what it was."""
    pipeline = build(subject)
    faithful(subject, pipeline, frame(subject, pipeline))


@check(*STAGES, when=lossy)
def not_a_number_is_sent_raw(subject: Subject) -> None:
    """Segments that hold NaN or Inf arrive bit for bit, and the others as always."""
    pipeline = build(subject)
    made = frame(subject, pipeline)
    clean = made.segments(pipeline)
    spoilt = [p.index for p in made.plan if p.chain][:: max(1, len(made.plan) // 5)]
    for i, bad in zip(spoilt, (float("nan"), float("inf"), -float("inf")) * len(spoilt), strict=False):
        x = made.inputs[made.plan[i].at].clone()
        x[-1, -1, x.shape[2] // 2, 0] = bad
        made.inputs[made.plan[i].at] = x
    segments = made.segments(pipeline)
    for i, (segment, x) in enumerate(zip(segments, restored(subject, made, segments), strict=True)):
        if i in spoilt:
            require(same_bits(x, made.inputs[segment.at]), f"{segment.at} held NaN or Inf and was not sent raw")
        else:
            require(same_segment(segment, clean[i]), f"{segment.at} changed because another segment held NaN or Inf")


@check(*STAGES, when=registered)
def prefill_chunks(subject: Subject) -> None:
    """The bytes do not depend on prefill chunking, on batches, or on what was encoded before."""
    pipeline = build(subject)
    made = frame(subject, pipeline)
    whole_request = made.segments(pipeline)
    for size in CHUNKS:
        other, got = build(subject), []
        for start in range(0, TOKENS, size):
            ready = range(start, min(start + size, TOKENS))
            got += other.encode([(p, made.inputs[p.at]) for p in other.regions(ready, TOKENS)])
        require(all(map(same_segment, whole_request, got)), f"prefill in chunks of {size} tokens gave other bytes")
    alone = [pipeline.encode([(p, made.inputs[p.at])])[0] for p in reversed(made.plan)]
    require(all(map(same_segment, reversed(whole_request), alone)), "one segment a call, last first: other bytes")


@check(*STAGES, when=splits)
def tensor_parallel_ranks(subject: Subject) -> None:
    """1, 2 and 4 ranks give the same segments, at the granularity of head groups."""
    kv = model_for(subject)
    heads = kv.groups[0].planes[0].num_heads
    layers = whole(kv).layers
    bytes_of: dict[object, Segment] = {}
    for size in (n for n in (1, 2, 4) if heads % n == 0):
        for rank in range(size):
            pipeline = build(subject, Shard(layers, rank, size), head_groups=heads)
            made = frame(subject, pipeline, 300)
            for segment in made.segments(pipeline):
                first = bytes_of.setdefault(segment.at, segment)
                require(same_segment(first, segment), f"{segment.at}: rank {rank} of {size} gave other bytes")


@check(*STAGES, when=registered)
def corrupt_segments(subject: Subject) -> None:
    """Segments with flipped bits, which a digest would catch, give a FrameError or a tensor of the right shape."""
    pipeline = build(subject)
    made = frame(subject, pipeline, 256)
    good = [s for s in made.segments(pipeline) if s.chain and len(s.body)]
    draw, receiver = generator(7), decoder(subject, made)
    for i in range(FLIPS if good else 0):
        segment = good[i % len(good)]
        body, meta = bytearray(segment.body), bytearray(segment.meta)
        target = meta if i % 4 == 3 else body
        for _ in range(1 + i % 3):
            at = int(torch.randint(0, len(target), (), generator=draw))
            target[at] ^= 1 << int(torch.randint(0, 8, (), generator=draw))
        try:
            ((_, x),) = receiver.decode([replace(segment, meta=bytes(meta), body=body)])
        except FrameError:
            continue
        require(x.shape == made.inputs[segment.at].shape, f"corrupt bytes decoded to {list(x.shape)}")
