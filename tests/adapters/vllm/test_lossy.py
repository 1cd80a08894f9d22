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
from vllm_engines import EngineProcess, external_tokens, forget, generate, held, metrics, settle
from vllm_pairs import Pair
from vllm_quality import reference_loss

Start = Callable[..., EngineProcess]
PROFILE = "klt-0.3"
SEEN, JUDGED = 420, 192
"""Tokens of a text that are given (beyond a cell, and off every boundary), and those that are judged after them."""
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


def kl(reference: Mapping[int, float], test: Mapping[int, float]) -> float:
    """KL over the tokens that both lists name, and the rest as one outcome."""
    both = reference.keys() & test.keys()
    total = sum(math.exp(reference[t]) * (reference[t] - test[t]) for t in both)
    rest_p = max(1e-9, 1 - sum(math.exp(reference[t]) for t in both))
    rest_q = max(1e-9, 1 - sum(math.exp(test[t]) for t in both))
    return total + rest_p * math.log(rest_p / rest_q)


def next_tokens(pair: Pair, prompts: list[list[int]], table: dict[str, float]) -> tuple[set[str], list[Any]]:
    """Profiles used, and distributions over the token after each prompt, which was prefilled elsewhere."""
    profiles, found = set(), []
    for prompt in prompts:  # one at a time: the deadline is for one transfer, however slow the machine
        offered = pair.offers([prompt], table)
        profiles.add(offered[0]["kvserve"]["locator"]["profile"])
        pair.decode.call(forget)
        found.append(pair.decode.call(generate, [prompt], 1, offered, TOP)[0].logprobs[0])
    return profiles, found


def test_what_is_lost_is_what_the_profile_declares(
    prefill: EngineProcess, decode: EngineProcess, texts: list[list[int]], library: Path
) -> None:
    """Right after the prompt the loss is largest, so the same places are compared with the reference engine; its loss
    over the tokens that the record was measured on is then the declared one."""
    pair, loaded = Pair(prefill, decode), ProfileLibrary.load(library)
    prompts = [text[:SEEN] for text in texts]
    before = decode.call(external_tokens)
    raw_profiles, raw = next_tokens(pair, prompts, {"min_quality": 1.0})
    profiles, lossy = next_tokens(pair, prompts, {})
    assert (raw_profiles, profiles) == ({"raw"}, {PROFILE})
    assert decode.call(external_tokens) - before == 2 * len(prompts) * (SEEN - 1)
    reference = reference_loss(loaded, PROFILE, texts, SEEN)
    here = sum(kl(a, b) for a, b in zip(raw, lossy, strict=True)) / len(texts)
    there = float(reference.kl[:, 0].mean())
    assert abs(here - there) <= 0.15 * there + 0.002, (here, there)  # bf16 against float32 compute
    record = loaded.profile(PROFILE).quality_for("default")
    quality = math.exp(-float(reference.kl.mean()))
    assert quality >= record.lower - 0.003, quality  # half of the record's texts
    assert float(reference.top1.mean()) >= 0.95
    assert float(reference.more_nats.mean()) <= 0.02


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
