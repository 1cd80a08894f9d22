"""Heads that see sinks and recent tokens only, against the same attention written out."""

from __future__ import annotations

import pytest
import torch

from kvserve_core.evaluation.engine import plane_by_plane
from kvserve_core.evaluation.prompts import HeldPrompts
from kvserve_core.spec import DType
from kvserve_hf.engine import Engine
from kvserve_hf.profile.masks import StreamingEngine, streaming_heads
from tiny_models import VOCAB, make

EVERY = {(layer, head) for layer in range(3) for head in range(2)}


@pytest.fixture
def ids() -> list[int]:
    return torch.randint(3, VOCAB, (50,), generator=torch.Generator().manual_seed(3)).tolist()


def through(engine: Engine, ids: list[int]) -> torch.Tensor:
    held = HeldPrompts(engine, [ids[:40]])
    with held.restored(0, plane_by_plane(engine.spec, lambda at, x: x)) as key:
        logits = engine.teacher_forced(key, ids[40:])
    held.close()
    return logits


def plain(engine: Engine, ids: list[int]) -> torch.Tensor:
    held = HeldPrompts(engine, [ids[:40]])
    logits = engine.teacher_forced(held.key(0), ids[40:])
    held.close()
    return logits


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_window_over_everything_changes_nothing(name: str, ids: list[int]) -> None:
    engine = make(name, DType.F32)
    masked = StreamingEngine(engine, EVERY, sinks=0, recent=100)
    torch.testing.assert_close(through(masked, ids), plain(engine, ids), rtol=1e-4, atol=1e-4)
    masked = StreamingEngine(engine, (), sinks=0, recent=1)
    torch.testing.assert_close(through(masked, ids), plain(engine, ids), rtol=1e-4, atol=1e-4)


def test_only_restored_prompts_are_masked_and_the_model_is_left_as_it_was(ids: list[int]) -> None:
    engine = make("llama", DType.F32)
    before = plain(engine, ids)
    masked = StreamingEngine(engine, EVERY, sinks=2, recent=6)
    assert not torch.allclose(through(masked, ids), before, atol=1e-2)
    torch.testing.assert_close(plain(masked, ids), before)
    torch.testing.assert_close(plain(engine, ids), before)


def test_what_a_streaming_head_does_not_see_does_not_matter(ids: list[int]) -> None:
    """All heads stream, so tokens between the sinks and the window may hold anything."""
    engine = StreamingEngine(make("llama", DType.F32), EVERY, sinks=2, recent=6)
    held = HeldPrompts(engine, [ids[:40]])

    def spoilt(scale: float) -> torch.Tensor:
        def change(at: object, x: torch.Tensor) -> torch.Tensor:
            out = x.clone()
            out[:, :, 2:34] *= scale
            return out

        with held.restored(0, plane_by_plane(engine.spec, change)) as key:
            return engine.teacher_forced(key, ids[40:42])

    torch.testing.assert_close(spoilt(1.0), spoilt(-3.0), rtol=1e-4, atol=1e-4)
    held.close()


def test_what_the_heads_keep_is_counted() -> None:
    engine = StreamingEngine(make("llama", DType.F32), {(0, 0), (1, 1), (2, 0)}, sinks=4, recent=6)
    assert engine.counted(100) == (6 * 100, 3 * 100 + 3 * 10)
    assert engine.counted(8) == (6 * 8, 6 * 8)


def test_of_layers_with_a_window_only_what_is_sent_counts() -> None:
    whole = make("gemma", DType.F32)
    (window,) = [g for g in whole.spec.groups if g.window]
    first, heads = window.layers[0], window.planes[0].num_heads
    engine = StreamingEngine(whole, {(first, 0)}, sinks=4, recent=6)
    every = sum(len(g.layers) * min(100, g.window or 100) for g in whole.spec.groups) * heads
    assert window.window < 100
    assert engine.counted(100) == (every, every - window.window + 6)


def test_the_heads_that_look_back_least_stream() -> None:
    scores = [[0.9, 0.1], [0.1, 0.5]]
    assert streaming_heads(scores, 0.5) == {(0, 1), (1, 0)}
    assert streaming_heads(scores, 0.25) == {(0, 1)}
