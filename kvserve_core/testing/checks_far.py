"""Demands on what a frame decodes to, near the first token and layer and far from them."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.pipeline import Pipeline
from kvserve_core.spec import KVSpec, whole
from kvserve_core.testing.cases import Case
from kvserve_core.testing.chains import Frame, frame, model_for, pipeline_spec, restored
from kvserve_core.testing.check import STAGES, check
from kvserve_core.testing.checks_values import within_bound
from kvserve_core.testing.data import same_bits
from kvserve_core.testing.subject import Subject, require

CELL = 1024
START, TOKENS = 64 * CELL, 65 * CELL + 100
LAYERS = (0, 31, 79)
DIM = 32


def registered(subject: Subject) -> bool:
    """Whether a pipeline can name it."""
    return subject.registry is not None


def faithful(subject: Subject, pipeline: Pipeline, made: Frame) -> None:
    """Each segment arrives bit for bit if raw or lossless, else nearer to what it was than zeros are, and within the
    bound that a quantizer promises.

    Raises:
        CheckFailed: one does not, or all were sent raw.
    """
    segments = made.segments(pipeline)
    require(pipeline.lossless or any(s.chain for s in segments), "every segment was sent raw; it never pays or refuses")
    for segment, back in zip(segments, restored(subject, made, segments), strict=True):
        x = made.inputs[segment.at]
        if pipeline.lossless or not segment.chain:
            require(same_bits(back, x), f"{segment.at}: a lossless chain lost something")
            continue
        require(back.isfinite().all(), f"{segment.at} decoded to NaN or Inf")
        error, energy = (float(v.square().sum()) for v in (back.double() - x.double(), x.double()))
        require(error < energy, f"{segment.at} decoded no nearer to what it was than zeros are")
        if subject.kind == "quantizer":  # alone in its chain, so that its own promise holds for the whole
            within_bound(subject, Case("normal", made.kv, segment.at, x), back, torch.finfo(back.dtype).eps)


def far_pipeline(subject: Subject) -> Pipeline:
    """Long segments of the small model with layers as far down as those of large models, where that is not refused:
    calibrated files and tables a layer are for the layers of one model."""
    near = model_for(subject, DIM)
    far = replace(near, groups=(replace(near.groups[0], layers=LAYERS),))
    if subject.model is not None:
        return _long(subject, near)
    try:
        return _long(subject, far)
    except UnsupportedSpecError:
        return _long(subject, near)


def _long(subject: Subject, kv: KVSpec) -> Pipeline:
    spec = pipeline_spec(subject).model_copy(update={"segment_tokens": CELL})
    return Pipeline.build(spec, kv, whole(kv), subject.device, subject.registry, subject.artefacts)


@check(*STAGES, when=registered)
def far_from_the_start(subject: Subject) -> None:
    """Late tokens, deep layers and long segments decode to nearly what they were, as the first do."""
    pipeline = far_pipeline(subject)
    faithful(subject, pipeline, frame(subject, pipeline, TOKENS, START))
