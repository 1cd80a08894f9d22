"""A component in a whole pipeline: the chain it is tried in, and frames of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvserve_core.decoder import Decoder
from kvserve_core.pipeline import Pipeline
from kvserve_core.plan import Planned
from kvserve_core.profile import Chain, PipelineSpec
from kvserve_core.spec import DType, KVSpec, Region, Shard, whole
from kvserve_core.tensor import TORCH
from kvserve_core.testing.cases import case, dtypes, made, plane
from kvserve_core.testing.data import model, sparse
from kvserve_core.testing.subject import Subject, require
from kvserve_core.wire import FrameHeader, Segment

TOKENS = 600
LEVELS = 16


def chain(subject: Subject) -> Chain:
    """The component with plain partners; ``zstd`` behind it where codes as they stand would not pay."""
    wide = subject.caps.exact or (subject.kind == "quantizer" and subject.caps.max_alphabet > 256)
    spec: dict[str, Any] = {"codec": "zstd" if wide else "raw"}
    if subject.kind == "codec":
        levels = max(2, min(LEVELS, subject.caps.max_alphabet))
        quantizer = {"name": "uniform", "configuration": {"levels": levels}}
        spec |= {"quantizer": quantizer, "codec": subject.spec}
    elif subject.kind == "quantizer":
        spec["quantizer"] = subject.spec
    else:
        exact = subject.caps.exact
        spec["transforms"] = [subject.spec]
        spec["quantizer"] = "bitplane" if exact else {"name": "uniform", "configuration": {"levels": LEVELS}}
    return Chain.model_validate(spec)


def model_for(subject: Subject, dim: int = 64) -> KVSpec:
    """The given model, else the small one with the plane that this component works on."""
    if subject.kind == "codec":
        return subject.model or model(DType.BF16, dim, "k")
    return subject.model or model(dtypes(subject)[0], dim, plane(subject.caps))


def plane_for(subject: Subject) -> str:
    """The plane of :func:`model_for` that the chain is for."""
    if subject.model is not None and subject.kind != "codec":
        return case(subject).at.plane
    if subject.kind == "codec":
        return subject.model.groups[0].planes[0].name if subject.model else "k"
    return plane(subject.caps)


def pipeline_spec(subject: Subject, head_groups: int | None = None) -> PipelineSpec:
    """Blocks of all layers, so that a segment holds several."""
    layers = len(model_for(subject).groups[0].layers)
    return PipelineSpec(planes={plane_for(subject): chain(subject)}, layer_block=layers, head_groups=head_groups)


@dataclass(frozen=True)
class Frame:
    """A request through a pipeline: its header, its segments, and the tensors that went in."""

    kv: KVSpec
    header: FrameHeader
    plan: list[Planned]
    inputs: dict[Region, Tensor]

    def segments(self, pipeline: Pipeline) -> list[Segment]:
        """All segments in one batch."""
        return pipeline.encode([(p, self.inputs[p.at]) for p in self.plan])


def build(subject: Subject, shard: Shard | None = None, head_groups: int | None = None) -> Pipeline:
    """A pipeline of :func:`chain`."""
    kv = model_for(subject)
    return Pipeline.build(
        pipeline_spec(subject, head_groups), kv, shard or whole(kv), subject.device, subject.registry, subject.artefacts
    )


def frame(subject: Subject, pipeline: Pipeline, tokens: int = TOKENS, start: int = 0) -> Frame:
    """A request of ``tokens`` tokens, those from ``start`` on, with random values: the same for each region whatever
    the shard."""
    header, planned = pipeline.header("check", tokens, "check", start)
    return Frame(pipeline.kv, header, planned, {p.at: content(subject, pipeline.kv, p.at) for p in planned})


def content(subject: Subject, kv: KVSpec, at: Region) -> Tensor:
    """The values of a region: a function of the region alone."""
    count = kv.group(at.group).plane(at.plane).num_heads
    full = made(subject, "normal", kv, replace(at, heads=tuple(range(count))))
    mine = full[:, list(at.heads)].contiguous().to(subject.device)
    return sparse(mine) if subject.kind == "codec" else mine


def decoder(subject: Subject, made: Frame) -> Decoder:
    """The consumer's side of a frame."""
    return Decoder(made.header, made.kv, subject.device, subject.registry, subject.artefacts)


def same_segment(a: Segment, b: Segment) -> bool:
    """Equal place, chain and bytes."""
    return (a.at, a.chain, bytes(a.meta), bytes(a.body)) == (b.at, b.chain, bytes(b.meta), bytes(b.body))


def restored(subject: Subject, frame_: Frame, segments: list[Segment]) -> list[Tensor]:
    """The tensors that ``segments`` decode to, of the right shapes and dtypes.

    Raises:
        CheckFailed: one is not.
    """
    found = decoder(subject, frame_).decode(segments)
    for at, x in found:
        due = frame_.kv.group(at.group).plane(at.plane).dtype
        require(x.dtype == TORCH[due] and x.shape[2] == at.num_tokens, f"{at} decoded to {x.dtype} {list(x.shape)}")
        require(torch.is_tensor(x), f"{at} did not decode to a tensor")
    return [x for _, x in found]
