"""The reference engine's view of a lossy profile: what the same texts lose there, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve_core.decoder import Decoder
from kvserve_core.library import ProfileLibrary
from kvserve_core.pipeline import Pipeline
from kvserve_core.session.events import gather_region, split_region
from kvserve_core.spec import whole
from kvserve_hf.convert import smollm2
from kvserve_hf.engine import Engine


@dataclass(frozen=True)
class Loss:
    """Of a profile on texts, ``[text, token]`` for the tokens after the prompt: KL and more nats, and equal top-1."""

    kl: Tensor
    more_nats: Tensor
    top1: Tensor


def reference_loss(library: ProfileLibrary, profile: str, texts: Sequence[Sequence[int]], seen: int) -> Loss:
    """Prompts of ``seen`` tokens go through real frames; the rest of each text is forced after them."""
    engine = Engine.load(smollm2())
    spec = engine.spec
    found = library.profile(profile)
    assert found is not None
    pipeline = Pipeline.build(found.pipeline, spec, whole(spec), artefacts=library.artefacts)
    rows = [_loss(engine, pipeline, library, list(text), seen) for text in texts]
    return Loss(*(torch.stack(column) for column in zip(*rows, strict=True)))


def _loss(
    engine: Engine, pipeline: Pipeline, library: ProfileLibrary, ids: list[int], seen: int
) -> tuple[Tensor, Tensor, Tensor]:
    total = seen - 1
    engine.prefill("exact", ids[:total])
    header, plan = pipeline.header("exact", total, "profile")
    segments = pipeline.encode([(p, gather_region(engine.gather, "exact", p.at)) for p in plan])
    engine.open("lossy", total)
    for at, x in Decoder(header, engine.spec, artefacts=library.artefacts).decode(segments):
        for part, piece in split_region(engine.spec, at, x):
            engine.scatter("lossy", part, piece)
    exact, lossy = (engine.teacher_forced(name, ids[total:-1]).log_softmax(-1) for name in ("exact", "lossy"))
    for name in engine.held:
        engine.release(name)
    judged = torch.tensor(ids[seen:])[:, None]
    more_nats = (exact.gather(1, judged) - lossy.gather(1, judged))[:, 0]
    return (exact.exp() * (exact - lossy)).sum(-1), more_nats, (exact.argmax(-1) == lossy.argmax(-1)).float()
