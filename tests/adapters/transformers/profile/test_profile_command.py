"""What the command makes of its options, and what it prints."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from kvserve_core.cli.specs import component_spec
from kvserve_core.component import ComponentSpec
from kvserve_core.errors import ConfigError, UnknownNameError
from kvserve_core.latency import Speed
from kvserve_core.library import RAW_PROFILE, Profile, QualityRecord
from kvserve_core.profiling.journal import Journal
from kvserve_core.profiling.search import Options
from kvserve_hf.profile.asked import begin_anew, journal_path, named_pipelines, require_known, require_place
from kvserve_hf.profile.commands import _plan, _row, _Shown
from kvserve_hf.texts import PinnedTextError, workload_texts
from tiny_profile import setup, uniform


def test_a_new_run_forgets_the_journal_of_the_last_and_resume_keeps_it(tmp_path: Path) -> None:
    out = tmp_path / "made" / "m.kvlib"
    out.parent.mkdir()
    path = journal_path(out, None)
    assert path == tmp_path / "made" / "m.kvlib.journal.jsonl"
    path.write_text("old")
    kept = path.with_name(path.name + ".kept")
    kept.write_text("old")
    assert journal_path(out, path) == path
    assert path.read_text() == kept.read_text() == "old"
    assert journal_path(out, None) == path
    assert path.exists()  # until all that was asked for is known to be right
    begin_anew(path)
    assert not path.exists()
    assert not kept.exists()
    with pytest.raises(ConfigError, match=r"no journal .*m\.kvlib"):
        journal_path(out, path)


def test_a_journal_that_another_run_is_writing_is_not_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "m.kvlib.journal.jsonl"
    with Journal(path, "space", 0):
        with pytest.raises(ConfigError, match="another search is writing this journal"):
            begin_anew(path)
        assert path.exists()
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be removed"):
        begin_anew(path)


def test_where_the_library_cannot_be_written_is_said_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.kvlib").mkdir()
    for out, said in (
        (tmp_path / "file", "a folder; end the name in '.kvlib'"),
        (tmp_path / "folder.kvlib", "would be a file"),
        (tmp_path / "file" / "m.kvlib", "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=said):
            require_place(out)
    require_place(tmp_path / "new" / "m.kvlib")
    assert (tmp_path / "new").is_dir()


def test_executors_and_evaluators_that_there_are_none_of_are_refused_before_the_search() -> None:
    require_known("process", setup())
    with pytest.raises(UnknownNameError, match="unknown executor 'processes'; did you mean 'process'"):
        require_known("processes", setup())
    with pytest.raises(ConfigError, match=r"evaluators\.passkey\.configuration\.samples"):
        require_known("process", setup(evaluators=(ComponentSpec(name="passkey", configuration={"samples": 0}),)))


def test_names_that_no_profile_may_have_are_refused_before_the_search(tmp_path: Path) -> None:
    spec = uniform(4).spec.model_dump(mode="json")
    path = tmp_path / "also.json"
    path.write_text(json.dumps({"mine": spec}))
    assert list(named_pipelines(path, None)) == ["mine"]
    for name, said in (("<b>", "should match pattern"), ("", "should match pattern"), ("raw", "reserved")):
        path.write_text(json.dumps({name: spec}))
        with pytest.raises(ConfigError, match=said):
            named_pipelines(path, None)


def test_an_evaluator_is_a_name_or_json() -> None:
    assert component_spec("passkey", "evaluator") == ComponentSpec(name="passkey")
    assert component_spec('{"name": "passkey", "configuration": {"samples": 3}}', "evaluator").configuration == {
        "samples": 3
    }
    with pytest.raises(ConfigError, match="not an evaluator"):
        component_spec('{"configuration": {}}', "evaluator")


def test_the_search_is_quick_and_what_is_kept_is_measured_thoroughly(tmp_path: Path) -> None:
    plan = _plan(setup(), Options(), "prose", 6, "process", 3, 12, tmp_path / "j")
    assert (plan.search.quick, plan.confirm.quick, plan.batch) == (6, None, 3)
    assert (plan.search.reuse, plan.confirm.reuse) == (True, False)
    assert _plan(setup(), Options(), "prose", 6, "serial", 3, 12, tmp_path / "j").batch == 1


def test_a_row_says_when_the_sample_is_too_small() -> None:
    record = QualityRecord(value=0.99, lower=0.95, upper=1.0, metric="exp(-KL)", samples=4)
    speed = Speed(0.001, 2e-9)
    profile = Profile(
        name="p", pipeline=uniform(16).spec, cr=4.0, encode=speed, decode=speed, quality={"prose": record}
    )
    row = _row(profile, "prose", 0.01)
    assert row["quality"] == "0.9900 [0.9500, 1.0000]"
    assert row["encode"] == "1.00 ms + 2.00 ns/byte"
    assert "4 samples" in row["note"]
    assert _row(profile, "prose", 0.05)["note"] == ""
    assert _row(RAW_PROFILE, "prose", 0.01)["quality"] == "exact"


def test_without_a_terminal_each_measurement_is_a_line_with_the_best_so_far() -> None:
    out = io.StringIO()
    bar = Progress(console=Console(file=out, width=100))
    shown = _Shown(bar, bar.add_task("model", total=None))
    for done in range(1, 4):
        shown("estimate", done, 3, "")
    shown("measure", 1, 5, "26.10x at 0.9779 [0.9740] klt-0.7")
    assert out.getvalue().splitlines() == [
        "1/3 estimate",
        "3/3 estimate",
        "1/5 measure 26.10x at 0.9779 [0.9740] klt-0.7",
    ]
    assert bar.tasks[0].total == 5


def test_the_texts_of_a_workload() -> None:
    assert {t.kind for t in workload_texts("default")} == {"prose", "code"}
    assert {t.kind for t in workload_texts("prose")} == {"prose"}
    with pytest.raises(PinnedTextError, match="prosa"):
        workload_texts("prosa")
