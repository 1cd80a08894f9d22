"""From a space to a library, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvserve_core.controller import Controller
from kvserve_core.errors import ConfigError
from kvserve_core.latency import Speed
from kvserve_core.library import LOSSLESS_PROFILE, RAW_PROFILE, Profile, ProfileLibrary, QualityRecord
from kvserve_core.policy import ServiceContext
from kvserve_core.profile import PipelineSpec
from kvserve_core.profiling.build import build_space
from kvserve_core.profiling.point import Measurement, spec_key
from kvserve_core.profiling.run import Found
from kvserve_core.profiling.search import Options
from kvserve_core.registry import default_registry
from kvserve_hf.profile import library as made
from kvserve_hf.profile.objective import ModelObjective
from kvserve_hf.profile.run import Plan, ProfileRun, kept, searching
from tiny_profile import SPACE, load, setup, uniform


def plan(tmp_path: Path, **more: Any) -> Plan:
    options = Options(floors=(0.5,), budget=5, cold=2, patience=0, seed=1)
    return Plan(searching(setup(), 2), setup(), options, "default", journal=tmp_path / "j.jsonl", **more)


def run(given: Plan, seen: Callable[..., None] = lambda *_: None) -> ProfileLibrary:
    objective = ModelObjective(replace(given.search, lengths=(16, 60)), load)
    space = build_space(SPACE, kv=objective.engine.spec)
    return ProfileRun(given, objective, space, space.points()).run({"command": "test"}, seen)


def test_a_run_leaves_a_library_that_a_controller_can_use(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    library = run(plan(tmp_path), lambda task, done, of, _: steps.append((task, done, of)))
    assert list(dict.fromkeys(task for task, *_ in steps)) == ["estimate", "measure", "confirm", "time"]
    assert ("measure", 5, 5) in steps
    names = [p.name for p in library.profiles]
    assert names[:2] == ["raw", "lossless"]
    assert len(names) > 2
    for profile in library.profiles[2:]:
        record = profile.quality["default"]
        assert record.samples == 4
        assert record.metric == "exp(-KL)"
        assert {"prose", "code"} <= set(profile.quality)
    library.save(tmp_path / "m.kvlib")
    loaded = ProfileLibrary.load(tmp_path / "m.kvlib")
    loaded.check(default_registry().create)
    controller = Controller(loaded, default_registry().create("policy", "analytic"), min_quality=0.0)
    chosen = controller.choose(ServiceContext(nbytes=10**9, bandwidth=1e3)).profile
    assert chosen == max(library.profiles, key=lambda p: p.cr).name


def test_the_trace_tells_the_search(tmp_path: Path) -> None:
    search = run(plan(tmp_path)).provenance["search"]
    assert (search["candidates"], search["evaluations"], search["stopped"]) == (16, 5, "budget spent")
    assert len(search["trace"]) == 5
    assert search["rank_correlation"] > 0.5
    assert search["cpu_s"] > 0
    assert {row["chains"]["*"] for row in search["trace"]} <= {"uniform + bitpack", "uniform + zstd"}
    best = search["best"]["0.5"]
    assert best["cr"] == max(row["cr"] for row in search["trace"] if row["low"] >= 0.5)


def test_named_pipelines_go_into_the_library_beside_what_was_found(tmp_path: Path) -> None:
    beaten = uniform(2, layer_block=3).spec  # of 2 levels nothing is left, so that the search cannot have kept it
    library = run(plan(tmp_path, also={"mine": beaten}))
    (mine,) = [p for p in library.profiles if p.name == "mine"]
    assert mine.pipeline == beaten
    assert mine.quality["default"].samples == 4
    assert [p.cr for p in library.profiles[2:]] == sorted(p.cr for p in library.profiles[2:])


def test_a_pipeline_that_is_named_and_found_is_there_once_under_its_own_name(tmp_path: Path) -> None:
    found = run(plan(tmp_path))
    best = max(found.profiles, key=lambda p: p.cr)
    again = run(plan(tmp_path, also={"mine": best.pipeline}))
    assert [p.name for p in again.profiles if p.pipeline == best.pipeline] == ["mine"]
    assert again.provenance["search"]["from_journal"] == again.provenance["search"]["evaluations"] == 5


def test_a_name_that_is_found_and_given_to_something_else_is_told_apart(tmp_path: Path) -> None:
    best = max(run(plan(tmp_path)).profiles, key=lambda p: p.cr)
    other = uniform(32, layer_block=3).spec
    again = run(plan(tmp_path, also={best.name: other}))
    assert {p.name: p.pipeline for p in again.profiles if best.name in p.name} == {
        best.name: other,
        f"{best.name}-{spec_key(best.pipeline)}": best.pipeline,
    }


def test_a_larger_budget_adds_to_what_was_measured_again(tmp_path: Path) -> None:
    first = run(plan(tmp_path))
    kept = (tmp_path / "j.jsonl.kept").read_text().count('"measurement"')
    larger = plan(tmp_path)
    again = run(replace(larger, options=replace(larger.options, budget=8)))
    assert again.provenance["search"]["evaluations"] == 8
    assert (tmp_path / "j.jsonl.kept").read_text().count('"measurement"') > kept >= len(first.profiles)


def test_what_cannot_be_measured_again_is_named_and_tried_again_by_the_next_run(tmp_path: Path) -> None:
    run(plan(tmp_path))
    journal = tmp_path / "j.jsonl.kept"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    lines[-1]["value"]["error"] = "killed"
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = run(plan(tmp_path))
    assert again.provenance["search"]["failed"] == {}
    assert len(journal.read_text().splitlines()) == len(lines) + 1
    unfit = PipelineSpec.parse({"planes": {"*": {"quantizer": {"name": "uniform", "configuration": {"levels": 0}}}}})
    assert list(run(plan(tmp_path, also={"unfit": unfit})).provenance["search"]["failed"]) == ["unfit"]


def test_two_runs_do_not_write_one_journal(tmp_path: Path) -> None:
    def second(task: str, done: int, *_: object) -> None:
        if (task, done) == ("time", 1):  # the search itself is long over
            with pytest.raises(ConfigError, match="another search is writing this journal"):
                run(plan(tmp_path))
            seen.append(task)

    seen: list[str] = []
    run(plan(tmp_path), second)
    assert seen == ["time"]


def test_a_run_that_was_ended_goes_on_from_its_journal(tmp_path: Path) -> None:
    class Ended(Exception):
        pass

    def end(task: str, done: int, of: int, best: str) -> None:
        if task == "measure" and done == 3:
            raise Ended

    with pytest.raises(Ended):
        run(plan(tmp_path), end)
    lines = (tmp_path / "j.jsonl").read_text().splitlines()
    kept = [json.loads(line)["value"] for line in lines if '"measurement"' in line]
    assert len(kept) == 3
    with (tmp_path / "j.jsonl").open("a") as stream:
        stream.write('{"type":"measurement","value":{"key":"cut of')
    seen: list[int] = []
    library = run(plan(tmp_path), lambda task, done, *_: seen.append(done) if task == "measure" else None)
    assert seen == [4, 5]
    trace = library.provenance["search"]["trace"]
    assert [row["key"] for row in trace[:3]] == [m["key"] for m in kept]
    assert len(trace) == 5


def test_a_journal_of_other_texts_is_refused(tmp_path: Path) -> None:
    run(plan(tmp_path))
    other = plan(tmp_path)
    with pytest.raises(ConfigError, match="another search"):
        run(replace(other, search=replace(other.search, texts=other.search.texts[:2])))


def test_a_journal_of_an_evaluator_that_asks_otherwise_is_refused(tmp_path: Path) -> None:
    run(plan(tmp_path))
    journal = tmp_path / "j.jsonl"
    asked = '"continuation_tokens":20'
    assert asked in journal.read_text()
    journal.write_text(journal.read_text().replace(asked, '"continuation_tokens":10'))
    with pytest.raises(ConfigError, match="another search"):
        run(plan(tmp_path))


def profile(name: str, cr: float, lower: float, s_per_byte: float) -> Profile:
    record = QualityRecord(value=lower, lower=lower, upper=1.0, metric="exp(-KL)", samples=4)
    speed = Speed(0.0, s_per_byte / 2)
    return Profile(name=name, pipeline=uniform(16).spec, cr=cr, encode=speed, decode=speed, quality={"default": record})


def test_buckets_hold_what_keeps_their_floor_with_the_fastest_over_bandwidth() -> None:
    profiles = [RAW_PROFILE, LOSSLESS_PROFILE, profile("fine", 4.0, 0.99, 1e-9), profile("coarse", 16.0, 0.96, 4e-8)]
    by_floor = {row["min_quality"]: row for row in made.buckets(profiles, "default")}
    assert by_floor[0.995]["profiles"] == ["raw", "lossless"]
    assert by_floor[0.99]["profiles"] == ["raw", "lossless", "fine"]
    assert by_floor[0.95]["profiles"][-1] == "coarse"
    envelope = by_floor[0.95]["envelope"]
    assert [row["profile"] for row in envelope] == ["raw", "fine", "coarse"]
    assert envelope[0]["below_bytes_per_s"] is None
    limits = [row["below_bytes_per_s"] for row in envelope[1:]]
    assert limits == sorted(limits, reverse=True)
    # Theorem 6.1 for two lines: equal where V/s + V/(B cr) are.
    assert limits[1] == pytest.approx((1 / 4 - 1 / 16) / (4e-8 - 1e-9))


def candidate(key: str, cr: float, quality: float, s_per_byte: float) -> Measurement:
    speed = Speed(0.0, s_per_byte / 2)
    bounds = {"quality": quality, "quality_low": quality - 0.01, "quality_high": quality}
    return Measurement(key=key, cr=cr, encode=speed, decode=speed, **bounds)


def test_what_is_kept_serves_slow_and_fast_links_and_every_floor() -> None:
    rows = (
        candidate("small", 30.0, 0.96, 5e-8),
        candidate("nearly", 29.9, 0.955, 4.9e-8),
        candidate("beaten", 20.0, 0.95, 6e-8),
        candidate("quick", 2.0, 0.999, 1e-9),
        candidate("fine", 8.0, 0.993, 1e-8),
        candidate("broken", 90.0, 0.5, 1e-9),
        Measurement(key="failed", error="it did"),
    )
    found = Found((), (), rows, "budget spent")
    assert [m.key for m in kept(found, (0.94,), 9)] == ["quick", "fine", "nearly", "small"]
    assert [m.key for m in kept(found, (0.94,), 3)] == ["quick", "fine", "small"]
    assert [m.key for m in kept(found, (0.94,), 2)] == ["fine", "small"]
    assert [m.key for m in kept(found, (0.94,), 1)] == ["small"]


def test_rank_correlation_is_spearman_s() -> None:
    def measured(*pairs: tuple[float, float]) -> list[Measurement]:
        return [Measurement(key=str(i), cr_estimate=a, cr=b) for i, (a, b) in enumerate(pairs)]

    assert made.rank_correlation(measured((1, 2), (2, 3), (3, 9))) == pytest.approx(1.0)
    assert made.rank_correlation(measured((1, 9), (2, 3), (3, 1))) == pytest.approx(-1.0)
    assert made.rank_correlation(measured((1, 1), (2, 3), (3, 2), (4, 4))) == pytest.approx(0.8)
    assert made.rank_correlation(measured((1, 1), (2, 2))) is None


def test_kinds_with_a_single_text_have_no_record() -> None:
    metrics = {
        "continuation.quality@prose": (0.99, 0.98, 1.0),
        "continuation.samples@prose": (2.0, 2.0, 2.0),
        "continuation.quality@code": (0.99, 0.0, 1.0),
        "continuation.samples@code": (1.0, 1.0, 1.0),
    }
    m = Measurement(key="k", quality=0.99, quality_low=0.98, quality_high=1.0, cr=4.0, metrics=metrics, samples=3)
    found = made.profile_of(made.Kept("p", uniform(16).spec, m), "default", "continuation")
    assert {name: r.samples for name, r in found.quality.items()} == {"default": 3, "prose": 2}
