"""A lossy profile of the shipped library on a real model: as good as it says, and not left in the prefix cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

from kvserve_core.errors import KVServeError
from kvserve_core.library import ProfileLibrary
from kvserve_hf.convert import smollm2
from kvserve_hf.texts import load_text, pinned_texts
from vllm_engines import EngineProcess, external_tokens, forget, generate, held, metrics, settle
from vllm_pairs import Pair
from vllm_quality import Logprobs, forced, loss

Start = Callable[..., EngineProcess]
PROFILE = "klt-0.3"
SEEN, JUDGED = 13 * 32 + 1, 192
"""Tokens of a text that are given (what is sent of them fills blocks), and those that are judged after them."""
TOP = 200
"""Log-probabilities compared by themselves; what is left is one more outcome."""
LLM = {"dtype": "bfloat16", "max_logprobs": TOP, "max_model_len": 1024}
LOSSY_TOKENS = "kvserve:lossy_cache_tokens{}"
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
            found.append(tokenizer(load_text(pin, allow_unpinned=True).text)["input_ids"][: SEEN + JUDGED])
        except KVServeError:
            continue  # its package is not in this environment
    assert len(found) >= 8
    return found[:8]


@pytest.fixture(scope="module")
def prefill(start: Start, library: Path) -> EngineProcess:
    policy = {"name": "static", "configuration": {"profile": PROFILE}}
    extra = {"library": str(library), "policy": policy, "min_quality": 0.9}
    return start(smollm2(), "kv_producer", extra=extra, llm=LLM)


@pytest.fixture(scope="module")
def decode(start: Start, library: Path) -> EngineProcess:
    return start(smollm2(), "kv_consumer", extra={"library": str(library)}, llm=LLM)


@pytest.fixture(scope="module")
def allowing(start: Start, library: Path) -> EngineProcess:
    """A decode engine whose prefix cache keeps lossy blocks, so that later requests go on from them."""
    return start(smollm2(), "kv_consumer", extra={"library": str(library), "lossy_prefix_cache": "allow"}, llm=LLM)


def judged(
    pair: Pair, texts: list[list[int]], table: dict[str, float] | None = None
) -> tuple[set[str], list[list[Logprobs]]]:
    """The decode engine's log-probabilities of what follows the contexts. With a table these come from the prefill
    engine, under the profiles that are told."""
    profiles, found = set(), []
    assert pair.decode.call(forget)
    for text in texts:  # one at a time: the deadline is for one transfer, however slow the machine
        offered = None if table is None else pair.offers([text[:SEEN]], table)
        profiles |= {params["kvserve"]["locator"]["profile"] for params in offered or ()}
        pair.decode.call(generate, [text[:SEEN]], 1, offered)
        logprobs, cached = pair.decode.call(forced, text, SEEN, TOP)
        assert (len(logprobs), cached) == (JUDGED, SEEN - 1)
        found.append(logprobs)
    return profiles, found


def test_an_engine_loses_what_the_profile_declares(
    prefill: EngineProcess, allowing: EngineProcess, texts: list[list[int]], library: Path
) -> None:
    """The same engine without a transfer is the reference, and what is sent raw loses nothing."""
    pair = Pair(prefill, allowing)
    _, exact = judged(pair, texts)
    before = allowing.call(external_tokens)
    profiles, raw = judged(pair, texts[:1], {"min_quality": 1.0})
    assert (profiles, raw) == ({"raw"}, exact[:1])
    profiles, lossy = judged(pair, texts, {})
    assert profiles == {PROFILE}
    assert allowing.call(external_tokens) - before == (1 + len(texts)) * (SEEN - 1)
    found = loss(exact, lossy, texts, SEEN)
    record = ProfileLibrary.load(library).profile(PROFILE).quality_for("default")
    assert math.exp(-found.kl) >= record.lower - 0.001, found  # half of the record's texts, in bf16
    assert found.kl > 1e-4, found  # it was lossy
    assert found.top1 >= 0.945, found
    assert found.more_nats <= 0.015, found
    break_even = prefill.call(metrics)[f"kvserve:break_even_bytes_per_second{{profile={PROFILE}}}"]
    assert break_even > 1e6  # bytes/s: it pays on links of ordinary speed


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
    prefill: EngineProcess, allowing: EngineProcess, texts: list[list[int]]
) -> None:
    pair = Pair(prefill, allowing)
    assert allowing.call(forget)
    prompt = texts[1][:400]
    allowing.call(generate, [texts[2][:40]], 2)  # counters are published with steps
    before = allowing.call(metrics).get(LOSSY_TOKENS, 0.0)
    lossy = pair.answers([prompt], pair.offers([prompt]), 4)[0]
    again = pair.decode.call(generate, [prompt], 4)[0]
    assert again.tokens == lossy.tokens
    pair.decode.call(generate, [texts[2][:40]], 2)
    assert pair.decode.call(metrics)[LOSSY_TOKENS] - before == 384  # twelve whole blocks of 32


def test_a_consumer_without_the_library_computes_the_prompt(
    start: Start, prefill: EngineProcess, texts: list[list[int]]
) -> None:
    pair = Pair(prefill, start(smollm2(), "kv_consumer", llm=LLM))
    prompt, next_prompt = texts[3][:400], texts[5][:400]
    expected = pair.alone([prompt, next_prompt])
    offered = pair.offers([prompt])
    assert offered[0]["kvserve"]["locator"]["profile"] == PROFILE
    assert [answer.tokens for answer in pair.answers([prompt], offered)] == expected[:1]
    counted = pair.decode.call(metrics)
    assert [counted[f"kvserve:fallbacks{{rung={rung}}}"] for rung in ("codec", "recompute")] == [1, 1]
    assert not any(pair.decode.call(held).values())
    prefill.call(settle)
    before = pair.decode.call(external_tokens)
    offered = pair.offers([next_prompt])  # who nobody names is now sent what it can read for certain
    assert offered[0]["kvserve"]["locator"]["profile"] in ("raw", "lossless")
    assert [answer.tokens for answer in pair.answers([next_prompt], offered)] == expected[1:]
    assert pair.decode.call(external_tokens) - before == 399


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
