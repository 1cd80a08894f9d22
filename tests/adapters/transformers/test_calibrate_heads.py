"""Scores of heads: the closed form against rotated vectors, on tiny models, resumed, through the command's function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvserve_core.artefacts import Artefacts
from kvserve_core.errors import ArtefactError, ConfigError, UnsupportedSpecError
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import PipelineSpec
from kvserve_core.spec import DType, KVSpec, RopeSpec, whole
from kvserve_hf.calibrate import heads
from kvserve_hf.calibrate.heads import calibrate_heads, logits_by_distance, looking_back, text_scores
from kvserve_hf.calibrate.request import Request
from kvserve_hf.calibrate.work import Work, require_finite
from kvserve_hf.engine import Engine
from kvserve_hf.texts import LoadedText, PinnedText
from tiny_models import VOCAB, make

ROPE = RopeSpec((1.0, 0.1, 0.01), 6, "neox", 1.0)


@pytest.mark.parametrize(("style", "rotary"), [("neox", 6), ("neox", 8), ("gptj", 6)])
def test_logits_by_distance_are_those_of_rotated_vectors(style: str, rotary: int) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 8, generator=draw).double(), torch.randn(2, 8, generator=draw).double()
    inv_freq = tuple(0.5**i for i in range(rotary // 2))
    got = logits_by_distance(q, k, RopeSpec(inv_freq, rotary, style, 1.5), 9)  # type: ignore[arg-type]  # parametrised
    for distance in (0, 1, 8):
        angle = torch.tensor(inv_freq).double()
        parts = []
        for x, position in ((q, 11), (k, 11 - distance)):
            cos, sin = (angle * position).cos() * 1.5, (angle * position).sin() * 1.5
            rotated = x.clone()
            a = slice(0, rotary // 2) if style == "neox" else slice(0, rotary, 2)
            b = slice(rotary // 2, rotary) if style == "neox" else slice(1, rotary, 2)
            rotated[:, a] = x[:, a] * cos - x[:, b] * sin
            rotated[:, b] = x[:, b] * cos + x[:, a] * sin
            parts.append(rotated)
        torch.testing.assert_close(got[:, distance], (parts[0] * parts[1]).sum(1))


def test_the_rotation_is_that_of_transformers() -> None:
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    angle = torch.outer(torch.arange(8.0), torch.tensor(ROPE.inv_freq)).repeat(1, 2)
    q = x[0].expand(1, 1, 8, 6)
    k = x[1].expand(1, 1, 8, 6)
    rq, rk = apply_rotary_pos_emb(q, k, angle.cos()[None], angle.sin()[None])
    want = (rq[0, 0, 7] * rk[0, 0]).sum(-1).flip(0)
    got = logits_by_distance(x[:1].double(), x[1:].double(), ROPE, 8)[0]
    torch.testing.assert_close(got.float(), want, rtol=1e-5, atol=1e-5)


def test_even_attention_scores_one_half_and_recent_attention_little() -> None:
    nothing, something = torch.zeros(1, 6), torch.full((1, 6), 4.0)
    assert abs(float(looking_back(nothing, nothing, ROPE, 1.0)) - 0.5) < 1e-3
    assert float(looking_back(something, something, ROPE, 1.0)) < 0.15
    assert float(looking_back(something, -something, ROPE, 1.0)) > 0.5


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_scores_of_a_model(name: str) -> None:
    engine = make(name, DType.BF16)
    scores = text_scores(engine.model, engine.spec, list(range(3, 67)))
    assert scores.shape == (3, 2)
    assert ((scores > 0) & (scores < 1)).all()
    assert len({round(float(s), 9) for s in scores.flatten()}) == 6


def test_scores_are_made_of_what_the_projections_give() -> None:
    engine = make("llama", DType.BF16)
    seen = {}
    attention = engine.model.model.layers[1].self_attn
    for which in ("q", "k"):
        getattr(attention, f"{which}_proj").register_forward_hook(
            lambda _m, _a, out, which=which: seen.update({which: out[0].double().mean(0).view(-1, 16)})
        )
    scores = text_scores(engine.model, engine.spec, list(range(3, 67)))
    rope = engine.spec.groups[0].plane("k").parts[0].rope
    area = looking_back(seen["q"], seen["k"], rope, attention.scaling)
    torch.testing.assert_close(scores[1], area.view(2, 2).mean(1))


def test_a_model_without_known_rotation_is_refused() -> None:
    engine = make("llama", DType.BF16)
    with pytest.raises(UnsupportedSpecError, match="rotary"):
        text_scores(engine.model, KVSpec("none", ()), [1, 2, 3])


def request(engine: Engine, folder: Path, texts: int) -> Request:
    loaded = []
    for i in range(texts):
        draw = torch.Generator().manual_seed(i)
        pin = PinnedText(f"t{i}", "prose", "tiny", "1", "t", 0, 64, "", "0" * 64)
        loaded.append(LoadedText(pin, "".join(map(chr, torch.randint(3, VOCAB, (64,), generator=draw).tolist())), True))
    return Request(engine, loaded, folder / "heads.json", folder / "work", lambda *_: None)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = make("llama", DType.BF16)
    monkeypatch.setattr(made, "tokenize", lambda text: [ord(c) for c in text])
    return made


def test_the_file_serves_mixhq(engine: Engine, tmp_path: Path) -> None:
    made = calibrate_heads(request(engine, tmp_path, 3))
    artefacts = Artefacts()
    assert artefacts.add((tmp_path / "heads.json").read_bytes()) == made["blake3"]
    stored = json.loads((tmp_path / "heads.json").read_text())
    assert [len(row) for row in stored["scores"]] == [2, 2, 2]
    assert [t["name"] for t in stored["provenance"]["texts"]] == ["t0", "t1", "t2"]
    quantizer = {"name": "mixhq", "configuration": {"scores_artefact": made["blake3"]}}
    spec = PipelineSpec.model_validate({"planes": {"*": {"quantizer": quantizer, "codec": "zstd"}}})
    assert made["blake3"] in Pipeline.build(spec, engine.spec, whole(engine.spec), artefacts=artefacts).used_artefacts


def test_a_run_goes_on_where_it_stopped(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def stops(*args: object) -> torch.Tensor:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(args)
        return text_scores(*args)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(heads, "text_scores", stops)
    with pytest.raises(KeyboardInterrupt):
        calibrate_heads(request(engine, tmp_path, 3))
    with pytest.raises(ArtefactError, match="another model, other texts or options"):
        calibrate_heads(request(engine, tmp_path, 4))
    calls: list[object] = []
    monkeypatch.setattr(heads, "text_scores", lambda *args: (calls.append(args), text_scores(*args))[1])
    resumed = calibrate_heads(request(engine, tmp_path, 3))
    assert len(calls) == 1
    assert not (tmp_path / "work").exists()
    fresh = calibrate_heads(request(engine, tmp_path / "again", 3))
    assert resumed["blake3"] == fresh["blake3"]


def test_a_second_run_in_the_same_work_folder_is_refused(engine: Engine, tmp_path: Path) -> None:
    given = request(engine, tmp_path, 2)
    with Work(given.work, {}), pytest.raises(ArtefactError, match="another run is using the work folder"):
        calibrate_heads(given)
    calibrate_heads(given)
    assert (tmp_path / "heads.json").exists()


def test_the_lock_is_that_of_the_file_which_is_there(tmp_path: Path) -> None:
    first = Work(tmp_path / "work", {})
    (tmp_path / "work" / "lock").unlink()  # as a run does that ends just after another one opened the file
    with Work(tmp_path / "work", {}), pytest.raises(ArtefactError, match="another run"):
        Work(tmp_path / "work", {})
    first.__exit__()
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("size", [0, 5, 60, 200])
def test_a_work_file_that_was_cut_short_says_what_to_do(size: int, tmp_path: Path) -> None:
    with Work(tmp_path / "work", {"a": 1}) as work:
        work.keep("heads", {"total": torch.ones(8, 8)}, {"done": 1})
        path = tmp_path / "work" / "kept-heads.safetensors"
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(ArtefactError, match=r"kept-heads.safetensors' is damaged .*; remove it"):
            work.read("heads")


def test_what_a_killed_run_was_writing_goes_with_the_work(tmp_path: Path) -> None:
    with Work(tmp_path / "work", {}) as work:
        (tmp_path / "work" / "kept-heads.new").write_bytes(b"half")
        work.remove()
    assert not (tmp_path / "work").exists()


def test_no_texts_are_refused(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no texts to calibrate on"):
        calibrate_heads(request(engine, tmp_path, 0))
    assert not list(tmp_path.iterdir())


def test_what_is_not_finite_is_not_written() -> None:
    require_finite({"scores": torch.ones(2)})
    with pytest.raises(ArtefactError, match="'scores' came out as NaN"):
        require_finite({"scores": torch.tensor([1.0, float("nan")])})


def test_a_result_that_cannot_be_written_keeps_the_work(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "heads.json").mkdir()
    with pytest.raises(IsADirectoryError):
        calibrate_heads(request(engine, tmp_path, 2))
    assert list((tmp_path / "work").iterdir())
    (tmp_path / "heads.json").rmdir()
    calibrate_heads(request(engine, tmp_path, 2))
    assert not (tmp_path / "work").exists()
