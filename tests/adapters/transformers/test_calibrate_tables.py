"""Tables of a tiny random model: files, resuming, options, the command, and what they save."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvserve_core.artefacts import Artefacts
from kvserve_core.cli import main
from kvserve_core.errors import ArtefactError, ConfigError
from kvserve_core.evaluation.engine import TokenText
from kvserve_core.pipeline import Pipeline
from kvserve_core.registry import default_registry
from kvserve_core.spec import DType, whole
from kvserve_core.stages import FitsTables
from kvserve_hf.calibrate import tables
from kvserve_hf.calibrate.request import Request, TablesOptions
from kvserve_hf.calibrate.tables import calibrate_tables
from kvserve_hf.engine import Engine
from kvserve_hf.roundtrip import FrameRoundtrip
from kvserve_hf.texts import LoadedText, PinnedText
from tiny_models import VOCAB, make

PROMPT = 96


def text(i: int) -> LoadedText:
    draw = torch.Generator().manual_seed(i)
    said = "".join(map(chr, torch.randint(3, VOCAB, (PROMPT,), generator=draw).tolist()))
    return LoadedText(PinnedText(f"t{i}", "prose", "tiny", "1", "t", 0, PROMPT, "", "0" * 64), said, True)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PROMPT_TOKENS", PROMPT)
    monkeypatch.setattr(
        tables, "tokens", lambda texts, _: [TokenText(t.pin.name, tuple(map(ord, t.text))) for t in texts]
    )


def spec(**codec: str) -> dict[str, Any]:
    """Codes with a smallest and a largest one in every row of a token: no published table is like that."""
    uniform = {"name": "uniform", "configuration": {"levels": 15, "axis": "token_head"}}
    chain = {"quantizer": uniform, "codec": {"name": "rans", "configuration": codec}}
    return {"planes": {"*": chain}, "layer_block": 2, "sink_tokens": 1}


def pipelines(folder: Path, codec: str = "rans") -> Path:
    path = folder / "pipelines.json"
    made = spec()
    made["planes"]["*"]["codec"] = codec
    path.write_text(json.dumps({"plain": made}))
    return path


def request(engine: Engine, folder: Path, texts: int = 3, **options: Any) -> Request:
    given = TablesOptions(**(options or {"pipelines": pipelines(folder)}))
    loaded = [text(i) for i in range(texts)]
    out, work = folder / "t.safetensors", folder / "work"
    return Request(engine, loaded, out, work, lambda *_: None, tables=given)


def ratio(engine: Engine, artefacts: Artefacts, **codec: str) -> float:
    pipeline = Pipeline.build(spec(**codec), engine.spec, whole(engine.spec), artefacts=artefacts)
    roundtrip = FrameRoundtrip(pipeline, artefacts)
    engine.prefill("t", tuple(map(ord, text(99).text)))
    for at, x in roundtrip(lambda at: engine.gather("t", at), PROMPT):
        assert (x.float() - engine.gather("t", at).float()).abs().max() < 0.2, at
    engine.release("t")
    return roundtrip.cr


def test_tables_make_a_text_that_they_were_not_fitted_to_smaller(tmp_path: Path) -> None:
    engine = make("llama", DType.BF16)
    made = calibrate_tables(request(engine, tmp_path))
    artefacts = Artefacts()
    assert artefacts.add((tmp_path / "t.safetensors").read_bytes()) == made["blake3"]
    assert made["codes"] == 3 * (PROMPT - 1) * 3 * 2 * 32
    assert made["pipelines"] == "plain"
    assert not (tmp_path / "work").exists()
    assert ratio(engine, artefacts, tables=made["blake3"]) > 1.01 * ratio(engine, artefacts)


def test_the_file_says_where_it_is_from(tmp_path: Path) -> None:
    engine = make("llama", DType.BF16)
    calibrate_tables(request(engine, tmp_path))
    data = (tmp_path / "t.safetensors").read_bytes()
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    about = json.loads(head["__metadata__"]["kvserve.rans"])["provenance"]
    assert about["fingerprint"] == engine.spec.fingerprint
    assert [t["name"] for t in about["texts"]] == ["t0", "t1", "t2"]
    assert about["codec"] == "rans"
    assert about["pipelines"]["plain"]["planes"]["*"]["quantizer"]["name"] == "uniform"


class Stop(Exception):
    pass


def stop(what: str, done: int, of: int) -> None:
    if done == 2:
        raise Stop


def test_a_run_that_was_stopped_goes_on_and_gives_the_same_file(tmp_path: Path) -> None:
    engine = make("llama", DType.BF16)
    (tmp_path / "a").mkdir()
    straight = calibrate_tables(request(engine, tmp_path / "a"))
    (tmp_path / "b").mkdir()
    with pytest.raises(Stop):
        calibrate_tables(replace(request(engine, tmp_path / "b"), progress=stop))
    with pytest.raises(ArtefactError, match="another model, other texts or options"):
        calibrate_tables(request(engine, tmp_path / "b", texts=4))
    prefilled: list[str] = []
    prefill = engine.prefill
    engine.prefill = lambda key, ids: prefilled.append(key) or prefill(key, ids)  # type: ignore[method-assign]  # counts
    assert calibrate_tables(request(engine, tmp_path / "b"))["blake3"] == straight["blake3"]
    assert len(prefilled) == 1


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path) -> None:
    engine = make("llama", DType.BF16)
    with pytest.raises(ConfigError, match="no texts to calibrate on"):
        calibrate_tables(request(engine, tmp_path, texts=0))
    with pytest.raises(ConfigError, match=r"codecs \['zstd'\], of which none fit tables"):
        calibrate_tables(request(engine, tmp_path, pipelines=pipelines(tmp_path, "zstd")))
    with pytest.raises(ConfigError, match="unknown family 'fancy'; allowed: plain"):
        calibrate_tables(request(engine, tmp_path, pipelines=pipelines(tmp_path), families=("fancy",)))
    with pytest.raises(ArtefactError, match="no calibrated file 'klt-head-15'"):
        calibrate_tables(request(engine, tmp_path, pipelines=None, families=("klt-head-15",)))


def test_only_codecs_with_a_fit_are_fitted() -> None:
    load = default_registry().load
    assert isinstance(load("codec", "rans"), FitsTables)
    assert not isinstance(load("codec", "zstd"), FitsTables)


def test_the_command_writes_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvserve_hf.calibrate import commands

    monkeypatch.setattr(Engine, "load", lambda folder: make("llama", DType.BF16))
    monkeypatch.setattr(commands, "load_texts", lambda *_: [text(0)])
    out = tmp_path / "t.safetensors"
    with pytest.raises(SystemExit) as stopped:
        main(["calibrate", "tables", "--model", str(tmp_path), "--out", str(out), "--json"])
    assert stopped.value.code == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["file"], made["bytes"]) == (str(out), out.stat().st_size)
    assert made["pipelines"].startswith("free,step=0.25")
