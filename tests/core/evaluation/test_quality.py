"""Statistics of quality, and measurement through a roundtrip."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch

from kvserve_core.errors import KVServeError, UnsupportedSpecError
from kvserve_core.evaluation.bench import Bench
from kvserve_core.evaluation.engine import TokenText, plane_by_plane
from kvserve_core.evaluation.quality import Quality, TextQuality, compare, interval, t95
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import LOSSLESS_PIPELINE, PipelineSpec
from kvserve_core.spec import DType, Region, whole
from kvserve_hf.roundtrip import FrameRoundtrip
from tiny_models import VOCAB, make


def test_equal_logits_are_perfect() -> None:
    x = torch.randn(5, 11)
    assert compare("t", x, x, [1, 2, 3, 4, 5]) == TextQuality("t", 0.0, 1.0, 0.0, 5)


def test_known_values() -> None:
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    got = compare("t", p.log(), q.log() + 3.0, [0, 1])
    assert got.kl == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)) / 2, rel=1e-5)
    assert got.top1 == 0.5
    assert got.dnll == pytest.approx(math.log(0.5) - math.log(0.75), rel=1e-5)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(UnsupportedSpecError, match="text 't'"):
        compare("t", torch.zeros(3, 4), torch.zeros(3, 5), [0, 0, 0])
    with pytest.raises(UnsupportedSpecError, match="2 tokens"):
        compare("t", torch.zeros(3, 4), torch.zeros(3, 4), [0, 0])


def test_t_interval() -> None:
    # Reference values: mean 2.5, s = 1.2910, t(3) = 3.182, half width 2.0540.
    got = interval([1.0, 2.0, 3.0, 4.0])
    assert (got.mean, got.low, got.high) == pytest.approx((2.5, 0.4460, 4.5540), abs=1e-4)
    assert interval([2.0]).high == math.inf
    assert t95(60) == pytest.approx(2.0003, abs=1e-3)
    with pytest.raises(UnsupportedSpecError, match="no texts"):
        interval([])


def test_quality_is_bounded_by_its_confidence() -> None:
    made = Quality(tuple(TextQuality(str(i), kl, 0.9, 0.0, 10) for i, kl in enumerate((0.01, 0.02, 0.03))))
    assert made.value == pytest.approx(math.exp(-0.02))
    assert made.lower == pytest.approx(math.exp(-made.kl.high))
    assert made.lower < made.value
    assert made.value < made.upper <= 1.0
    assert (Quality(made.texts[:1]).lower, Quality(made.texts[:1]).upper) == (0.0, 1.0)
    assert Quality(tuple(TextQuality(str(i), 0.0, 1.0, 0.0, 9) for i in range(3))).lower == 1.0


def bench(name: str) -> Bench:
    g = torch.Generator().manual_seed(5)
    texts = [TokenText(f"t{i}", tuple(torch.randint(3, VOCAB, (60,), generator=g).tolist())) for i in range(3)]
    return Bench(make(name, DType.BF16), texts, prompt_tokens=40)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_an_exact_roundtrip_is_perfect_and_noise_is_not(name: str) -> None:
    b = bench(name)
    done: list[tuple[int, int]] = []
    spec = b._engine.spec
    exact = b.run(plane_by_plane(spec, lambda at, x: x), lambda i, n: done.append((i, n)))
    assert (exact.kl.mean, exact.top1.mean, exact.dnll.mean, exact.value) == (0.0, 1.0, 0.0, 1.0)
    assert done == [(1, 3), (2, 3), (3, 3)]
    little = b.run(plane_by_plane(spec, lambda at, x: x * 1.01))
    much = b.run(plane_by_plane(spec, lambda at, x: x * 1.3))
    assert 0.0 < little.kl.mean < much.kl.mean
    assert much.lower < little.lower < 1.0
    assert b._engine.held == b.keys
    b.close()
    assert b._engine.held == ()


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_any_pipeline_can_be_measured(name: str) -> None:
    b = bench(name)
    spec = b._engine.spec
    exact = b.run(FrameRoundtrip(Pipeline.build(LOSSLESS_PIPELINE, spec, whole(spec))))
    assert (exact.kl.mean, exact.top1.mean) == (0.0, 1.0)
    four_bits = PipelineSpec.model_validate(
        {"planes": {"*": {"quantizer": {"name": "uniform", "configuration": {"levels": 16}}, "codec": "bitpack"}}}
    )
    assert 0.0 < b.run(FrameRoundtrip(Pipeline.build(four_bits, spec, whole(spec)))).kl.mean < 1.0


def test_a_roundtrip_that_loses_tokens_is_an_error() -> None:
    def lossy(read: object, total: int) -> Iterable[tuple[Region, torch.Tensor]]:
        return []

    b = bench("llama")
    with pytest.raises(KVServeError, match="lacks tokens"):
        b.run(lossy)
    assert len(b._engine.held) == 3, "the failed one is released, the references stay"


def test_a_short_text_is_refused() -> None:
    with pytest.raises(UnsupportedSpecError, match="text 'short' has 41 tokens"):
        Bench(make("llama", DType.BF16), [TokenText("short", (5,) * 41)], prompt_tokens=40)
