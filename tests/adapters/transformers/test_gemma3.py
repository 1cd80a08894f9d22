"""The real Gemma-3-270M: two layer groups, and generation that goes on after its KV was exported and injected."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kvserve_core.evaluation.engine import whole_regions
from kvserve_core.settings import cache_dir
from kvserve_hf.convert import MODELS, converted
from kvserve_hf.engine import Engine

MISSING = [p for p in (*MODELS["gemma3"].packages, "accelerate") if importlib.util.find_spec(p) is None]
CONVERTED = any((cache_dir() / "models").glob(f"{MODELS['gemma3'].folder}-*/config.json"))
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        bool(MISSING) or not CONVERTED,
        reason=f"needs real weights: {MODELS['gemma3'].install} and 'kvserve[hf]', then '--model gemma3' once, which"
        " converts them (it takes a minute)",
    ),
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(converted("gemma3"), dtype="bfloat16")


def test_sliding_and_full_layers_are_groups_of_their_own(engine: Engine) -> None:
    sliding, full = engine.spec.groups
    assert (sliding.window, len(sliding.layers), full.window, full.layers) == (512, 15, None, (5, 11, 17))
    for group, theta in ((sliding, 1e4), (full, 1e6)):
        k = group.plane("k")
        assert (k.num_heads, k.dim) == (1, 256)
        rope = k.parts[0].rope
        assert rope is not None
        assert rope.inv_freq[1] == pytest.approx(theta ** (-2 / 256))


def test_the_same_answer_after_the_detour(engine: Engine) -> None:
    ids = engine.tokenize(
        "Paris is the capital of France. Berlin is the capital of Germany. Madrid is the capital of Spain."
    )
    ids += engine.tokenize(" Rome is the capital of")[1:]
    engine.prefill("p", ids[:-1], chunk=16)
    engine.open("c", len(ids) - 1)
    for at in whole_regions(engine.spec, len(ids) - 1):
        engine.scatter("c", at, engine.gather("p", at))
    assert torch.equal(engine.teacher_forced("c", ids[-1:]), engine.teacher_forced("p", ids[-1:]))
    answer = engine.generate("c", ids[-1], 8)
    assert answer == engine.generate("p", ids[-1], 8)
    assert "Italy" in engine.detokenize(answer)
