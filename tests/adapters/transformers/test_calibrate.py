"""Calibration of bases on tiny random models: statistics, files, resuming, the command."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.cli import main
from kvserve_core.errors import ArtefactError, ConfigError, UnsupportedSpecError
from kvserve_core.evaluation.bench import Bench
from kvserve_core.evaluation.engine import TokenText
from kvserve_core.pipeline import Pipeline
from kvserve_core.plan import RAW_CHAIN_ID
from kvserve_core.profile import PipelineSpec
from kvserve_core.spec import DType, whole
from kvserve_hf.calibrate import klt
from kvserve_hf.calibrate.basis import Statistics, components, equal_parts
from kvserve_hf.calibrate.blocks import blocks, derope
from kvserve_hf.calibrate.fisher import squared_gradients
from kvserve_hf.calibrate.held import cells, outside
from kvserve_hf.calibrate.klt import calibrate_klt
from kvserve_hf.calibrate.moments import Moments
from kvserve_hf.calibrate.request import KLTOptions, Request
from kvserve_hf.calibrate.weights import from_weights
from kvserve_hf.engine import Engine
from kvserve_hf.roundtrip import FrameRoundtrip
from kvserve_hf.texts import LoadedText, PinnedText, calibration_texts, load_text, pinned_texts, read_pins
from tiny_models import VOCAB, make

PROMPT, REST = 48, 16


def text(i: int) -> LoadedText:
    pin = PinnedText(f"t{i}", "prose", "tiny", "1", "t", 0, 64, "", "0" * 64)
    draw = torch.Generator().manual_seed(i)
    return LoadedText(pin, "".join(map(chr, torch.randint(3, VOCAB, (64,), generator=draw).tolist())), True)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(klt, "PROMPT_TOKENS", PROMPT)
    monkeypatch.setattr(klt, "CONTINUATION_TOKENS", REST)
    monkeypatch.setattr(klt, "tokens", lambda texts, _: [TokenText(t.pin.name, tuple(map(ord, t.text))) for t in texts])


def request(engine: Engine, folder: Path, texts: int = 6, **options: Any) -> Request:
    given = KLTOptions(**{"layer_block": 2, "sink_tokens": 1, "cutoff": 0.0} | options)
    loaded = [text(i) for i in range(texts)]
    return Request(engine, loaded, folder / "b.safetensors", folder / "work", lambda *_: None, given)


def chain(digest: str, per: str, **config: Any) -> PipelineSpec:
    transform = {"name": "klt", "configuration": {"basis": digest, "per": per} | config}
    quantizer = {"name": "uniform", "configuration": {"levels": 256, "axis": "channel"}}
    made = {"transforms": [transform], "quantizer": quantizer, "codec": "zstd"}
    return PipelineSpec.model_validate({"planes": {"kv": made}, "layer_block": 2, "sink_tokens": 1})


def metadata(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return dict(json.loads(file.metadata()["kvserve.klt"])["provenance"])


@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize("per", ["head", "all"])
def test_a_basis_carries_the_cache_it_was_calibrated_on(name: str, per: str, tmp_path: Path) -> None:
    engine = make(name, DType.BF16)
    made = calibrate_klt(request(engine, tmp_path, per=per))
    data = (tmp_path / "b.safetensors").read_bytes()
    artefacts = Artefacts()
    assert made["blake3"] == artefacts.add(data)
    assert made["components"] == made["of"] == 3 * 2 * 32
    assert not (tmp_path / "work").exists()
    pipeline = Pipeline.build(chain(made["blake3"], per), engine.spec, whole(engine.spec), artefacts=artefacts)
    ids = tuple(map(ord, text(0).text))
    bench = Bench(engine, [TokenText("t", ids)], PROMPT)
    quality = bench.run(FrameRoundtrip(pipeline, artefacts))
    assert quality.kl.mean < 0.01
    assert quality.top1.mean > 0.9
    planned = pipeline.header("t", PROMPT, "p")[1]
    sent = pipeline.encode([(p, engine.gather(bench.keys[0], p.at)) for p in planned])
    assert any(s.chain != RAW_CHAIN_ID for s in sent)


def test_the_file_says_where_it_is_from(tmp_path: Path) -> None:
    engine = make("llama", DType.BF16)
    calibrate_klt(request(engine, tmp_path, cutoff=0.3, rank=20))
    about = metadata(tmp_path / "b.safetensors")
    assert about["fingerprint"] == engine.spec.fingerprint
    assert about["options"] == {
        "per": "head",
        "layer_block": 2,
        "plane": "kv",
        "metric": "fisher",
        "from_weights": False,
        "sink_tokens": 1,
        "cutoff": 0.3,
        "rank": 20,
    }
    assert [t["name"] for t in about["texts"]] == [f"t{i}" for i in range(6)]
    assert about["tokens"] == 6 * (PROMPT - 1)
    assert about["unit"] > 0
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        sigma, basis = file.get_tensor("0.sigma"), file.get_tensor("0.basis")
    assert len(sigma) <= 20
    assert (sigma >= 0.3).all()
    assert (sigma.diff() <= 0).all()
    assert (basis.shape, basis.dtype) == ((64, len(sigma)), torch.float16)


class Stop(Exception):
    pass


def test_a_run_that_was_stopped_goes_on_and_gives_the_same_file(tmp_path: Path) -> None:
    engine = make("llama", DType.BF16)
    straight = calibrate_klt(request(engine, tmp_path / "a", texts=4))

    def stop(what: str, done: int, of: int) -> None:
        if done == 2:
            raise Stop

    with pytest.raises(Stop):
        calibrate_klt(replace(request(engine, tmp_path / "b", texts=4), progress=stop))
    assert not (tmp_path / "b" / "b.safetensors").exists()
    prefilled: list[str] = []
    prefill = engine.prefill
    engine.prefill = lambda key, ids: prefilled.append(key) or prefill(key, ids)  # type: ignore[method-assign]  # counts
    resumed = calibrate_klt(request(engine, tmp_path / "b", texts=4))
    assert len(prefilled) == 2 + 4  # the texts that were left, and each once more under the basis of the others
    assert metadata(tmp_path / "a" / "b.safetensors") == metadata(tmp_path / "b" / "b.safetensors")
    assert resumed["blake3"] == straight["blake3"]


def test_another_runs_folder_is_refused(tmp_path: Path) -> None:
    engine = make("llama", DType.BF16)

    def stop(*_: Any) -> None:
        raise Stop

    with pytest.raises(Stop):
        calibrate_klt(replace(request(engine, tmp_path), progress=stop))
    with pytest.raises(ArtefactError, match="holds a calibration of another model, other texts or options"):
        calibrate_klt(request(engine, tmp_path, texts=5))
    with pytest.raises(Stop):
        calibrate_klt(replace(request(engine, tmp_path, cutoff=0.5), progress=stop))


def tensors(path: Path) -> dict[str, Tensor]:
    return load_file(path)


def test_held_out_texts_say_what_a_basis_misses(tmp_path: Path) -> None:
    engine = make("llama", DType.BF16)
    calibrate_klt(request(engine, tmp_path, cutoff=0.3))
    found, path = tensors(tmp_path / "b.safetensors"), tmp_path / "b.safetensors"
    assert metadata(path)["held_out"] == {"folds": 5, "quantile": 0.95, "sink_tokens": 1}
    for i in range(4):
        held, sigma, tail = (found[f"{i}.{name}"] for name in ("held", "sigma", "tail"))
        assert len(held) == len(sigma) + 1
        assert (held.diff() < 0).all()
        inside = sigma.square().flip(0).cumsum(0).flip(0)
        assert (held > tail + torch.cat((inside, torch.zeros(1)))).all()


def test_held_out_energies_leave_the_same_tokens_out_as_the_sums(tmp_path: Path) -> None:
    engine, found = make("llama", DType.BF16), []
    for sinks in (1, PROMPT // 2):
        calibrate_klt(request(engine, tmp_path / str(sinks), sink_tokens=sinks))
        assert metadata(tmp_path / str(sinks) / "b.safetensors")["held_out"]["sink_tokens"] == sinks
        found.append(tensors(tmp_path / str(sinks) / "b.safetensors")["0.held"])
    assert not torch.equal(*found)


def test_one_text_holds_nothing_out(tmp_path: Path) -> None:
    calibrate_klt(request(make("llama", DType.BF16), tmp_path, texts=1))
    assert not [name for name in tensors(tmp_path / "b.safetensors") if name.endswith("held")]
    assert "held_out" not in metadata(tmp_path / "b.safetensors")


def test_cells_are_those_of_the_planner() -> None:
    assert cells(1, 600) == [(1, 256), (256, 512), (512, 600)]
    assert cells(1, 48) == [(1, 48)]
    assert cells(0, 512) == [(0, 256), (256, 512)]


def test_the_energy_outside_falls_to_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    rows, mean = torch.randn(40, 6, generator=draw, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    columns = torch.linalg.qr(torch.randn(6, 6, generator=draw, dtype=torch.float64))[0]
    scale = torch.arange(1.0, 7.0, dtype=torch.float64)
    found, folded = outside(rows, mean, scale, columns), (rows - mean) * scale
    assert (found.shape, float(found[6])) == ((7,), 0.0)
    for k in range(6):
        rest = folded - folded @ columns[:, :k] @ columns[:, :k].T
        assert float(found[k]) == pytest.approx(float(rest.square().sum(1).mean()), rel=1e-6)


def test_moments_are_those_of_all_rows_together() -> None:
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)) + 3
    moments = Moments(7)
    moments.add(x[:20])
    moments.add(x[20:])
    torch.testing.assert_close(moments.mean, x.double().mean(0))
    torch.testing.assert_close(moments.covariance(), torch.cov(x.double().T, correction=0))
    part = Moments(7)
    part.add(x[:20])
    rest = moments.without(part)
    torch.testing.assert_close(rest.covariance(), torch.cov(x[20:].double().T, correction=0))


def test_components_diagonalise_the_folded_covariance() -> None:
    engine = make("llama", DType.BF16)
    block = blocks(engine.spec, "kv", 2, "all")[0]
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(300, block.size, generator=draw, dtype=torch.float64)
    metric = torch.rand(block.size, generator=draw, dtype=torch.float64) + 0.1
    s = Statistics(block, torch.zeros(block.size), rows.T @ rows / 300, metric)
    c = components(s, 2.0, 0.8, None)
    folded = (metric / 2).sqrt()[:, None] * s.covariance * (metric / 2).sqrt()
    torch.testing.assert_close(c.columns.T @ folded @ c.columns, c.sigma.square().diag())
    assert float(c.sigma.min()) >= 0.8
    assert len(c.sigma) < block.size
    torch.testing.assert_close(float(c.sigma.square().sum()) + c.tail, float(folded.trace()))


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_the_metric_predicts_what_an_error_costs(name: str) -> None:
    """The KL of a small random error in one channel is half its square times the metric, tokens added up."""
    engine = make(name, DType.F32)
    ids = torch.randint(3, VOCAB, (64,), generator=torch.Generator().manual_seed(4)).tolist()
    engine.prefill("t", ids[:PROMPT])
    total = sum_over_seeds(engine, ids[PROMPT:])
    reference = torch.log_softmax(engine.teacher_forced("t", ids[PROMPT:]).double(), -1)
    for layer, plane, channel in ((0, "v", 3), (1, "k", 5), (2, "v", 7)):
        expected = 0.5 * 1e-4 * float(total[layer, plane][0, channel])
        found = mean_kl(engine, ids, reference, layer, plane, channel, 1e-2)
        assert 0.4 < found / expected < 2.5, (layer, plane, channel)


def sum_over_seeds(engine: Engine, rest: list[int]) -> dict[tuple[int, str], Tensor]:
    """The metric times the number of tokens that count, from several draws of the labels."""
    total: dict[tuple[int, str], Tensor] = {}
    for seed in range(40):
        for key, x in squared_gradients(engine, "t", PROMPT, rest, 0, seed).items():
            group = next(g for g in engine.spec.groups if key[0] in g.layers)
            count = min(PROMPT, group.window - 1) if group.window else PROMPT
            total[key] = total.get(key, torch.zeros_like(x)) + x * count / 40
    return total


def mean_kl(
    engine: Engine, ids: list[int], reference: Tensor, layer: int, plane: str, channel: int, size: float
) -> float:
    """Mean KL a fed token, over random signs of an error in one channel (before positions) of head 0, all tokens."""
    block = next(b for b in blocks(engine.spec, plane, 1, "head") if b.layers == (layer,) and b.heads == (0,))
    at = block.region(0, PROMPT)
    stage = derope(engine.spec, at)
    held, found = engine.gather("t", at), []
    for seed in range(24):
        plain = stage.encode(held, at)[0] if stage is not None else held.clone()
        signs = torch.randint(0, 2, (PROMPT,), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
        plain[0, 0, :, channel] += size * signs
        engine.scatter("t", at, stage.decode(plain, {}, at) if stage is not None else plain)
        test = torch.log_softmax(engine.teacher_forced("t", ids[PROMPT:]).double(), -1)
        found.append(float((reference.exp() * (reference - test)).sum(-1).mean()))
    engine.scatter("t", at, held)
    return sum(found) / len(found)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_weights_alone_give_directions_that_the_cache_follows(name: str, tmp_path: Path) -> None:
    engine = make(name, DType.BF16)
    made = calibrate_klt(request(engine, tmp_path, from_weights=True, texts=0))
    about = metadata(tmp_path / "b.safetensors")
    assert (about["from_weights"], about["texts"], made["of"]) == (True, [], 192)
    cut = blocks(engine.spec, "kv", 2, "all")
    for s in from_weights(engine, cut):
        torch.testing.assert_close(s.metric, equal_parts(s.block, s.covariance.diagonal()))
        folded = s.metric.sqrt()[:, None] * s.covariance * s.metric.sqrt()
        assert float(folded.diagonal().mean()) == pytest.approx(1.0)
        assert torch.linalg.eigvalsh(folded).min() > -1e-9
        half = s.block.size // len(s.block.layers)
        assert len(s.block.layers) == 1 or float(folded[:half, half:].abs().max()) > 0.05
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.get_tensor("0.tail").tolist() == [math.inf]


def test_predicted_variances_match_the_cache_of_random_inputs() -> None:
    engine = make("llama", DType.F32)
    (block, *_) = blocks(engine.spec, "v", 1, "all")
    (s, *_) = from_weights(engine, [block])
    layer = engine.model.model.layers[0]
    x = torch.randn(4000, 48, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        v = layer.self_attn.v_proj(layer.input_layernorm(x))
    torch.testing.assert_close(s.covariance.diagonal().float(), v.var(0), rtol=0.15, atol=0)


def test_channels_that_hold_most_energy_make_the_others_small() -> None:
    engine = make("gemma", DType.F32)
    layers = engine.model.get_decoder().layers
    with torch.no_grad():
        layers[0].post_feedforward_layernorm.weight[:12] = 8.0
        for layer in layers:
            layer.self_attn.v_proj.weight[:, :12] = 0.0  # as in trained models: what is always there says nothing
    cut = blocks(engine.spec, "v", 1, "all")
    ids = torch.randint(3, VOCAB, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    engine.prefill("t", ids)
    for s in from_weights(engine, cut):
        rows = s.block.rows(lambda at: engine.gather("t", at), engine.spec, 0, 200).double()
        ratio = float(s.covariance.diagonal().sum()) / float(rows.square().sum(1).mean())
        assert 0.9 < ratio < 1.1, s.block.layers  # without the gains of that norm 8 and 5 in the layers behind it


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"metric": "hessian"}, ConfigError, "metric: unknown metric 'hessian'; use one of fisher, none"),
        ({"per": "layer"}, ConfigError, "per: unknown 'layer'; use 'head' or 'all'"),
        ({"layer_block": 0}, ConfigError, "a block of 0 layers"),
        ({"plane": "latent"}, UnsupportedSpecError, "not 'latent'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        calibrate_klt(request(make("llama", DType.BF16), tmp_path, **options))


def test_no_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no texts to calibrate on"):
        calibrate_klt(request(make("llama", DType.BF16), tmp_path, texts=0))


def test_without_a_metric_parts_weigh_the_same(tmp_path: Path) -> None:
    engine = make("llama", DType.BF16)
    calibrate_klt(request(engine, tmp_path, metric="none", plane="k"))
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        scale, sigma = file.get_tensor("0.scale"), file.get_tensor("0.sigma")
    assert [len(x.unique()) for x in scale.split(16)] == [1, 1]
    assert float(sigma.square().sum()) == pytest.approx(32, rel=1e-3)


def test_the_command_checks_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["calibrate", "ktl", "--out", "x"])
    assert stopped.value.code == 2
    assert "unknown kind of calibration 'ktl'; did you mean 'klt'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["heads", "--from-weights"], "'--from-weights' is an option of 'calibrate klt', not of 'calibrate heads'"),
        (["heads", "--family", "free"], "'--family' is an option of 'calibrate tables', not of 'calibrate heads'"),
        (["tables", "--per", "head"], "'--per' is an option of 'calibrate klt', not of 'calibrate tables'"),
        (["tables", "--layer-block", "2"], "'--layer-block' is an option of 'calibrate klt'"),
        (["klt", "--calibrated", "x"], "'--calibrated' is an option of 'calibrate tables', not of 'calibrate klt'"),
        (["klt", "--from-weights", "--texts", "x"], "'--from-weights' reads no texts; leave one of the two out"),
    ],
)
def test_options_that_would_be_passed_over_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["calibrate", *arguments, "--out", "x"])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_the_command_writes_a_basis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "load", lambda folder: make("llama", DType.BF16))
    out = tmp_path / "w.safetensors"
    main_arguments = ["calibrate", "klt", "--model", str(tmp_path), "--from-weights", "--layer-block", "3"]
    with pytest.raises(SystemExit) as stopped:
        main([*main_arguments, "--per", "all", "--out", str(out), "--json"])
    assert stopped.value.code == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["file"], made["blocks"], made["of"]) == (str(out), 1, 192)


def test_calibration_and_test_texts_share_no_package() -> None:
    calibration, test = calibration_texts(), pinned_texts()
    assert len(calibration) == 20
    assert sorted(p.kind for p in calibration) == ["code"] * 10 + ["prose"] * 10
    assert {p.package.lower() for p in calibration}.isdisjoint({p.package.lower() for p in test})
    assert len({p.package for p in calibration}) == 20


def test_calibration_texts_match_where_their_versions_are_installed() -> None:
    import importlib.metadata

    here = {d.name: d.version for d in importlib.metadata.distributions()}
    found = [p for p in calibration_texts() if here.get(p.package) == p.version]
    if not found:
        pytest.skip("none of the pinned versions is installed here")
    assert all(load_text(p).pinned for p in found)


def test_a_list_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("[]")
    assert read_pins(path) == []
    good = asdict(pinned_texts()[0]) | {"kind": "letters"}
    path.write_text(json.dumps([good]))
    assert read_pins(path)[0].kind == "letters"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("{", "the whole: Invalid JSON"),
        ("{}", "the whole: Input should be a valid array"),
        ([{"offset": "12"}], r"0.offset: Input should be a valid integer, got '12'"),
        ([{"offset": -1}], r"0.offset: Input should be greater than or equal to 0, got -1"),
        ([{}, {"length": 0}], r"1.length: Input should be greater than or equal to 1"),
        ([{"name": 1}], r"0.name: Input should be a valid string, got 1"),
        ([{"file": None}], r"0.file: Input should be a valid string, got None"),
        ([{"blake": "x"}], r"0.blake: "),
    ],
)
def test_a_list_of_something_else_says_where(given: Any, problem: str, tmp_path: Path) -> None:
    path, good = tmp_path / "mine.json", asdict(pinned_texts()[0])
    path.write_text(given if isinstance(given, str) else json.dumps([good | entry for entry in given]))
    with pytest.raises(ArtefactError, match=problem):
        read_pins(path)
