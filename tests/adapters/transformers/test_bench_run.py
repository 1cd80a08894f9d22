"""A whole run on a tiny model: rows, journal, document and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvserve_core import default_registry
from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.bench import Bench
from kvserve_core.evaluation.engine import TokenText
from kvserve_core.evaluation.questions import Instance
from kvserve_core.evaluation.tasks import TaskBench
from kvserve_core.spec import DType
from kvserve_hf.bench import report
from kvserve_hf.bench.pipelines import Calibrated, Candidate, Family, candidates
from kvserve_hf.bench.run import Journal, QualityRun
from kvserve_hf.engine import Engine
from kvserve_hf.texts import LoadedText, PinnedText
from tiny_models import VOCAB, make

CHAIN = {"quantizer": {"name": "uniform", "configuration": {"levels": {"$": "levels"}}}, "codec": "bitpack"}
FAMILIES = [
    Family(name="exact", pipeline={"planes": {"*": {"quantizer": "bitplane", "codec": "zstd"}}}),
    Family(name="uniform", values=({"levels": 64}, {"levels": 4}), pipeline={"planes": {"*": CHAIN}, "sink_tokens": 0}),
    Family(name="gone", pipeline={"planes": {"*": {"quantizer": "no-such-thing"}}}),
]


def texts(count: int) -> tuple[list[LoadedText], list[TokenText]]:
    g = torch.Generator().manual_seed(5)
    ids = [tuple(torch.randint(3, VOCAB, (60,), generator=g).tolist()) for _ in range(count)]
    kinds = ["prose", "code"]
    pins = [PinnedText(f"t{i}", kinds[i % 2], "acme", "1", "f", 0, 1, "a", f"{i}") for i in range(count)]
    return [LoadedText(p, "text", True) for p in pins], [TokenText(p.name, i) for p, i in zip(pins, ids, strict=True)]


class Rig:
    """One engine with its texts and one task."""

    def __init__(self, journal: Path | None = None) -> None:
        self.engine: Engine = make("llama", DType.BF16)
        self.loaded, tokenized = texts(4)
        self.bench = Bench(self.engine, tokenized, prompt_tokens=40)
        prompt = tokenized[0].ids[:30]
        self.engine.prefill("p", prompt[:-1])
        answer = tuple(self.engine.generate("p", prompt[-1], 2))
        self.tasks = TaskBench(self.engine, [Instance("echo", prompt, answer)])
        self.given: list[Candidate] = list(candidates(FAMILIES, Calibrated(), default_registry()))
        self.journal = journal
        self.done: list[str] = []

    def rows(self, resume: bool = False) -> list[dict[str, Any]]:
        with Journal(self.journal, resume) as journal:
            run = QualityRun(self.engine, self.bench, self.tasks, self.loaded, Calibrated(), journal)
            return list(run.rows(self.given, self.done.append))


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig()


@pytest.fixture(scope="module")
def rows(rig: Rig) -> list[dict[str, Any]]:
    return rig.rows()


def test_a_row_for_each_pipeline(rig: Rig, rows: list[dict[str, Any]]) -> None:
    assert [r["pipeline"] for r in rows] == ["exact", "uniform,levels=64", "uniform,levels=4", "gone"]
    assert rig.done[:4] == [r["pipeline"] for r in rows]
    exact, fine, coarse, gone = rows
    assert (exact["kl"]["mean"], exact["top1"]["mean"], exact["tasks"]) == (0.0, 1.0, {"echo": 1.0})
    assert 0 < fine["kl"]["mean"] < coarse["kl"]["mean"]
    assert 1 < fine["cr"] < coarse["cr"]
    assert fine["kl"]["low"] < fine["kl"]["mean"] < fine["kl"]["high"]
    assert set(gone) == {"pipeline", "problem"}
    assert "no-such-thing" in gone["problem"]


def test_ratios_add_up_over_texts_and_kinds(rows: list[dict[str, Any]]) -> None:
    coarse = rows[2]
    ratios = [t["cr"] for t in coarse["texts"]]
    assert coarse["cr"] == pytest.approx(len(ratios) / sum(1 / r for r in ratios))
    assert set(coarse["by_kind"]) == {"prose", "code"}
    kl = [coarse["by_kind"][kind]["kl"]["mean"] for kind in ("prose", "code")]
    assert sum(kl) / 2 == pytest.approx(coarse["kl"]["mean"])
    assert (coarse["escaped_segments"], coarse["segments"] > 0) == (0, True)


def test_what_was_measured_is_not_measured_again(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = tmp_path / "j.jsonl"
    first = Rig(path).rows()
    lines = path.read_text().splitlines()
    assert len(lines) == 6, "texts and tasks of three pipelines"
    doctored = json.loads(lines[2])
    doctored["row"]["cr"] = 99.0
    path.write_text("\n".join([*lines[:2], json.dumps(doctored), lines[3], lines[4][:40]]) + "\n")
    again = Rig(path).rows(resume=True)
    assert again[1]["cr"] == 99.0, "taken from the journal"
    assert again[2]["cr"] == first[2]["cr"], "the line that was cut is measured again"
    assert Rig(path).rows()[1]["cr"] == first[1]["cr"], "without resume everything is measured"


def test_a_journal_takes_one_run_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path, False) as first:
        first.add("a", {"cr": 2.0})
        for resume in (True, False):
            with pytest.raises(ConfigError, match="another run is writing this journal"):
                Journal(path, resume)
    with Journal(path, True) as second:
        assert second.row("a") == {"cr": 2.0}


def test_a_row_after_one_that_was_cut_short_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text('{"key": "a", "row": {"cr": 2.0}}\n{"key": "b", "ro')
    with Journal(path, True) as journal:
        journal.add("c", {"cr": 3.0})
    with Journal(path, True) as again:
        assert [again.row(key) for key in "abc"] == [{"cr": 2.0}, None, {"cr": 3.0}]


def test_the_document_and_its_tables(rig: Rig, rows: list[dict[str, Any]]) -> None:
    made = report.document("kvserve bench quality", rig.engine, rig.loaded, rig.tasks, FAMILIES, rows)
    assert json.loads(json.dumps(made)) == made
    assert made["tasks"] == {"uncompressed": {"echo": 1.0}, "counted": ["echo"], "counted_from": 0.5}
    assert [f["points"] for f in made["families"]] == [1, 2, 0]
    cells = report.table(made["pipelines"])
    assert all(len(row) == len(report.COLUMNS) for row in cells)
    assert cells[0][:2] == ["exact", f"{rows[0]['cr']:.2f}"]
    (family,) = report.family_table(made["families"])
    assert (family[0], len(family)) == ("uniform", len(report.FAMILY_COLUMNS))
    assert report.ratio({"cr": 12.34, "low": 10.0, "high": None}) == "12.3 [10.0, ?]"
