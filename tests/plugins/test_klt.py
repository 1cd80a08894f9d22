from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.decoder import Decoder
from kvserve_core.errors import ArtefactError, DriftError, UnsupportedSpecError
from kvserve_core.pipeline import Pipeline
from kvserve_core.plan import RAW_CHAIN_ID
from kvserve_core.profile import PipelineSpec
from kvserve_core.spec import whole
from kvserve_plugins.kernels import basis as bases
from kvserve_plugins.transforms.klt import KLT
from plugins.klt_files import OVER_ALL, PER_HEAD, Source, model, place
from plugins.stage_checks import CPU, same_bits

SOURCE = Source()
FILES = {"head": SOURCE.file(PER_HEAD), "all": SOURCE.file(OVER_ALL)}


def held(data: bytes) -> tuple[str, Artefacts]:
    artefacts = Artefacts()
    return artefacts.add(data), artefacts


def bound(per: str = "head", at: Any = None, data: bytes | None = None, **config: Any) -> KLT:
    digest, artefacts = held(data or FILES[per])
    stage = KLT(KLT.Config(basis=digest, per=per, **config))
    return stage.bind(at or place(256), model(), CPU, artefacts)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("per", ["head", "all"])
@pytest.mark.parametrize("tokens", [0, 1, 17, 256])
def test_round_trip_keeps_what_the_basis_spans(per: str, tokens: int) -> None:
    at = place(tokens)
    x = SOURCE.values(at, model())
    before, stage = x.clone(), bound(per, at)
    y, params = stage.encode(x, at)
    assert params == {}
    assert tuple(y.shape) == stage.shape(tuple(x.shape)) == (1, 1, tokens, 3 * SOURCE.rank)
    assert y.dtype == torch.float32
    back = stage.decode(y, params, at)
    assert (back.shape, back.dtype) == (x.shape, torch.float32)
    assert same_bits(x, before)
    if tokens:
        assert relative(back, x) < 4e-3  # rounding of the values to bf16, and of the basis to f16


def test_components_have_the_calibrated_size_and_no_mean() -> None:
    at = place(256)
    y, _ = bound("all", at, cutoff=0.0).encode(SOURCE.values(at, model()), at)
    found = y[0, 0].std(0)
    expected = SOURCE.sigma().repeat_interleave(3)
    torch.testing.assert_close(found, expected, rtol=0.2, atol=0.02)
    assert float(y.mean((0, 1, 2)).abs().max()) < 1.0


def test_the_scale_is_folded_into_the_components() -> None:
    at = place(64)
    x = SOURCE.values(at, model())
    plain, _ = bound(at=at).encode(x, at)
    data = SOURCE.file(PER_HEAD, scale=10.0)
    stage = bound(at=at, data=data)
    y, _ = stage.encode(x, at)
    torch.testing.assert_close(y, 10 * plain, rtol=1e-4, atol=1e-3)
    assert relative(stage.decode(y, {}, at), x) < 4e-3


def test_positions_do_not_matter() -> None:
    near, far = place(32), place(32, start=1_000_000)
    a = bound().encode(SOURCE.values(near, model()), near)[0]
    b = bound().encode(SOURCE.values(far, model()), far)[0]
    torch.testing.assert_close(a, b, atol=0.1, rtol=0)  # values were rounded to bf16 at other angles


@pytest.mark.parametrize(("cut", "kept"), [({"cutoff": 0.9}, 3), ({"cutoff": 99.0}, 1), ({"rank": 2}, 2), ({}, 6)])
def test_cutoff_and_rank_choose_the_components(cut: dict[str, Any], kept: int) -> None:
    at = place(64)
    x = SOURCE.values(at, model())
    stage, whole_ = bound(at=at, **cut), bound(at=at)
    y, _ = stage.encode(x, at)
    assert y.shape[-1] == 3 * kept
    full = whole_.encode(x, at)[0].unflatten(-1, (3, 6))
    torch.testing.assert_close(y.unflatten(-1, (3, kept)), full[..., :kept])


def test_heads_and_their_slices_agree_bit_for_bit() -> None:
    at = place(256)
    x = SOURCE.values(at, model())
    y = bound(at=at).encode(x, at)[0].unflatten(-1, (3, -1))
    for heads in ((0,), (2,), (0, 2), (1, 2)):
        part = place(256, heads=heads)
        stage = bound(at=part)
        assert stage.caps.head_local
        z = stage.encode(x[:, list(heads)], part)[0]
        assert same_bits(z.unflatten(-1, (len(heads), -1)), y[..., list(heads), :])


