"""Prefill and decode engines of different tensor-parallel sizes: heads are found by their global number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_engines import EngineProcess, external_tokens, forget, generate, scheduler_side, settle
from vllm_pairs import Pair
from vllm_segments import ROTATED, rotated_library, segments, tiny_spec

Start = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def engines(
    start: Start, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, EngineProcess]:
    """By tensor-parallel size. Each offers and fetches; what it fetches from itself goes to blocks never used yet.

    They send what they may lose something of with a chain that works head by head.
    """
    library = rotated_library(folders["llama"], tmp_path_factory.mktemp("library") / "rotated.kvlib")
    policy = {"name": "static", "configuration": {"profile": ROTATED}}
    extra = {"library": str(library), "policy": policy, "min_quality": 0.9}
    return {n: start(folders["llama"], "kv_both", extra=extra, llm={"tensor_parallel_size": n}) for n in (1, 2)}


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2)])
def test_any_split_gives_the_same_tokens(
    engines: dict[int, EngineProcess], prompts: list[list[int]], prefill: int, decode: int
) -> None:
    pair = Pair(engines[prefill], engines[decode])
    expected = pair.alone(prompts)
    before = pair.decode.call(external_tokens)
    pair.prefill.call(forget)
    offered = pair.offers(prompts, {"min_quality": 1.0})
    assert len(offered[0]["kvserve"]["locator"]["endpoints"]) == prefill
    pair.decode.call(forget)
    assert [answer.tokens for answer in pair.answers(prompts, offered)] == expected
    assert pair.decode.call(external_tokens) - before == sum(len(p) - 1 for p in prompts)
    for engine in (pair.decode, pair.prefill):
        engine.call(settle)
        assert engine.call(forget)  # no block is held
    pair.prefill.call(generate, prompts[:1], 1)  # outcomes come in with a step
    assert pair.prefill.call(unsettled) == 0


def test_a_head_local_chain_gives_the_same_bytes_whatever_the_split(
    engines: dict[int, EngineProcess], folders: dict[str, Path], prompts: list[list[int]]
) -> None:
    """Two ranks load exactly what one rank computed, both offer it with loss, and segments are compared to the byte."""
    prompt = prompts[7][: 2 * 256 + 1]  # whole blocks and the token to compute: nothing of it is computed twice
    one, two = engines[1], engines[2]
    for engine in (one, two):
        engine.call(settle)
        assert engine.call(forget)
    exact = Pair(one, two).offers([prompt], {"min_quality": 1.0})[0]
    loaded_and_offered = exact | {"do_remote_decode": True}
    before = two.call(external_tokens)
    of_two = two.call(generate, [prompt], 1, [loaded_and_offered])[0].params
    assert two.call(external_tokens) - before == len(prompt) - 1
    of_one = Pair(one, two).offers([prompt])[0]
    assert {p["kvserve"]["locator"]["profile"] for p in (of_one, of_two)} == {ROTATED}
    assert [len(p["kvserve"]["locator"]["endpoints"]) for p in (of_one, of_two)] == [1, 2]
    kv = tiny_spec(folders["llama"])
    whole, split = segments(kv, of_one), segments(kv, of_two)
    assert whole == split
    lossy = {at for at, stages in whole if any("uniform" in stage for stage in stages)}
    assert {at.heads for at in lossy} == {(0,), (1,)}
    assert {(layer, at.plane, at.start) for at in lossy for layer in at.layers} >= {
        (layer, plane, start) for layer in range(3) for plane in "kv" for start in (256,)
    }


def unsettled(llm: Any) -> int:
    """Decisions that still wait for the outcome of some rank."""
    return len(scheduler_side(llm)._offering._unsettled)
