"""The same equality for sync loads, chunked prefill, sliding windows and MLA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_engines import EngineProcess, external_tokens, held, metrics, worker_side
from vllm_pairs import Pair, check_equal

Start = Callable[..., EngineProcess]
CHUNKED = {"max_num_batched_tokens": 64, "max_num_seqs": 8}


@pytest.mark.parametrize(
    ("model", "extra", "llm"),
    [
        pytest.param("gemma3", {}, CHUNKED, id="windows-chunked"),
        pytest.param("deepseek", {}, {"block_size": 16}, id="mla"),
    ],
)
def test_tokens_are_those_of_one_engine(
    engine_pair: Callable[..., Pair],
    prompts: list[list[int]],
    model: str,
    extra: dict[str, bool],
    llm: dict[str, int],
) -> None:
    check_equal(engine_pair(model, extra, llm), prompts)


def test_sync_loads_and_one_whose_poll_fails(engine_pair: Callable[..., Pair], prompts: list[list[int]]) -> None:
    """What a step computes on a load that was waited for in vain is not taken for the prompt's."""
    pair = engine_pair("llama", {"sync_load": True}, CHUNKED)
    check_equal(pair, prompts)
    expected = pair.alone([prompts[6]])
    offered = pair.offers([prompts[6]])
    pair.decode.call(fail_one_poll)
    assert [answer.tokens for answer in pair.answers([prompts[6]], offered)] == expected
    assert pair.decode.call(metrics)["kvserve:hook_failures{hook=start_load_kv}"] == 1
    for engine in (pair.decode, pair.prefill):
        assert not any(engine.call(held).values())


def fail_one_poll(llm: Any) -> None:
    """The consumer's next poll that would tell something raises, and what it had to tell is lost."""
    consumer = worker_side(llm)._consumer
    poll = consumer.poll

    def failing() -> Any:
        if told := poll():
            del consumer.poll
            raise RuntimeError(f"injected in place of {told}")
        return told

    consumer.poll = failing


def test_another_connector_may_work_beside_it(
    engine_pair: Callable[..., Pair], prompts: list[list[int]], tmp_path: Path
) -> None:
    """vLLM's MultiConnector with its example connector, which writes each prompt to a folder: nobody else reads it."""
    beside = {
        role: {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / role)},
        }
        for role in ("kv_producer", "kv_consumer")
    }
    pair = engine_pair("llama", {}, {}, beside)
    check_equal(pair, prompts)
    assert any((tmp_path / "kv_producer").iterdir())
    counted = pair.decode.call(metrics)
    assert counted["kvserve:transfers{ok=true,side=consumer}"] == len(prompts)


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 cache needs AVX-512 on a CPU")
def test_a_quantized_cache_goes_as_it_is_by_whole_blocks(
    engine_pair: Callable[..., Pair], prompts: list[list[int]]
) -> None:
    pair = engine_pair("llama", {}, {"kv_cache_dtype": "fp8_e4m3"})
    long_enough = [prompt for prompt in prompts if len(prompt) > 32]
    expected = pair.alone(long_enough)
    offered = pair.offers(long_enough)
    assert [p["kvserve"]["locator"]["num_tokens"] % 32 for p in offered] == [0] * len(offered)
    before = pair.decode.call(external_tokens)
    assert [answer.tokens for answer in pair.answers(long_enough, offered)] == expected
    assert pair.decode.call(external_tokens) - before == sum((len(p) - 1) // 32 * 32 for p in long_enough)
    for engine in (pair.decode, pair.prefill):
        assert not any(engine.call(held).values())
