"""``kvserve calibrate klt``: bases for the ``klt`` transform, from texts or from the weights alone."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.bench import CONTINUATION_TOKENS, PROMPT_TOKENS
from kvserve_core.evaluation.engine import TokenText
from kvserve_core.spec import COMPOSITE
from kvserve_hf.calibrate.basis import Statistics, components, equal_parts, unit, write
from kvserve_hf.calibrate.blocks import Block, blocks
from kvserve_hf.calibrate.fisher import Sensitivity, squared_gradients
from kvserve_hf.calibrate.held import FOLDS, QUANTILE, curves, fold_of, quantile
from kvserve_hf.calibrate.moments import Moments, State, Sums
from kvserve_hf.calibrate.request import TEXT, Request
from kvserve_hf.calibrate.weights import from_weights
from kvserve_hf.calibrate.work import Work
from kvserve_hf.texts import tokens

METRICS = ("fisher", "none")


def calibrate_klt(request: Request) -> dict[str, Any]:
    """Run, write ``request.out``, and say what is in it.

    Raises:
        ConfigError: an unknown option. UnsupportedSpecError: a plane that the model does not have.
        ArtefactError: the work folder is another run's, in use, or damaged.
    """
    options = request.klt
    if options.metric not in METRICS:
        raise ConfigError(f"unknown metric {options.metric!r}; use one of {', '.join(METRICS)}", "metric")
    cut = blocks(request.engine.spec, options.plane, options.layer_block, options.per)
    if options.from_weights:
        statistics = from_weights(request.engine, cut)
        return _solve(request, statistics, {"from_weights": True, "metric": "none"})
    request.require_texts()
    texts = tokens(request.texts, request.engine.tokenize)
    # The cut decides the sums; cutoff and rank do not, so they may differ between a run and the one that goes on.
    asked = request.provenance("calibrate klt") | asdict(options) | {"cutoff": None, "rank": None}
    with Work(request.work, asked) as work:
        return _from_texts(request, State(work, [block.size for block in cut]), cut, texts)


def _from_texts(request: Request, state: State, cut: list[Block], texts: list[TokenText]) -> dict[str, Any]:
    options = request.klt
    sums = _collect(request, state, cut, texts)
    sensitivity = sums.sensitivity if options.metric == "fisher" else None
    statistics = [_statistics(b, m, sensitivity) for b, m in zip(cut, sums.moments, strict=True)]
    held = _held_out(request, state, statistics, sums, texts)
    about: dict[str, Any] = {"from_weights": False, "tokens": sums.moments[0].count}
    if held:
        about["held_out"] = {"folds": FOLDS, "quantile": QUANTILE, "sink_tokens": options.sink_tokens}
    found = _solve(request, statistics, about, held)
    state.remove()
    return found


def _members(texts: list[TokenText], fold: int) -> list[tuple[int, TokenText]]:
    return [(i, text) for i, text in enumerate(texts) if fold_of(i) == fold]


def _collect(request: Request, state: State, cut: list[Block], texts: list[TokenText]) -> Sums:
    """The sums over all texts; those of each fold stay in the state."""
    request.engine.model.requires_grad_(False)
    total, seen = Sums([block.size for block in cut]), 0
    for fold in range(min(FOLDS, len(texts))):
        sums = state.sums(fold)
        for done, (i, text) in enumerate(_members(texts, fold)):
            if done >= sums.texts:
                _add(request, sums, cut, text, seed=i)
                state.save(fold, sums)
            seen += 1
            request.progress(text.name, seen, len(texts))
        total.merge(sums)
    return total


def _add(request: Request, sums: Sums, cut: list[Block], text: TokenText, seed: int) -> None:
    engine, sinks = request.engine, request.klt.sink_tokens
    prompt, rest = text.ids[:PROMPT_TOKENS], text.ids[PROMPT_TOKENS : PROMPT_TOKENS + CONTINUATION_TOKENS]
    engine.prefill(TEXT, prompt)
    try:
        for block, moments in zip(cut, sums.moments, strict=True):
            moments.add(block.rows(lambda at: engine.gather(TEXT, at), engine.spec, sinks, len(prompt)))
        if request.klt.metric == "fisher":
            sums.sensitivity.add(squared_gradients(engine, TEXT, len(prompt), rest, sinks, seed))
        sums.texts += 1
    finally:
        engine.release(TEXT)


def _held_out(
    request: Request, state: State, statistics: list[Statistics], sums: Sums, texts: list[TokenText]
) -> list[Tensor] | None:
    """Of each block the energy outside its first components, on texts that were left out; None of a single text."""
    if len(texts) < 2:
        return None
    divisor, found, seen = unit(statistics), [], 0
    for fold in range(min(FOLDS, len(texts))):
        members = _members(texts, fold)
        kept = state.held(fold)
        if kept is None:
            kept = _curves_of(request, state, fold, statistics, sums, divisor, members)
            state.save_held(fold, kept)
        found.append(kept)
        seen += len(members)
        request.progress("held-out texts", seen, len(texts))
    return [quantile(block) for block in zip(*found, strict=True)]


def _curves_of(
    request: Request,
    state: State,
    fold: int,
    statistics: list[Statistics],
    sums: Sums,
    divisor: float,
    members: list[tuple[int, TokenText]],
) -> list[Tensor]:
    """Of each block the curves ``[cells, n + 1]`` of a fold's texts under the bases of the others."""
    engine, left_out = request.engine, state.sums(fold)
    bases = []
    for s, all_, part in zip(statistics, sums.moments, left_out.moments, strict=True):
        rest = all_.without(part)
        bases.append(components(replace(s, mean=rest.mean, covariance=rest.covariance()), divisor, 0.0, None))
    rows = [partial(s.block.rows, lambda at: engine.gather(TEXT, at), engine.spec) for s in statistics]
    found = []
    for _, text in members:
        engine.prefill(TEXT, text.ids[:PROMPT_TOKENS])
        try:
            found.append(curves(rows, bases, request.klt.sink_tokens, PROMPT_TOKENS))
        finally:
            engine.release(TEXT)
    return [torch.cat(block) for block in zip(*found, strict=True)]


def _statistics(block: Block, moments: Moments, sensitivity: Sensitivity | None) -> Statistics:
    covariance = moments.covariance()
    if sensitivity is None:
        return Statistics(block, moments.mean, covariance, equal_parts(block, covariance.diagonal()))
    names = COMPOSITE.get(block.plane.name, (block.plane.name,))
    rows = [
        torch.cat([sensitivity.metric(layer, name)[list(block.heads)] for name in names], -1) for layer in block.layers
    ]
    return Statistics(block, moments.mean, covariance, torch.stack(rows).flatten())


def _solve(
    request: Request, statistics: list[Statistics], about: dict[str, Any], held: list[Tensor] | None = None
) -> dict[str, Any]:
    options, divisor = request.klt, unit(statistics)
    found = []
    for i, s in enumerate(statistics):
        made = components(s, divisor, options.cutoff, options.rank)
        # What weights predict is too rough to tell drift by.
        made = replace(made, tail=math.inf) if options.from_weights else made
        found.append(replace(made, held=held[i][: len(made.sigma) + 1]) if held else made)
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
