"""Engines over a store of prefixes, and what must hold of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvserve_core.model_time import ModelTime
from vllm_engines import EngineProcess, Setup, external_tokens, forget, generate, held, scheduler_side, worker_side

Prompts = list[list[int]]
NEW_TOKENS = 12
CELL = 256


def setup(model: Path, store: Path, *, extra: dict[str, Any] | None = None, **options: Any) -> Setup:
    settings = {"prefix_store": "file", "transport": {"file": {"path": str(store)}}, **(extra or {})}
    return Setup(model, "kv_both", settings, **options)


def nothing_held(llm: Any) -> bool:
    """Whether neither half of the connector holds anything once no request is left."""
    left = held(llm)
    prefix, prefixes = worker_side(llm).prefix, scheduler_side(llm)._prefixes
    counts = (prefix.loader.active, prefix.writer.held, prefix._producer.budget.held_bytes, prefixes.open_requests)
    return not any(left.values()) and not any(counts)


def untimed(llm: Any) -> None:
    """Forget how long prefills took: a tiny model computes faster than anything loads."""
    scheduler_side(llm)._deployment.controller.model = ModelTime()


def loaded_again(engine: EngineProcess, prompts: Prompts) -> tuple[Prompts, int]:
    """Answers with an empty local cache, and how many prompt tokens came from outside: all that are stored."""
    engine.call(untimed)
    assert engine.call(forget)
    before = engine.call(external_tokens)
    answers = engine.call(generate, prompts, NEW_TOKENS)
    assert engine.call(nothing_held)
    return [answer.tokens for answer in answers], engine.call(external_tokens) - before
