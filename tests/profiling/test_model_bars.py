"""What ``benchmarks/profiler.py`` makes of a run on a model, and how it finds the best of the reference's space."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmark_modules import benchmark
from kvserve_core.latency import Speed
from kvserve_core.library import RAW_PROFILE, Profile, ProfileLibrary, QualityRecord
from kvserve_core.profile import PipelineSpec
from kvserve_core.profiling.point import Measurement, Point


@pytest.fixture(scope="module")
def model() -> Iterator[SimpleNamespace]:
    names = ("bars", "reference", "whole")
    with benchmark(*(f"profiler_model.{name}" for name in names)) as modules:
        yield SimpleNamespace(**dict(zip(names, modules, strict=True)))


def point(levels: int) -> Point:
    quantizer = {"name": "uniform", "configuration": {"levels": levels}}
    chain = {"planes": {"*": {"quantizer": quantizer, "codec": "zstd"}}}
    return Point((), PipelineSpec.parse(chain), f"u{levels}")


def answer(p: Point, cr: float, quality: float, spread: float) -> Measurement:
    return Measurement(
        key=p.key, cr=cr, quality=quality, quality_low=quality - spread, quality_high=quality + spread, samples=16
    )


class Thorough:
    """Answers with little spread, and what was asked for."""

    def __init__(self, answers: dict[str, tuple[float, float]]) -> None:
        self.answers, self.asked = answers, list[str]()

    def __call__(self, points: Sequence[Point]) -> list[Measurement]:
        self.asked += [p.name for p in points]
        return [answer(p, *self.answers[p.name], 0.001) for p in points]


POINTS = [point(levels) for levels in (4, 6, 8, 12, 16)]
TRUTH = {"u4": (9.0, 0.90), "u6": (7.0, 0.965), "u8": (6.0, 0.975), "u12": (5.0, 0.99), "u16": (4.0, 0.995)}


def test_the_best_is_found_from_the_highest_ratio_down(model: SimpleNamespace) -> None:
    quick = {p.key: answer(p, *TRUTH[p.name], 0.02) for p in POINTS}
    thorough = Thorough(TRUTH)
    found, measured = model.reference.best_of(POINTS, quick, thorough, 0.97, 1)
    assert (found.name, measured.cr) == ("u8", 6.0)
    assert thorough.asked == ["u6", "u8"], "few texts rule out the first, and what comes after the best cannot beat it"


def test_of_a_batch_the_highest_ratio_counts_and_failures_do_not(model: SimpleNamespace) -> None:
    quick = {p.key: answer(p, *TRUTH[p.name], 0.02) for p in POINTS}
    quick[POINTS[1].key] = Measurement(key=POINTS[1].key, error="it failed")
    found, _ = model.reference.best_of(POINTS, quick, Thorough(TRUTH), 0.97, 3)
    assert found.name == "u8"
    assert model.reference.best_of(POINTS, quick, Thorough(TRUTH), 0.999, 3) is None


def searched(model: SimpleNamespace, **more: object) -> object:
    records = {"good": (20.0, 0.975), "lossy": (30.0, 0.96)}
    profiles = [RAW_PROFILE]
    for name, (cr, lower) in records.items():
        quality = {"default": QualityRecord(value=lower, lower=lower, upper=1.0, metric="exp(-KL)", samples=16)}
        profiles.append(
            Profile(name=name, pipeline=point(4).spec, cr=cr, encode=Speed(), decode=Speed(), quality=quality)
        )
    sessions = more.pop("sessions", (20.0, 24.0))
    about = {"candidates": 1000, "families": {"a": 1, "b": 2, "c": 3, "d": 4}, "evaluations": 60, "stopped": ""}
    provenance = {"search": about | {"cpu_s": 1.0, **more}}
    library = ProfileLibrary(
        model_id="m", fingerprint="f", device="cpu", created="now", provenance=provenance, profiles=tuple(profiles)
    )
    return model.whole.Searched(library, sessions)


def test_bars_of_a_run(model: SimpleNamespace) -> None:
    theirs = model.reference.Exhausted(144, 3, {0.97: (POINTS[2], answer(POINTS[2], 6.0, 0.975, 0.001))}, 10.0)
    bars = model.bars
    ours = searched(model)
    assert [r.ok for r in (bars._size(ours) | bars._time(ours)).values()] == [True] * 4
    found = bars._ratio(ours, theirs, 0.97)
    assert (found.value, found.ok) == (3.33, True)
    assert found.detail["profile"] == "good", "the ratio of a profile that misses the floor does not count"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("candidates", {"candidates": 999}),
        ("methods", {"families": {"a": 1, "b": 2, "c": 3}}),
        ("evaluations", {"evaluations": 61}),
        ("minutes, with all texts at the end", {"sessions": (30.0, 15.1)}),
    ],
)
def test_a_run_that_is_too_small_or_too_long_misses_its_bar(
    model: SimpleNamespace, name: str, change: dict[str, object]
) -> None:
    ours = searched(model, **change)
    found = model.bars._size(ours) | model.bars._time(ours)
    assert [bar for bar, result in found.items() if not result.ok] == [name]


def test_without_a_profile_at_the_floor_there_is_no_ratio(model: SimpleNamespace) -> None:
    theirs = model.reference.Exhausted(144, 0, {0.97: None, 0.99: None}, 1.0)
    assert model.bars._ratio(searched(model), theirs, 0.97).ok is False
    best = {0.99: (POINTS[0], answer(POINTS[0], 4.0, 0.995, 0.001))}
    assert model.bars._ratio(searched(model), model.reference.Exhausted(144, 1, best, 1.0), 0.99).value is None


def test_minutes_of_interrupted_sessions_add_up(model: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "sessions.json"
    model.whole._Watch(path).shown("measure", 1, 60, "")
    (first,) = json.loads(path.read_text())
    path.write_text("[17.0]")
    again = model.whole._Watch(path)
    again.shown("estimate", 1, 1000, "")
    assert json.loads(path.read_text()) == [17.0], "not at every one of thousands of estimates"
    again.shown("measure", 2, 60, "")
    before, now = json.loads(path.read_text())
    assert before == 17.0
    assert now >= 0 <= first
