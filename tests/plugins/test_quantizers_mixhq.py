from __future__ import annotations

import json

import pytest
import torch

from kvserve_core.artefacts import Artefacts
from kvserve_core.errors import ArtefactError, ConfigError, FrameError, UnsupportedSpecError
from kvserve_core.spec import DType
from kvserve_core.tensor import Quantized
from kvserve_plugins.quantizers.mixhq import MixHQ
from plugins.stage_checks import (
    HEADS,
    LAYERS,
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

SCORES = [[0.1, 0.9, 0.2, 0.8], [0.7, 0.3, 0.6, 0.4], [0.5, 0.05, 0.95, 0.15]]
LOW = [(0, 0), (0, 2), (1, 1), (2, 1), (2, 3)]  # the five lowest
CLEAR = {"name": "uniform", "configuration": {"levels": 256}}
COARSE = {"name": "uniform", "configuration": {"levels": 3}}


def mixhq(**config: object) -> MixHQ:
    given = {"scores": SCORES, "low_ratio": 5 / 12, "high": CLEAR, "low": COARSE, **config}
    return MixHQ(MixHQ.Config.model_validate(given))


def errors_by_head(stage: MixHQ) -> torch.Tensor:
    x, at = values("normal", DType.BF16, 256, 64), place(256)
    bound = bind(stage, model(), at)
    return (bound.decode(bound.encode(x, at), at) - x.float()).abs().amax((2, 3))


@pytest.mark.parametrize("low", [COARSE, None, "bitplane", "identity"])
def test_conformance(low: object) -> None:
    check_head_slices(lambda: mixhq(low=low))
    check_deterministic(lambda: mixhq(low=low))
    check_config(mixhq(low=low))
    if low in (COARSE, None):
        check_quantizer(lambda: mixhq(low=low))


def test_low_heads_are_coarser_by_global_score() -> None:
    errors = errors_by_head(mixhq())
    found = {(y, h) for y in range(LAYERS) for h in range(HEADS) if errors[y, h] > 0.3}
    assert found == set(LOW)


def test_level_0_decodes_to_channel_means() -> None:
    x, at = values("normal", DType.BF16, 256, 64), place(256)
    stage = bind(mixhq(low=None), model(), at)
    q = stage.encode(x, at)
    back = stage.decode(q, at)
    for layer, head in LOW:
        expected = x[layer, head].float().mean(0).expand(256, 64)
        torch.testing.assert_close(back[layer, head], expected, rtol=2**-8, atol=0)
    assert sum(p.codes.numel() for p in q.parts) == (12 - len(LOW)) * 256 * 64


def test_exact_heads_among_lossy_ones() -> None:
    errors = errors_by_head(mixhq(high="bitplane"))
    assert {tuple(i) for i in errors.nonzero().tolist()} == set(LOW)


def test_exact_when_both_are() -> None:
    stage = mixhq(high="bitplane", low="identity")
    assert stage.caps.exact
    x, at = values("normal", DType.BF16, 17, 64), place(17)
    bound = bind(stage, model(), at)
    assert same_bits(bound.decode(bound.encode(x, at), at), x)


@pytest.mark.parametrize(("ratio", "classes"), [(0.0, {"high"}), (1.0, {"low"})])
def test_a_class_may_be_empty(ratio: float, classes: set[str]) -> None:
    x, at = values("normal", DType.BF16, 17, 64), place(17)
    stage = bind(mixhq(low_ratio=ratio), model(), at)
    q = stage.encode(x, at)
    assert {name.split(".")[0] for name in q.params} == classes
    assert len(q.parts) == 1
    assert stage.decode(q, at).isfinite().all()


def test_layers_that_agree_share_one_stream_per_class() -> None:
    x, at = values("normal", DType.BF16, 17, 64), place(17)
    same = bind(mixhq(scores=[[0.1, 0.9, 0.2, 0.8]] * 3, low_ratio=0.5), model(), at).encode(x, at)
    assert [p.alphabet for p in same.parts] == [256, 3]
    assert [p.rows for p in same.parts] == [6, 6]
    mixed = bind(mixhq(), model(), at).encode(x, at)
    assert [p.alphabet for p in mixed.parts] == [256] * 3 + [3] * 3
    assert {"high.0.lo", "high.2.scale", "low.1.lo"} <= mixed.params.keys()


def test_scores_from_an_artefact_equal_inline_scores() -> None:
    artefacts = Artefacts()
    digest = artefacts.add(json.dumps(SCORES).encode())
    stage = mixhq(scores=None, scores_artefact=digest)
    assert stage.artefacts == {digest}
    assert stage.caps.artefacts
    assert not mixhq().caps.artefacts
    x, at = values("normal", DType.BF16, 17, 64), place(17)
    bound, inline = bind(stage, model(), at, artefacts), bind(mixhq(), model(), at)
    assert same_bits(bound.decode(bound.encode(x, at), at), inline.decode(inline.encode(x, at), at))


@pytest.mark.parametrize("content", [b"{}", b"not json", b'[["a"]]', b"[[1, 2], [3]]", b"[]", b"[[NaN]]"])
def test_a_bad_artefact_is_named(content: bytes) -> None:
    artefacts = Artefacts()
    digest = artefacts.add(content)
    with pytest.raises(ArtefactError, match=digest):
        bind(mixhq(scores=None, scores_artefact=digest), model(), place(17), artefacts)


def test_a_missing_artefact_is_named() -> None:
    with pytest.raises(ArtefactError, match="'abc' is not in the loaded library"):
        bind(mixhq(scores=None, scores_artefact="abc"), model(), place(17))


@pytest.mark.parametrize("scores", [[[0.1, 0.2, 0.3, 0.4]], [[0.1, 0.2]] * 3])
def test_scores_must_cover_the_model(scores: list[list[float]]) -> None:
    with pytest.raises(UnsupportedSpecError, match="give a score for each layer and KV head"):
        bind(mixhq(scores=scores), model(), place(17))


@pytest.mark.parametrize(
    "config",
    [
        {"scores": None},
        {"scores_artefact": "abc"},
        {"scores": [[1.0], [1.0, 2.0]]},
        {"scores": [[float("nan")]]},
        {"scores": []},
        {"low_ratio": 1.5},
    ],
)
def test_configuration_is_checked(config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"scores|low_ratio"):
        mixhq(**config)


def test_mixhq_does_not_nest() -> None:
    with pytest.raises(ValueError, match="'mixhq' within 'mixhq' is not supported"):
        mixhq(high={"name": "mixhq", "configuration": {"scores": SCORES}})


def test_a_bad_inner_quantizer_is_named_by_its_path() -> None:
    with pytest.raises(ConfigError, match=r"^configuration\.low\.configuration\.levels"):
        mixhq(low={"name": "uniform", "configuration": {"levels": 0}})
    with pytest.raises(ConfigError, match=r"^configuration\.high: unknown quantizer 'unifrm'; did you mean 'uniform'"):
        mixhq(high="unifrm")


def test_capabilities_are_what_both_can_do() -> None:
    by_token = {"name": "uniform", "configuration": {"axis": "token", "levels": 300}}
    stage = mixhq(low=by_token)
    assert not stage.caps.head_local
    assert stage.caps.max_alphabet == 300
    assert not stage.caps.exact


def test_a_frame_with_too_few_streams_is_refused() -> None:
    x, at = values("normal", DType.BF16, 17, 64), place(17)
    stage = bind(mixhq(), model(), at)
    q = stage.encode(x, at)
    with pytest.raises(FrameError, match="5 streams, the classes here have 6"):
        stage.decode(Quantized(q.parts[:-1], q.params, q.shape), at)