def test_a_view_gives_the_same_bits() -> None:
    at = place(33)
    x = SOURCE.values(at, model())
    view = x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    assert same_bits(bound(at=at).encode(view, at)[0], bound(at=at).encode(x, at)[0])


def test_capabilities_follow_the_configuration() -> None:
    config = KLT.Config(basis="0" * 64, per="all")
    assert KLT(config).caps.head_local is False
    assert KLT(KLT.Config(basis="0" * 64)).caps.head_local is True
    assert KLT(config).artefacts == {"0" * 64}
    assert KLT.caps.artefacts
    assert not KLT.caps.layer_local
    assert KLT.Config.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("at", "config", "message"),
    [
        (place(9, layers=(1, 2)), {}, r"no block of layers \[1, 2\].*layers 0-1 2-3"),
        (place(9, layers=(0,)), {}, r"no block of layers \[0\]"),
        (place(9), {"per": "all"}, "per 'head', not per 'all'"),
        (place(9), {"rank": 7}, "rank 7 of a basis with 6 components"),
    ],
)
def test_places_that_were_not_calibrated_are_refused(at: Any, config: dict[str, Any], message: str) -> None:
    digest, artefacts = held(FILES["head"])
    with pytest.raises(UnsupportedSpecError, match=message):
        KLT(KLT.Config(basis=digest, **config)).bind(at, model(), CPU, artefacts)


def test_another_plane_is_refused() -> None:
    digest, artefacts = held(FILES["head"])
    at = type(place(1))(0, "v", (0, 1), (0,), 0, 1)
    with pytest.raises(UnsupportedSpecError, match="for plane 'kv' of 32 channels, not for 'v' of 16"):
        KLT(KLT.Config(basis=digest)).bind(at, model(), CPU, artefacts)


def test_a_model_whose_positions_are_unknown_is_refused() -> None:
    digest, artefacts = held(FILES["head"])
    with pytest.raises(UnsupportedSpecError, match=r"positions undone in parts \(True, False\)"):
        KLT(KLT.Config(basis=digest)).bind(place(1), model(None), CPU, artefacts)
    KLT(KLT.Config(basis=digest, undo_rope=False)).bind(place(1), model(None), CPU, artefacts)


def test_behind_derope_positions_stay() -> None:
    at, spec = place(64), model(None)
    x = SOURCE.values(at, spec)
    digest, artefacts = held(FILES["head"])
    stage = KLT(KLT.Config(basis=digest, undo_rope=False)).bind(at, spec, CPU, artefacts)
    assert relative(stage.decode(stage.encode(x, at)[0], {}, at), x) < 4e-3


@pytest.mark.parametrize(
    "data", [b"", b"\x08\0\0\0\0\0\0\0{}      ", FILES["head"][:-5], FILES["head"].replace(b'"plane', b'"plain')]
)
def test_what_is_not_a_basis_is_refused(data: bytes) -> None:
    with pytest.raises(ArtefactError, match="not a basis"):
        bases.parse(data)


def changed(about: dict[str, Any], **tensors: Any) -> bytes:
    """The file per head with other fields of its description, and of block 0 other tensors."""
    given = FILES["head"]
    size = int.from_bytes(given[:8], "little")
    said = json.loads(json.loads(given[8 : 8 + size])["__metadata__"]["kvserve.klt"])
    return save(load(given) | {f"0.{k}": v for k, v in tensors.items()}, {"kvserve.klt": json.dumps(said | about)})


