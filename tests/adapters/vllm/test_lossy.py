"""A lossy profile of the shipped library on a real model: as good as it says, and not left in the prefix cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kvserve_core.errors import KVServeError
from kvserve_core.library import ProfileLibrary
from kvserve_hf.convert import smollm2
from kvserve_hf.texts import load_text, pinned_texts
from vllm_engines import EngineProcess, external_tokens, forget, generate, held, metrics
from vllm_pairs import Pair

Start = Callable[..., EngineProcess]
PROFILE = "klt-0.3"
SEEN = 420
"""Tokens of a text that are given: beyond a cell, and off every boundary."""
JUDGED = 32
"""Tokens that are generated after them and compared step by step."""
TOP = 200
"""Log-probabilities compared by themselves; what is left is one more outcome."""
LLM = {"dtype": "bfloat16", "max_logprobs": TOP, "max_model_len": 1024}
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def library() -> Path:
    return Path(str(files("kvserve_hf").joinpath("smollm2-135m.kvlib")))


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2(), local_files_only=True)
    found = []
    for pin in pinned_texts():
        try:
            found.append(tokenizer(load_text(pin, allow_unpinned=True).text)["input_ids"][:SEEN])
        except KVServeError:
            continue  # its package is not in this environment
    assert len(found) >= 8
    return found[:8]


@pytest.fixture(scope="module")
def prefill(start: Start, library: Path) -> EngineProcess:
    policy = {"name": "static", "configuration": {"profile": PROFILE}}
    extra = {"library": str(library), "policy": policy, "min_quality": 0.9, "peers": {"accept": "any"}}
    return start(smollm2(), "kv_producer", extra=extra, llm=LLM)


@pytest.fixture(scope="module")
def decode(start: Start, library: Path) -> EngineProcess:
    return start(smollm2(), "kv_consumer", extra={"library": str(library)}, llm=LLM)


def kl(reference: Mapping[int, float], test: Mapping[int, float]) -> float:
    """KL over the tokens that both lists name, and the rest as one outcome."""
    both = reference.keys() & test.keys()
    total = sum(math.exp(reference[t]) * (reference[t] - test[t]) for t in both)
    rest_p = max(1e-9, 1 - sum(math.exp(reference[t]) for t in both))
    rest_q = max(1e-9, 1 - sum(math.exp(test[t]) for t in both))
    return total + rest_p * math.log(rest_p / rest_q)


def same_history(exact: Any, lossy: Any) -> list[tuple[dict[int, float], dict[int, float]]]:
    """Distributions over the next token after the same tokens: up to and with the first step where they part."""
    steps = list(zip(exact.logprobs, lossy.logprobs, strict=True))
    parted = next((i for i, (a, b) in enumerate(zip(exact.tokens, lossy.tokens, strict=True)) if a != b), len(steps))
    return steps[: parted + 1]


def test_top_1_and_likelihood_are_within_the_declared_quality(
    prefill: EngineProcess, decode: EngineProcess, texts: list[list[int]], library: Path
) -> None:
    pair = Pair(prefill, decode)
    prompts = [text[:SEEN] for text in texts]
    decode.call(forget)
    exact = decode.call(generate, prompts, JUDGED, None, TOP)
    assert decode.call(forget)
    before = decode.call(external_tokens)
    lossy = []
    for prompt in prompts:  # one at a time: the deadline is for one transfer, however slow the machine
        offered = pair.offers([prompt])
        assert offered[0]["kvserve"]["locator"]["profile"] == PROFILE
        lossy += decode.call(generate, [prompt], JUDGED, offered, TOP)
    assert decode.call(external_tokens) - before == len(prompts) * (SEEN - 1)
    record = ProfileLibrary.load(library).profile(PROFILE).quality_for("default")
    pairs = [step for a, b in zip(exact, lossy, strict=True) for step in same_history(a, b)]
    mean_kl = sum(kl(a, b) for a, b in pairs) / len(pairs)
    top1 = sum(max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in pairs) / len(pairs)
    likely = [(a[t], b[t]) for a, b in pairs if (t := max(a, key=a.__getitem__)) in b]
    more_nats = sum(a - b for a, b in likely) / len(likely)
    found = f"{len(pairs)} steps: exp(-KL) {math.exp(-mean_kl):.4f}, top-1 {top1:.3f}, dNLL {more_nats:.4f} nats"
    print(found)  # noqa: T201  # a figure of the real engine, shown with -s
    assert mean_kl > 0, found  # it is lossy
    assert math.exp(-mean_kl) >= record.lower - 0.005, found  # some hundred steps against the thousands of the record
    assert top1 >= 0.95, found
    assert more_nats <= 0.02, found


def test_lossy_kv_is_not_left_in_the_prefix_cache(
    prefill: EngineProcess, decode: EngineProcess, texts: list[list[int]]
) -> None:
    pair = Pair(prefill, decode)
    prompt = texts[0][:400]
    decode.call(forget)
    exact = decode.call(generate, [prompt], 40, None, TOP)[0]
    assert decode.call(forget)
    lossy = decode.call(generate, [prompt], 40, pair.offers([prompt]), TOP)[0]
    assert lossy.logprobs[0] != exact.logprobs[0]
    longer = [*prompt, *lossy.tokens]  # would take the decoded blocks too
    again = decode.call(generate, [prompt, longer], 8, None, TOP)
    assert again[0].logprobs[0] == exact.logprobs[0]
    assert decode.call(forget)
    assert decode.call(generate, [longer], 8, None, TOP)[0].tokens == again[1].tokens
    assert not any(decode.call(held).values())


def test_where_it_is_allowed_the_lossy_tokens_are_counted(
    start: Start, prefill: EngineProcess, texts: list[list[int]], library: Path
) -> None:
    extra = {"library": str(library), "lossy_prefix_cache": "allow"}
    pair = Pair(prefill, start(smollm2(), "kv_consumer", extra=extra, llm=LLM))
    prompt = texts[1][:400]
    lossy = pair.answers([prompt], pair.offers([prompt]), 4)[0]
    again = pair.decode.call(generate, [prompt], 4)[0]
    assert again.tokens == lossy.tokens
    pair.decode.call(generate, [texts[2][:40]], 2)
    assert pair.decode.call(metrics)["kvserve:lossy_cache_tokens{}"] == 384  # twelve whole blocks of 32


def test_a_consumer_without_the_library_computes_the_prompt(
    start: Start, prefill: EngineProcess, texts: list[list[int]]
) -> None:
    pair = Pair(prefill, start(smollm2(), "kv_consumer", llm=LLM))
    prompt = texts[3][:400]
    expected = pair.alone([prompt])
    assert pair.disaggregated([prompt]) == expected
    assert pair.decode.call(metrics)["kvserve:fallbacks{rung=recompute}"] == 1
    assert not any(pair.decode.call(held).values())


def test_a_peer_that_names_itself_is_only_sent_what_it_reads(
    start: Start, prefill: EngineProcess, texts: list[list[int]]
) -> None:
    pair = Pair(prefill, start(smollm2(), "kv_consumer", llm=LLM))
    described = pair.decode.call(generate, [texts[4][:8]], 1, [{"kvserve": {"describe": True}}])[0].params
    offered = pair.offers([texts[4][:400]], {"peer": described["kvserve"]["peer"]})
    assert offered[0]["kvserve"]["locator"]["profile"] == "raw"
    expected = pair.alone([texts[4][:400]])
    before = pair.decode.call(external_tokens)
    assert [a.tokens for a in pair.answers([texts[4][:400]], offered)] == expected
    assert pair.decode.call(external_tokens) - before == 399
