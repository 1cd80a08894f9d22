"""Methods side by side, and what a profile chosen per workload gains."""

from __future__ import annotations

import pytest

from kvserve_core.artefacts import NONE
from kvserve_core.component import ComponentSpec
from kvserve_core.evaluation.quality import Interval
from kvserve_core.profile import RAW_PIPELINE
from kvserve_hf.profile.comparison import (
    AWARE,
    DEFAULT,
    DUO,
    UNIFIED,
    Cell,
    Workload,
    as_json,
    choices,
    markdown,
    measured,
)
from kvserve_hf.profile.masks import StreamingEngine
from tiny_profile import load, setup, texts, uniform


def cell(quality: float, cr: float) -> Cell:
    return Cell(Interval(quality, quality - 0.01, min(1.0, quality + 0.01)), cr, 8)


ROWS = {
    DEFAULT: {"prose": Cell(Interval(1.0, 1.0, 1.0), 1.0, 8), "code": Cell(Interval(1.0, 1.0, 1.0), 1.0, 8)},
    "fine": {"prose": cell(0.99, 4.0), "code": cell(0.99, 5.0)},
    "prose": {"prose": cell(0.98, 9.0), "code": cell(0.80, 9.0)},
    "coarse": {"prose": cell(0.90, 20.0), "code": cell(0.97, 12.0)},
}


def test_unified_keeps_the_floor_everywhere_and_aware_on_each_workload() -> None:
    found = choices(ROWS, ["fine", "prose", "coarse"], 0.95)
    assert {w: c.profile for w, c in found[UNIFIED].items()} == {"prose": "fine", "code": "fine"}
    assert {w: c.profile for w, c in found[AWARE].items()} == {"prose": "prose", "code": "coarse"}
    assert found[AWARE]["code"].cr == 12.0


def test_a_second_unified_row_may_leave_out_a_workload_that_nothing_keeps() -> None:
    lost = {DEFAULT: cell(1.0, 1.0), "fine": cell(0.1, 4.5), "prose": cell(0.0, 9.0), "coarse": cell(0.0, 15.0)}
    rows = {name: row | {"strict": lost[name]} for name, row in ROWS.items()}
    found = choices(rows, ["fine", "prose", "coarse"], 0.95, ["strict"])
    assert {c.profile for c in found[UNIFIED].values()} == {DEFAULT}
    assert list(found) == [UNIFIED, "unified, but for strict", AWARE]
    second = found["unified, but for strict"]
    assert {w: (c.profile, c.cr) for w, c in second.items()} == {
        "prose": ("fine", 4.0),
        "code": ("fine", 5.0),
        "strict": ("fine", 4.5),
    }


def test_where_nothing_keeps_the_floor_nothing_is_compressed() -> None:
    found = choices(ROWS, ["coarse"], 0.99)
    assert {c.profile for row in found.values() for c in row.values()} == {DEFAULT}


def test_where_a_sample_is_too_small_to_show_the_floor_the_measured_quality_decides() -> None:
    few = {w: Cell(Interval(1.0, 0.7, 1.0), 1.0, 8) for w in ("prose", "code")}
    found = choices(ROWS | {DEFAULT: few}, ["fine", "prose", "coarse"], 0.98)
    assert {w: c.profile for w, c in found[AWARE].items()} == {"prose": "prose", "code": "fine"}


def test_real_rows_over_two_workloads() -> None:
    engine = load(setup().model)
    spec = ComponentSpec(name="continuation", configuration={"prompt_tokens": 60, "continuation_tokens": 20})
    workloads = [Workload(kind, spec, tuple(t for t in texts(4) if t.kind == kind)) for kind in ("prose", "code")]
    duo = StreamingEngine(engine, {(0, 0), (1, 0), (2, 1)}, sinks=2, recent=8)
    duo.tokenize = engine.tokenize  # type: ignore[method-assign]  # a model without a tokenizer
    said: list[str] = []
    pipelines = {DEFAULT: RAW_PIPELINE, "four": uniform(4, layer_block=3).spec}
    rows = measured(engine, workloads, pipelines, NONE, duo, said.append)
    assert list(rows) == [DEFAULT, "four", DUO]
    assert said[0] == "prose, default"
    assert len(said) == 6
    assert rows[DEFAULT]["code"].quality.mean == pytest.approx(1.0, abs=1e-6)
    assert rows["four"]["code"].cr > 1.0 > rows["four"]["code"].quality.mean
    sent, kept = duo.counted(60)
    assert rows[DUO]["prose"].cr == pytest.approx(sent / kept)
    assert rows[DUO]["prose"].quality.mean < 1.0
    assert engine.held == duo.held == ()
    text = markdown(rows)
    assert text.splitlines()[0] == "| method | prose | code |"
    assert "100.0 [" in text
    assert set(as_json(rows)["four"]["code"]) == {"quality", "low", "high", "cr", "samples"}
