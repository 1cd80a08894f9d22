"""``kvserve calibrate klt``: bases for the ``klt`` transform, from texts or from the weights alone."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from kvserve_core.errors import ConfigError
from kvserve_core.spec import COMPOSITE
from kvserve_hf.calibrate.basis import Statistics, components, equal_parts, unit, write
from kvserve_hf.calibrate.blocks import Block, blocks
from kvserve_hf.calibrate.fisher import Sensitivity, squared_gradients
from kvserve_hf.calibrate.moments import Moments, State
from kvserve_hf.calibrate.request import Request
from kvserve_hf.calibrate.weights import from_weights
from kvserve_hf.measure import CONTINUATION_TOKENS, PROMPT_TOKENS, TokenText
from kvserve_hf.texts import tokens

METRICS = ("fisher", "none")
HELD = "calibration"


def calibrate_klt(request: Request) -> dict[str, Any]:
    """Run, write ``request.out``, and say what is in it.

    Raises:
        ConfigError: an unknown option. UnsupportedSpecError: a plane that the model does not have.
        ArtefactError: the work folder is another run's.
    """
    options = request.klt
    if options.metric not in METRICS:
        raise ConfigError(f"unknown metric {options.metric!r}; use one of {', '.join(METRICS)}", "metric")
    cut = blocks(request.engine.spec, options.plane, options.layer_block, options.per)
    if options.from_weights:
        statistics = from_weights(request.engine, cut)
        return _solve(request, statistics, {"from_weights": True, "metric": "none"})
    state = _collect(request, cut)
    sensitivity = state.sensitivity if options.metric == "fisher" else None
    statistics = [_statistics(b, m, sensitivity) for b, m in zip(cut, state.moments, strict=True)]
    found = _solve(request, statistics, {"from_weights": False, "tokens": state.moments[0].count})
    state.remove()
    return found


def _collect(request: Request, cut: list[Block]) -> State:
    texts = tokens(request.texts, request.engine.tokenize)
    if not texts:
        raise ConfigError("there are no texts to calibrate on; name a list of them, or use --from-weights", "texts")
    # The cut decides the sums; cutoff and rank do not, so they may differ between a run and the one that goes on.
    asked = request.provenance("calibrate klt") | asdict(request.klt) | {"cutoff": None, "rank": None}
    state = State(request.work, asked, [block.size for block in cut])
    request.engine.model.requires_grad_(False)
    for i, text in enumerate(texts):
        if i >= state.done:
            _add(request, state, cut, text, seed=i)
            state.done = i + 1
            state.save()
        request.progress(text.name, i + 1, len(texts))
    return state


def _add(request: Request, state: State, cut: list[Block], text: TokenText, seed: int) -> None:
    engine, sinks = request.engine, request.klt.sink_tokens
    prompt, rest = text.ids[:PROMPT_TOKENS], text.ids[PROMPT_TOKENS : PROMPT_TOKENS + CONTINUATION_TOKENS]
    engine.prefill(HELD, prompt)
    try:
        for block, moments in zip(cut, state.moments, strict=True):
            moments.add(block.rows(lambda at: engine.gather(HELD, at), engine.spec, sinks, len(prompt)))
        if request.klt.metric == "fisher":
            state.sensitivity.add(squared_gradients(engine, HELD, len(prompt), rest, sinks, seed))
    finally:
        engine.release(HELD)


def _statistics(block: Block, moments: Moments, sensitivity: Sensitivity | None) -> Statistics:
    covariance = moments.covariance()
    if sensitivity is None:
        return Statistics(block, moments.mean, covariance, equal_parts(block, covariance.diagonal()))
    names = COMPOSITE.get(block.plane.name, (block.plane.name,))
    rows = [
        torch.cat([sensitivity.metric(layer, name)[list(block.heads)] for name in names], -1) for layer in block.layers
    ]
    return Statistics(block, moments.mean, covariance, torch.stack(rows).flatten())


def _solve(request: Request, statistics: list[Statistics], about: dict[str, Any]) -> dict[str, Any]:
    options, divisor = request.klt, unit(statistics)
    found = []
    for i, s in enumerate(statistics):
        made = components(s, divisor, options.cutoff, options.rank)
        # What weights predict is too rough to tell drift by.
        found.append(replace(made, tail=math.inf) if options.from_weights else made)
        request.progress("components", i + 1, len(statistics))
    provenance = request.provenance("calibrate klt") | {"options": asdict(options), "unit": divisor} | about
    nbytes = write(request.out, options.plane, options.per, found, provenance)
    return {
        "file": str(request.out),
        "blake3": blake3(Path(request.out).read_bytes()).hexdigest(),
        "bytes": nbytes,
        "blocks": len(found),
        "components": sum(len(c.sigma) for c in found),
        "of": sum(s.block.size for s in statistics),
        "unit": divisor,
    }
