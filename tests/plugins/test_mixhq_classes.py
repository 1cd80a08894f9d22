"""``mixhq`` by layer and by token; by head is in test_quantizers_mixhq.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.errors import FrameError, UnsupportedSpecError
from kvserve_core.spec import DType, Region
from kvserve_core.tensor import Quantized
from kvserve_plugins.kernels.ranking import last_layers, low_count, low_layers
from kvserve_plugins.kernels.token_classes import as_bits, from_bits, largest, order
from kvserve_plugins.quantizers.mixhq import MixHQ
from plugins.stage_checks import (
    bind,
    check_config,
    check_deterministic,
    check_head_slices,
    check_quantizer,
    model,
    place,
    same_bits,
    values,
)

CLEAR = {"name": "uniform", "configuration": {"levels": 256, "axis": "token_head"}}
COARSE = {"name": "uniform", "configuration": {"levels": 3, "axis": "token_head"}}
TOKEN_SCORES = ("position", "low_norm", "high_norm")


def mixhq(granularity: str, **config: object) -> MixHQ:
    given = {"granularity": granularity, "low_ratio": 0.5, "high": CLEAR, "low": COARSE, **config}
    return MixHQ(MixHQ.Config.model_validate(given))


def coarse(stage: MixHQ, x: Tensor, at: Region) -> Tensor:
    """``[L, H, T]``: where the error is that of the coarse quantizer."""
    bound = bind(stage, model(), at)
    return (bound.decode(bound.encode(x, at), at) - x.float()).abs().amax(-1) > 0.3


@pytest.mark.parametrize("low", [COARSE, None, "identity"])
@pytest.mark.parametrize("score", TOKEN_SCORES)
def test_conformance_by_token(score: str, low: object) -> None:
    def make() -> MixHQ:
        return mixhq("token", token_score=score, low=low, precise_tokens=600)

    check_head_slices(make)
    check_deterministic(make)
    check_config(make())
    if low != "identity":  # it takes the plane's own dtype only, not the f32 of a transform
        check_quantizer(make)


@pytest.mark.parametrize("scores", [None, [[1.0], [3.0], [2.0]], [[1, 1, 1, 1], [3, 3, 3, 3], [2, 2, 2, 2]]])
def test_conformance_by_layer(scores: object) -> None:
    check_head_slices(lambda: mixhq("layer", scores=scores))
    check_deterministic(lambda: mixhq("layer", scores=scores))
    check_config(mixhq("layer", scores=scores))
    check_quantizer(lambda: mixhq("layer", scores=scores))


def test_layers_of_low_score_are_coarse() -> None:
    x, at = values("normal", DType.BF16, 64, 64), place(64)
    by_score = coarse(mixhq("layer", scores=[[3.0], [1.0], [2.0]], low_ratio=0.34), x, at)
    assert [bool(row.any()) for row in by_score] == [False, True, False]
    assert by_score[1].all(-1).all()


def test_without_scores_the_last_layers_are_coarse() -> None:
    x, at = values("normal", DType.BF16, 64, 64), place(64)
    assert [bool(row.any()) for row in coarse(mixhq("layer", low_ratio=0.33), x, at)] == [False, False, True]
    assert [bool(row.any()) for row in coarse(mixhq("layer", low_ratio=0.6), x, at)] == [False, True, True]


def test_layer_scores_may_be_an_artefact() -> None:
    artefacts = Artefacts()
    digest = artefacts.add(b"[[3.0], [1.0], [2.0]]")
    x, at = values("normal", DType.BF16, 17, 64), place(17)
    bound = bind(mixhq("layer", scores_artefact=digest), model(), at, artefacts)
    inline = bind(mixhq("layer", scores=[[3.0], [1.0], [2.0]]), model(), at)
    assert same_bits(bound.decode(bound.encode(x, at), at), inline.decode(inline.encode(x, at), at))


def test_the_first_tokens_of_the_prompt_are_precise() -> None:
    x = values("normal", DType.BF16, 17, 64)
    at = replace(place(17), start=56, stop=73)
    found = coarse(mixhq("token", token_score="position", precise_tokens=64), x, at)
    assert not found[:, :, :8].any()
    assert found[:, :, 8:].all()
    later = replace(at, start=1000, stop=1017)
    assert coarse(mixhq("token", token_score="position", precise_tokens=64), x, later).all()


@pytest.mark.parametrize(("score", "precise_first"), [("low_norm", False), ("high_norm", True)])
def test_tokens_are_ranked_by_norm_in_each_head(score: str, precise_first: bool) -> None:
    x, at = values("normal", DType.BF16, 64, 64), place(64)
    x = torch.nn.functional.normalize(x.float(), dim=-1) * 8
    sizes = torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(i)) for i in range(12)])
    x = (x * (1 + sizes.view(3, 4, 64, 1) / 64)).bfloat16()
    stage = bind(mixhq("token", token_score=score, low_ratio=0.25), model(), at)
    q = stage.encode(x, at)
    low = from_bits(q.params["low_tokens"], 64)
    expected = sizes.view(3, 4, 64) < 16 if precise_first else sizes.view(3, 4, 64) >= 48
    assert torch.equal(low, expected)
    assert torch.equal((stage.decode(q, at) - x.float()).abs().amax(-1) > 0.3, low)


def test_streams_by_token() -> None:
    x, at = values("normal", DType.BF16, 17, 64), place(17)
    q = bind(mixhq("token"), model(), at).encode(x, at)
    assert [p.alphabet for p in q.parts] == [256, 3]
    assert [p.codes.numel() for p in q.parts] == [12 * 8 * 64, 12 * 9 * 64]  # half of 17, half up, is low
    assert q.params.keys() == {"low_tokens", "high.lo", "high.scale", "low.lo", "low.scale"}
    assert q.params["low_tokens"].shape == (3, 4, 3)


def test_any_bits_from_a_peer_give_a_tensor_or_a_frame_error() -> None:
    x, at = values("normal", DType.BF16, 17, 64), place(17)
    stage = bind(mixhq("token"), model(), at)
    q = stage.encode(x, at)
    for fill in (0, 255, 0xA5):
        bits = torch.full_like(q.params["low_tokens"], fill)
        assert stage.decode(Quantized(q.parts, {**q.params, "low_tokens": bits}, q.shape), at).shape == x.shape
    for bits in (q.params["low_tokens"][:, :, :2], q.params["low_tokens"].to(torch.int32)):
        with pytest.raises(FrameError, match="'low_tokens'"):
            stage.decode(Quantized(q.parts, {**q.params, "low_tokens": bits}, q.shape), at)
    with pytest.raises(FrameError, match="1 streams"):
        stage.decode(Quantized(q.parts[:1], q.params, q.shape), at)


def test_groups_of_tokens_cannot_serve_classes_of_tokens() -> None:
    with pytest.raises(UnsupportedSpecError, match="groups of 32"):
        mixhq("token", high="kivi")
    assert mixhq("layer", high="kivi").caps.token_multiple == 32


@pytest.mark.parametrize(
    ("granularity", "config"),
    [("token", {"scores": [[1.0]]}), ("token", {"scores_artefact": "abc"}), ("head", {}), ("row", {})],
)
def test_the_source_of_scores_is_checked(granularity: str, config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"scores|granularity"):
        mixhq(granularity, **config)


@pytest.mark.parametrize("scores", [[[1.0], [2.0]], [[1.0, 2.0]] * 3])
def test_layer_scores_must_cover_the_model(scores: list[list[float]]) -> None:
    with pytest.raises(UnsupportedSpecError, match="give a score for each layer"):
        bind(mixhq("layer", scores=scores), model(), place(17))


@pytest.mark.parametrize("tokens", [0, 1, 8, 17, 256])
def test_marks_as_bits(tokens: int) -> None:
    marks = torch.randint(0, 2, (3, 4, tokens), generator=torch.Generator().manual_seed(0)).bool()
    bits = as_bits(marks)
    assert bits.dtype == torch.uint8
    assert bits.shape == (3, 4, -(-tokens // 8))
    assert torch.equal(from_bits(bits, tokens), marks)


def test_marks_and_orders() -> None:
    marks = largest(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 2)
    assert marks.tolist() == [[False, True, True, False]]
    assert largest(torch.tensor([[1.0, 1.0, 1.0]]), 1).tolist() == [[False, False, True]]
    assert order(marks).tolist() == [[0, 3, 1, 2]]


def test_ranking_of_layers() -> None:
    assert low_layers(((1.0, 3.0), (1.0, 1.0), (0.0, 5.0)), 0.34).tolist() == [False, True, False]
    assert last_layers(28, 0.33).tolist() == [False] * 19 + [True] * 9
    assert low_count(0.145, 100) == 15
