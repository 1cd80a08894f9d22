"""Prefill and decode engines of different tensor-parallel sizes: heads are found by their global number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_engines import EngineProcess, external_tokens, forget, generate, scheduler_side, settle
from vllm_pairs import Pair

Start = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def engines(start: Start, folders: dict[str, Path]) -> dict[int, EngineProcess]:
    """By tensor-parallel size. Each offers and fetches; what it fetches from itself goes to blocks never used yet."""
    return {n: start(folders["llama"], "kv_both", llm={"tensor_parallel_size": n}) for n in (1, 2)}


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2)])
def test_any_split_gives_the_same_tokens(
    engines: dict[int, EngineProcess], prompts: list[list[int]], prefill: int, decode: int
) -> None:
    pair = Pair(engines[prefill], engines[decode])
    expected = pair.alone(prompts)
    before = pair.decode.call(external_tokens)
    pair.prefill.call(forget)
    offered = pair.offers(prompts)
    assert len(offered[0]["kvserve"]["locator"]["endpoints"]) == prefill
    pair.decode.call(forget)
    assert [answer.tokens for answer in pair.answers(prompts, offered)] == expected
    assert pair.decode.call(external_tokens) - before == sum(len(p) - 1 for p in prompts)
    for engine in (pair.decode, pair.prefill):
        engine.call(settle)
        assert engine.call(forget)  # no block is held
    pair.prefill.call(generate, prompts[:1], 1)  # outcomes come in with a step
    assert pair.prefill.call(unsettled) == 0


def unsettled(llm: Any) -> int:
    """Decisions that still wait for the outcome of some rank."""
    return len(scheduler_side(llm)._offering._unsettled)
