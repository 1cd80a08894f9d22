"""Prefill in one engine, decode in another: the tokens are those of one engine, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_engines import EngineProcess, external_tokens, generate, held, metrics, worker_side
from vllm_pairs import Pair, check_equal

Start = Callable[..., EngineProcess]
Folders = dict[str, Path]
Prompts = list[list[int]]


@pytest.fixture(scope="module")
def llama(start: Start, folders: Folders) -> Pair:
    return Pair(start(folders["llama"], "kv_producer"), start(folders["llama"], "kv_consumer"))


def test_async_loads_give_the_same_tokens(llama: Pair, prompts: Prompts) -> None:
    check_equal(llama, prompts)


def test_only_tokens_beyond_the_local_prefix_are_fetched(llama: Pair, prompts: Prompts) -> None:
    first, second = prompts[5], prompts[5][:128] + prompts[6][:300]
    expected = llama.alone([second])
    llama.disaggregated([first])
    before = llama.decode.call(external_tokens)
    assert llama.disaggregated([second]) == expected
    assert llama.decode.call(external_tokens) - before == len(second) - 1 - 128


def test_a_prompt_that_is_all_local_releases_its_offer(llama: Pair, prompts: Prompts) -> None:
    prompt = prompts[4][:193]  # six whole blocks and the token to compute
    expected = llama.alone([prompt])
    assert llama.disaggregated([prompts[4]])
    before = llama.decode.call(external_tokens)
    assert llama.disaggregated([prompt]) == expected
    assert llama.decode.call(external_tokens) == before
    assert not any(llama.decode.call(held).values())
    assert not any(llama.prefill.call(held).values())


def test_several_samples_of_one_prompt_share_one_fetch(llama: Pair, prompts: Prompts) -> None:
    expected = llama.alone([prompts[5]])[0]
    offered = llama.offers([prompts[5]])
    answers = llama.answers([prompts[5]] * 3, offered * 3)
    assert [answer.tokens for answer in answers] == [expected] * 3
    assert [answer.finish for answer in answers] == ["length"] * 3


def test_the_router_is_given_what_it_needs_and_nothing_else(llama: Pair, prompts: Prompts) -> None:
    offered = llama.offers([prompts[1]], {"transfer_id": "abc123"})[0]
    table = offered["kvserve"]
    assert table["locator"]["transfer_id"] == "abc123"
    assert table["locator"]["num_tokens"] == len(prompts[1]) - 1
    assert offered["do_remote_decode"] is False
    llama.answers([prompts[1]], [offered])


def test_bytes_that_wait_for_consumers_are_exported(llama: Pair, prompts: Prompts) -> None:
    def told(engine: EngineProcess) -> float:
        engine.call(generate, [prompts[0]], 2)  # gauges move with steps
        return float(engine.call(metrics)["kvserve:published_bytes{}"])

    offered = llama.offers([prompts[5]])
    assert told(llama.prefill) > 0
    assert told(llama.decode) == 0
    llama.answers([prompts[5]], offered)
    assert any(told(llama.prefill) == 0 for _ in range(50))  # the consumer's word comes in with some later step


def test_a_known_peer_is_described_and_named(llama: Pair, prompts: Prompts) -> None:
    described: Any = llama.decode.call(_describe, prompts[0])
    peer = described["kvserve"]["peer"]
    assert peer["reads"]["codec:zstd"]
    expected = llama.alone(prompts[2:4])
    assert llama.disaggregated(prompts[2:4], {"peer": peer}) == expected


def _describe(llm: Any, prompt: list[int]) -> Any:
    return generate(llm, [prompt], 1, [{"kvserve": {"describe": True}}])[0].params


def test_zeroed_kv_changes_the_tokens(start: Start, folders: Folders, prompts: Prompts, llama: Pair) -> None:
    decode = start(folders["llama"], "kv_consumer", env={"KVSERVE_FAULT": "zero"})
    pair = Pair(llama.prefill, decode)
    expected = pair.alone(prompts)
    got = pair.disaggregated(prompts)
    assert sum(a != b for a, b in zip(expected, got, strict=True)) == len(prompts)


def check_with_declared_layout(llm: Any) -> tuple[int, str]:
    """How many layers pass as the connector reads them, and what the check says of the layout that shapes declare."""
    from kvserve_core.errors import UnsupportedSpecError
    from kvserve_vllm.layout import Cell, dense
    from kvserve_vllm.placement import Placement
    from kvserve_vllm.self_test import check_layers

    worker = worker_side(llm)
    placement, modules = worker.loads._placement, worker._vllm_config.compilation_config.static_forward_context
    blocks = worker._kv_cache_config.num_blocks
    passed = check_layers(placement, modules, blocks)
    as_declared = {
        layer: replace(cache, views=dense(modules[cache.name].kv_cache, Cell(2, 64, 64)))
        for layer, cache in placement.layers.items()
    }
    try:
        check_layers(Placement(placement.kv, placement.shard, as_declared), modules, blocks)
    except UnsupportedSpecError as error:
        return passed, str(error)
    return passed, ""


def test_a_layout_that_is_not_what_its_shape_says_is_found_at_start_up(llama: Pair) -> None:
    passed, message = llama.decode.call(check_with_declared_layout)
    assert passed == 1  # one layer stands for all of its kind
    assert "does not keep plane 'k' of layer 'model.layers.0.self_attn.attn' as its shape says" in message
