"""Export, inject, continue: the same answers as without the detour."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache

from kvserve_core.errors import ConfigError, KVServeError
from kvserve_core.evaluation.engine import whole_regions
from kvserve_core.spec import DType, Region
from kvserve_hf.engine import Engine
from tiny_models import VOCAB, WINDOW, make


def transfer(producer: Engine, consumer: Engine, total: int) -> None:
    """Move what is ever sent of transfer ``p`` to ``c``."""
    consumer.open("c", total)
    for at in whole_regions(producer.spec, total):
        consumer.scatter("c", at, producer.gather("p", at))


def uninterrupted(engine: Engine, ids: list[int], max_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens and their logits from transformers alone: prefill of all but the last token, then one by one."""
    cache, out, logits = DynamicCache(config=engine.model.config), [], []
    with torch.inference_mode():
        engine.model(torch.tensor([ids[:-1]]), cache=cache, use_cache=True)
        token = ids[-1]
        for _ in range(max_tokens):
            logits.append(engine.model(torch.tensor([[token]]), cache=cache, use_cache=True).logits[0, -1])
            token = int(logits[-1].argmax())
            out.append(token)
    return out, logits


@pytest.mark.parametrize("length", [2, WINDOW - 1, WINDOW, WINDOW + 1, 40])
def test_continuing_from_injected_kv_equals_an_uninterrupted_run(engine: Engine, ids: list[int], length: int) -> None:
    ids = ids[:length]
    expected, logits = uninterrupted(engine, ids, 24)
    engine.prefill("p", ids[:-1])
    transfer(engine, engine, length - 1)
    assert engine.generate("c", ids[-1], 24) == expected
    fed = [ids[-1], *expected[:-1]]
    one_by_one = engine.teacher_forced("c", fed[:1])
    assert torch.equal(one_by_one[0], logits[0])
    torch.testing.assert_close(engine.teacher_forced("c", fed), torch.stack(logits), rtol=1e-4, atol=1e-4)
    assert len(set(expected)) > 3, "a model that repeats itself shows nothing"


@pytest.mark.parametrize("chunk", [1, 7, 16, 39])
def test_chunked_prefill_equals_one_shot(engine: Engine, ids: list[int], chunk: int) -> None:
    ready: list[range] = []
    whole = engine.prefill("w", ids)
    parts = engine.prefill("p", ids, chunk, ready.append)
    torch.testing.assert_close(parts.logits, whole.logits, rtol=1e-4, atol=1e-4)
    assert [t for r in ready for t in r] == list(range(40))
    for group in engine.spec.groups:
        for plane in ("k", "v"):
            at = Region(group.id, plane, group.layers, (0, 1), 0, 40)
            torch.testing.assert_close(engine.gather("p", at), engine.gather("w", at), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_bf16_kv_crosses_without_a_change(name: str, ids: list[int]) -> None:
    producer, consumer = make(name, DType.BF16), make(name, DType.BF16)
    producer.prefill("p", ids[:-1])
    transfer(producer, consumer, 39)
    assert producer.gather("p", whole_regions(producer.spec, 39)[0]).dtype == torch.bfloat16
    assert torch.equal(consumer.teacher_forced("c", ids[-1:]), producer.teacher_forced("p", ids[-1:]))
    assert consumer.generate("c", ids[-1], 16) == producer.generate("p", ids[-1], 16)


def test_prefill_attends_to_kv_as_it_is_stored(ids: list[int]) -> None:
    """With a bf16 cache the next token sees rounded KV, also within one prefill: no difference is left to injection."""
    engine = make("llama", DType.BF16)
    whole = engine.prefill("w", ids)
    engine.prefill("p", ids[:-1])
    torch.testing.assert_close(engine.teacher_forced("p", ids[-1:])[0], whole.logits, rtol=1e-3, atol=1e-3)
    exact = make("llama", DType.F32).prefill("w", ids)
    assert not torch.allclose(exact.logits, whole.logits, rtol=1e-4, atol=1e-4)


def test_kv_is_what_transformers_computes(engine: Engine, ids: list[int]) -> None:
    engine.prefill("p", ids)
    cache = DynamicCache(config=engine.model.config)
    with torch.inference_mode():
        engine.model(torch.tensor([ids]), cache=cache, use_cache=True)
    for group in engine.spec.groups:
        for layer in group.layers:
            k = cache.layers[layer].keys[0]
            at = Region(group.id, "k", (layer,), (0, 1), 40 - k.shape[1], 40)
            assert torch.equal(engine.gather("p", at)[0], k)


def test_continuing_leaves_the_held_kv_alone(engine: Engine, ids: list[int]) -> None:
    engine.prefill("p", ids[:-1])
    first = engine.generate("p", ids[-1], 8)
    assert engine.generate("p", ids[-1], 8) == first


def test_decoding_refuses_kv_that_did_not_arrive(engine: Engine, ids: list[int]) -> None:
    engine.prefill("p", ids)
    engine.open("c", 40)
    for at in whole_regions(engine.spec, 40)[:-1]:
        engine.scatter("c", at, engine.gather("p", at))
    with pytest.raises(KVServeError, match=r"plane 'v' of layer .* lacks tokens"):
        engine.generate("c", ids[-1], 1)


def test_transfers_are_apart_and_end_with_release(engine: Engine, ids: list[int]) -> None:
    engine.prefill("a", ids)
    engine.prefill("b", ids[:5])
    with pytest.raises(KVServeError, match="'a' is already held"):
        engine.prefill("a", ids)
    engine.release("a")
    engine.release("a")
    assert engine.held == ("b",)
    with pytest.raises(KVServeError, match="'a' is not held"):
        engine.gather("a", Region(0, "k", (0,), (0,), 0, 1))


def test_a_failed_prefill_holds_nothing(engine: Engine, ids: list[int]) -> None:
    def fail(ready: range) -> None:
        raise RuntimeError(f"stop at {ready}")

    with pytest.raises(RuntimeError):
        engine.prefill("p", ids, 8, fail)
    assert engine.held == ()


@pytest.mark.parametrize(("count", "chunk"), [(0, None), (513, None), (4, 0)])
def test_bad_requests_are_refused(count: int, chunk: int | None) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        make("llama", DType.F32).prefill("p", [5] * count, chunk)


class Words:
    """A tokenizer: one id a character, 1 in front of plain text."""

    def __init__(self, template: str | None) -> None:
        self.chat_template = template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(c) for c in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return f"<{messages[0]['role']}>{messages[0]['content']}"


def test_a_chat_brings_its_own_start() -> None:
    engine = make("llama", DType.F32)
    engine.tokenizer = Words("a template")
    assert engine.tokenize("ab") == [1, 97, 98]
    assert bytes(engine.tokenize("ab", chat=True)) == b"<user>ab"
    engine.tokenizer = Words(None)
    assert engine.tokenize("ab", chat=True) == [1, 97, 98]


def test_a_stop_token_ends_the_stream(ids: list[int]) -> None:
    engine = make("llama", DType.F32)
    engine.prefill("p", ids[:-1])
    free = engine.generate("p", ids[-1], 12)
    stop = free[5]
    engine.model.generation_config.eos_token_id = [stop, VOCAB]
    assert engine.generate("p", ids[-1], 12) == free[: free.index(stop)]