BLOCK = {"layers": [0], "heads": [0], "rope": [True, False]}
FIRST = {name.removeprefix("0."): x for name, x in load(FILES["head"]).items() if name.startswith("0.")}
N, R = FIRST["basis"].shape
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"version": True}, "of version True"),
        ({"plane": 5}, "'plane' is 5"),
        ({"dim": 32.0}, "'dim' 32.0"),
        ({"per": "x"}, "'per' is 'x'"),
        ({"blocks": []}, "at least one block"),
        ({"blocks": [BLOCK | {"layers": "a"}]}, "'layers' of a block is 'a'"),
        ({"blocks": [BLOCK | {"heads": [{}]}]}, "'heads' of a block"),
        ({"blocks": [BLOCK | {"rope": [1]}]}, "'rope' of a block"),
    ],
)
def test_a_description_that_no_calibration_writes(about: dict[str, Any], said: str) -> None:
    with pytest.raises(ArtefactError, match=said):
        bases.parse(changed(about))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"basis": torch.full((N, R), NAN).half()}, "basis' holds values that are not finite"),
        ({"basis": torch.zeros(N, R).half()}, "not orthonormal"),
        ({"basis": (FIRST["basis"] * 1.1)}, "not orthonormal"),
        ({"basis": FIRST["basis"][:, :1].repeat(1, R)}, "not orthonormal"),
        ({"basis": torch.eye(N, R).int()}, "expected floating point"),
        ({"mean": torch.full((N,), INF)}, "mean' holds values that are not finite"),
        ({"scale": torch.full((N,), INF)}, "scale' holds values that are not finite"),
        ({"scale": torch.full((N,), 1e-44)}, "scale' holds values that are not above 0"),
        ({"sigma": torch.full((R,), NAN)}, "sigma' holds values that are not finite"),
        ({"sigma": torch.arange(R).float()}, "sigma' must fall"),
        ({"sigma": -torch.ones(R)}, "sigma' must fall"),
        ({"sigma": torch.ones(R, 1)}, "expected one axis"),
        ({"sigma": torch.tensor(1.0)}, "expected one axis"),
        ({"sigma": torch.ones(N + 1)}, "expected one axis"),
        ({"sigma": torch.ones(0)}, "expected one axis"),
        ({"tail": torch.tensor([-1.0])}, "tail' holds values that are no energies"),
        ({"held": torch.full((R + 1,), NAN)}, "held' holds values that are no energies"),
    ],
)
def test_tensors_that_no_calibration_writes(tensors: dict[str, Any], said: str) -> None:
    with pytest.raises(ArtefactError, match=said):
        bases.parse(changed({}, **tensors))


def test_a_header_that_is_nested_too_deep() -> None:
    header = b'{"__metadata__":' + b"[" * 100_000
    with pytest.raises(ArtefactError, match="nested too deep"):
        bases.parse(len(header).to_bytes(8, "little") + header)


def test_a_newer_file_and_a_missing_one_are_refused() -> None:
    with pytest.raises(ArtefactError, match="of version 2, this kvserve reads 1"):
        bases.parse(FILES["head"].replace(b'version\\": 1', b'version\\": 2'))
    with pytest.raises(ArtefactError, match="is not in the loaded library"):
        KLT(KLT.Config(basis="0" * 64)).bind(place(1), model(), CPU, NONE)


def test_a_basis_is_read_once() -> None:
    digest, artefacts = held(FILES["head"])
    a, b = (KLT(KLT.Config(basis=digest)).bind(place(1), model(), CPU, artefacts) for _ in range(2))
    assert a.bases[0] is b.bases[0]


def shuffled(x: Tensor) -> Tensor:
    return x[..., torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(1))]


STRANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x.dtype),
    "shuffled channels": shuffled,
    "swapped layers": lambda x: x.flip(0),
    "another head": lambda x: x.roll(1, 1),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_strange_values_escape(kind: str) -> None:
    at = place(64)
    x = STRANGE[kind](SOURCE.values(at, model()))
    with pytest.raises(DriftError, match=r"tokens 512-576: the energy outside .* the limit is 2"):
        bound(at=at).encode(x, at)
    assert bound(at=at, drift_limit=None).encode(x, at)[0].isfinite().all()


def test_a_basis_that_gains_energy_drifts_as_one_that_loses_it() -> None:
    at = place(64)
    longer = changed({}, basis=(FIRST["basis"].float() * 1.008).half())
    with pytest.raises(DriftError, match="the limit is 2"):
        bound(at=at, data=longer).encode(SOURCE.values(at, model()), at)


@pytest.mark.parametrize("cut", [{}, {"rank": 3}])
def test_the_limit_is_relative_to_what_held_out_texts_miss(cut: dict[str, Any]) -> None:
    at = place(64)
    x = SOURCE.values(at, model())
    energy = float(SOURCE.sigma().square().sum())
    generous, none = (SOURCE.file(PER_HEAD, held=part * energy) for part in (1.0, 0.0))
    assert bound(at=at, data=none, **cut).encode(x, at)[0].isfinite().all()
    strange = shuffled(x)
    with pytest.raises(DriftError, match="times that of held-out texts"):
        bound(at=at, data=none, **cut).encode(strange, at)
    assert bound(at=at, data=generous, drift_limit=40.0, **cut).encode(strange, at)[0].isfinite().all()
    with pytest.raises(DriftError):
        bound(at=at, data=none, drift_limit=40.0, **cut).encode(strange, at)


def test_a_curve_of_another_length_is_refused() -> None:
    with pytest.raises(ArtefactError, match=r"'0\.held' has another shape"):
        bases.parse(_with_short_curve())


def _with_short_curve() -> bytes:
    data = SOURCE.file(PER_HEAD, held=0.0)
    about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    tensors = load(data)
    tensors["0.held"] = tensors["0.held"][1:].clone()
    return save(tensors, about)


def test_other_values_of_the_same_kind_do_not_escape() -> None:
    for seed in range(5):
        at = place(8)
        assert bound(at=at).encode(SOURCE.values(at, model(), seed), at)[0].isfinite().all()


def test_products_that_are_not_exact_are_done_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    at = place(64)
    x = SOURCE.values(at, model())
    exact = bound(at=at).encode(x, at)[0]
    monkeypatch.setattr("kvserve_plugins.transforms.klt.gemm_is_exact", lambda: False)
    stage = bound(at=at)
    y, _ = stage.encode(x, at)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, exact, atol=1e-4, rtol=1e-4)
    assert stage.decode(y, {}, at).dtype == torch.float32


def chain(digest: str, per: str) -> PipelineSpec:
    klt = {"name": "klt", "configuration": {"basis": digest, "per": per}}
    uniform = {"name": "uniform", "configuration": {"levels": 64, "axis": "channel"}}
    made = {"transforms": [klt], "quantizer": uniform, "codec": "zstd"}
    return PipelineSpec(planes={"kv": made}, layer_block=2, sink_tokens=1)


@pytest.mark.parametrize(("per", "segments"), [("head", 6), ("all", 2)])
def test_through_a_pipeline_one_strange_cell_goes_raw(per: str, segments: int) -> None:
    digest, artefacts = held(FILES[per])
    kv = model()
    pipeline = Pipeline.build(chain(digest, per), kv, whole(kv), artefacts=artefacts)
    assert pipeline.used_artefacts == {digest}
    header, planned = pipeline.header("t", 512, "p")
    data = {p.at: SOURCE.values(p.at, kv) for p in planned}
    strange = next(p.at for p in planned if p.at.start == 256)
    data[strange] = shuffled(data[strange])
    sent = pipeline.encode([(p, data[p.at]) for p in planned])
    escaped = [s.at for s, p in zip(sent, planned, strict=True) if s.chain != p.chain]
    assert escaped == [strange]
    assert sum(s.at.start == 256 for s in sent) == segments
    for at, x in Decoder(header, kv, artefacts=artefacts).decode(sent):
        assert relative(x, data[at]) < 0.05
        if at == strange or at.stop == 1:
            assert same_bits(x, data[at])
    assert {s.chain for s in sent if s.at.stop == 1} == {RAW_CHAIN_ID}


def test_a_flag_of_a_transform_on_a_device_sends_the_segment_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    digest, artefacts = held(FILES["head"])
    kv = model()
    pipeline = Pipeline.build(chain(digest, "head"), kv, whole(kv), artefacts=artefacts)

    def flag(self: KLT, drift: list[Tensor], at: Any) -> None:
        self.ok = torch.stack(drift).amax() <= 2

    monkeypatch.setattr(KLT, "_guard", flag)
    _, planned = pipeline.header("t", 256, "p")
    data = [(p, SOURCE.values(p.at, kv)) for p in planned if p.at.start]
    assert all(s.chain != RAW_CHAIN_ID for s in pipeline.encode(data))
    assert all(s.chain == RAW_CHAIN_ID for s in pipeline.encode([(p, shuffled(x)) for p, x in data]))


def test_a_block_cut_by_a_raw_layer_is_refused() -> None:
    digest, artefacts = held(FILES["head"])
    kv = model()
    spec = chain(digest, "head").model_copy(update={"raw_layers": (0,)})
    with pytest.raises(UnsupportedSpecError, match=r"planes\.kv\.transforms\.0.*no block of layers \[1\]"):
        Pipeline.build(spec, kv, whole(kv), artefacts=artefacts)


def test_without_a_calibrated_tail_nothing_escapes() -> None:
    at = place(64)
    x = shuffled(SOURCE.values(at, model()))
    data = SOURCE.file(PER_HEAD, tail=math.inf)
    assert bound(at=at, data=data).encode(x, at)[0].isfinite().all()
