"""``kvserve explain``: the decision, its figures, and the picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller_cases import FREE_RAW, GBPS, library, profile
from kvserve_core.cli import explain_plot
from kvserve_core.errors import UnavailableComponentError
from kvserve_core.library import ProfileLibrary
from kvserve_core.policy import Decision
from kvserve_plugins.policies.analytic import Analytic

ASKED = ("explain", "--bytes", "56MiB", "--bandwidth", "5Gbps")
KVServe = Callable[..., Any]


@pytest.fixture
def path(tmp_path: Path) -> str:
    made = library(
        FREE_RAW,
        profile("slow9", 8.62, 12e9),
        profile("fast5", 5.11, 26e9),
        profile("poor", 20.0, 26e9, lower=0.5),
        profile("never", 2.0, 1e9),
    )
    made.save(tmp_path / "m.kvlib")
    return str(tmp_path / "m.kvlib")


def test_every_profile_appears_with_its_figures_or_what_it_is_left_out_by(path: str, kvserve: KVServe) -> None:
    done = kvserve(*ASKED, "--library", path, "--slo", "50ms", "--model-time", "5ms", "--json")
    assert done.code == 0
    found = done.json
    assert (found["profile"], found["reason"]) == ("slow9", "fastest")
    by_name = {c["profile"]: c for c in found["candidates"]}
    assert [c["latency_s"] for c in found["candidates"]] == sorted(c["latency_s"] for c in found["candidates"])
    assert set(by_name) == {"raw", "lossless", "slow9", "fast5", "never"}
    best = by_name["slow9"]
    nbytes = 56 * 2**20
    assert best["latency_s"] == pytest.approx(0.005 + 2 * nbytes / 12e9 + nbytes / 8.62 / (5 * GBPS))
    assert best["pays_below"] == pytest.approx((1 - 1 / 8.62) * 6e9)
    assert (best["chosen"], best["meets_slo"], by_name["raw"]["meets_slo"]) == (True, True, False)
    assert found["rejected"] == [{"profile": "poor", "reason": "quality 0.5 (lower bound) is below 0.99"}]
    assert [e["profile"] for e in found["envelope"]] == ["raw", "fast5", "slow9"]
    assert found["envelope"][0]["below"] is None


def test_the_text_says_the_same(path: str, kvserve: KVServe) -> None:
    done = kvserve(*ASKED, "--library", path, "--slo", "50ms")
    assert done.out.startswith("slow9: fastest (")
    for text in ("*  slow9", "misses the SLO", "not offered here", "- poor: quality 0.5", "fastest: raw, fast5 below"):
        assert text in done.out


def test_a_lower_floor_lets_more_in(path: str, kvserve: KVServe) -> None:
    assert kvserve(*ASKED, "--library", path, "--min-quality", "0.4", "--json").json["profile"] == "poor"


def test_without_a_policy_it_is_the_one_that_serves(tmp_path: Path, kvserve: KVServe) -> None:
    """Which does not think a gain of 1 % worth a loss."""
    rate = 5 * GBPS
    library(FREE_RAW, profile("barely", 2.0, 4.0 * rate / 0.98)).save(tmp_path / "m.kvlib")
    options = (*ASKED, "--library", str(tmp_path / "m.kvlib"), "--json")
    chosen = {more: kvserve(*options, *more).json["profile"] for more in ((), ("--policy", "analytic"))}
    assert chosen == {(): "raw", ("--policy", "analytic"): "barely"}


def test_stages_may_overlap(path: str, kvserve: KVServe) -> None:
    whole, chunked = (kvserve(*ASKED, "--library", path, *more, "--json").json for more in ((), ("--chunk", "1MiB")))
    assert chunked["candidates"][0]["latency_s"] < whole["candidates"][0]["latency_s"]


def latency_at(found: dict[str, Any], name: str) -> float:
    return float(next(c["latency_s"] for c in found["candidates"] if c["profile"] == name))


def at_bandwidth(path: str, kvserve: KVServe, bytes_per_s: float) -> dict[str, Any]:
    arguments = ("explain", "--bytes", "56MiB", "--bandwidth", f"{bytes_per_s * 8:.6f}bps", "--library", path)
    return dict(kvserve(*arguments, "--chunk", "8MiB", "--json").json)


def test_overlapped_stages_pay_where_the_overlapped_times_cross(path: str, kvserve: KVServe) -> None:
    """Theorem 6.1 is about stages in turn; in overlap a profile pays at higher bandwidths, and this says at which."""
    found = kvserve(*ASKED, "--library", path, "--chunk", "8MiB", "--json").json
    limits = {c["profile"]: c["pays_below"] for c in found["candidates"]}
    assert limits["slow9"] > 1.2 * (1 - 1 / 8.62) * 6e9
    for name in ("slow9", "fast5", "never"):
        below, above = (at_bandwidth(path, kvserve, limits[name] * factor) for factor in (0.99, 1.01))
        assert latency_at(below, name) < latency_at(below, "raw")
        assert latency_at(above, name) > latency_at(above, "raw")
    tops = [e["below"] for e in found["envelope"][1:]]
    assert tops == sorted(tops, reverse=True)
    for (over, under), top in zip(pairwise(e["profile"] for e in found["envelope"]), tops, strict=True):
        assert at_bandwidth(path, kvserve, top * 1.01)["candidates"][0]["profile"] == over
        assert at_bandwidth(path, kvserve, top * 0.99)["candidates"][0]["profile"] == under


def test_a_bandit_shows_what_it_has_learned(path: str, tmp_path: Path, kvserve: KVServe) -> None:
    arm = {"count": 2.0, "seen": 1.0, "s_per_byte": 1e-9, "nbytes": 1e8, "squares": 1e16, "at": 1, "until_s": 0.0}
    place = {"bucket": ["default", None, "slow9"], "outcomes": 1, "decisions": 1, "age_s": 0.0}
    place["arms"] = {"slow9": {"recent": 0, "time_s": 0.0} | arm}
    digest = ProfileLibrary.load(path).digest
    (tmp_path / "s.json").write_text(json.dumps({"version": 2, "library": digest, "places": [place]}))
    spec = {"name": "bandit", "configuration": {"state": str(tmp_path / "s.json"), "epsilon": 0, "epsilon_floor": 0}}
    found = kvserve(*ASKED, "--library", path, "--policy", json.dumps(spec), "--json").json
    assert found["profile"] == "fast5"
    residuals = {c["profile"]: c["residual_s"] for c in found["candidates"]}
    assert residuals["slow9"] == pytest.approx(56 * 2**20 * 1e-9, rel=0.01)
    assert residuals["raw"] is None


class Told(Analytic):
    """Answers ``told`` when it is asked what it has learned."""

    told: Any = None

    def residuals(self, decision: Decision) -> Any:
        if isinstance(self.told, Exception):
            raise self.told
        return self.told


@pytest.mark.parametrize(
    "told", [None, RuntimeError("no"), {"slow9": "much"}, {"slow9": float("nan")}, {"slow9": float("inf")}], ids=repr
)
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_policy_that_cannot_say_what_it_learned_has_learned_nothing(
    told: Any, more: tuple[str, ...], path: str, monkeypatch: pytest.MonkeyPatch, kvserve: KVServe
) -> None:
    monkeypatch.setattr(Analytic, "residuals", Told.residuals)
    monkeypatch.setattr(Analytic, "told", told, raising=False)
    done = kvserve(*ASKED, "--library", path, *more)
    assert done.code == 0
    if more:
        assert {c["residual_s"] for c in done.json["candidates"]} == {None}


def measured_on(*workloads: str) -> ProfileLibrary:
    record = profile("p", 8.0, 12e9).quality["default"]
    return library(FREE_RAW, profile("p", 8.0, 12e9).model_copy(update={"quality": dict.fromkeys(workloads, record)}))


@pytest.mark.parametrize(
    ("workloads", "more", "chosen", "counted"),
    [
        (["qasper"], (), "p", "qasper"),
        (["qasper"], ("--workload", "code"), "raw", "code"),
        (["code", "qasper"], (), "raw", "default"),
        (["code", "default"], (), "p", "default"),
        ([], (), "raw", "default"),
    ],
)
def test_without_a_workload_it_is_that_of_the_library(
    workloads: list[str], more: tuple[str, ...], chosen: str, counted: str, tmp_path: Path, kvserve: KVServe
) -> None:
    measured_on(*workloads).save(tmp_path / "m.kvlib")
    options = (*ASKED, "--library", str(tmp_path / "m.kvlib"), *more)
    found = kvserve(*options, "--json").json
    assert (found["profile"], found["request"]["workload"]) == (chosen, counted)
    assert f"bytes of {counted!r} at 5 Gbps" in kvserve(*options).out
    if chosen == "raw":
        known = ", ".join(map(repr, workloads)) or "none"
        assert f"no quality record for workload {counted!r} (measured: {known})" in found["rejected"][0]["reason"]


def test_records_that_stand_in_for_a_workload_are_named(tmp_path: Path, kvserve: KVServe) -> None:
    measured_on("code", "default").save(tmp_path / "m.kvlib")
    options = (*ASKED, "--library", str(tmp_path / "m.kvlib"))
    note = "workload 'cdoe' was not measured and is judged by the records of 'default' (measured: 'code', 'default')"
    found = kvserve(*options, "--workload", "cdoe", "--json").json
    assert found["note"].startswith(note)
    assert f"- {note}" in kvserve(*options, "--workload", "cdoe").out
    for known in ("code", "default"):
        assert kvserve(*options, "--workload", known, "--json").json["note"] is None


def test_without_a_library_there_are_raw_and_lossless(kvserve: KVServe) -> None:
    assert {c["profile"] for c in kvserve(*ASKED, "--json").json["candidates"]} == {"raw", "lossless"}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--slo", "soon"), "soon"),
        (("--min-quality", "7"), "is no quality"),
        (("--policy", "analitic"), "did you mean 'analytic'"),
        (("--policy", "{"), "neither a name nor a spec in JSON"),
        (("--chunk", "0B"), "no size of a chunk"),
        (("--bandwidth", "1e-300bps"), "bandwidth: 1.25e-301 is out of range; expected from 0.001 to 1e+15 bytes/s"),
        (("--bandwidth", "1e17bps"), "bandwidth: 1.25e+16 is out of range; expected from 0.001 to 1e+15 bytes/s"),
        (("--slo", "1e16s"), "slo_s: 1e+16 is out of range; expected a number of s up to 1e+15"),
    ],
)
def test_what_cannot_be_is_one_line(more: tuple[str, ...], text: str, kvserve: KVServe) -> None:
    done = kvserve(*ASKED, *more)
    assert done.code == 2
    assert text in done.err
    assert done.err.startswith("error: ")


# -- the picture -----------------------------------------------------------------------------------------------------


class Axes:
    """Stands in for matplotlib: keeps what is drawn."""

    def __init__(self) -> None:
        self.drawn: dict[str, tuple[list[float], list[float]]] = {}
        self.marks: list[tuple[float, float]] = []
        self.levels: list[float] = []
        self.canvas = self

    def plot(self, x: Any, y: Any, *_: str, label: str | None = None, **__: Any) -> None:
        if label is None:
            self.marks.append((x[0], y[0]))
        else:
            self.drawn[label] = (list(x), list(y))

    def axhline(self, y: float, **_: Any) -> None:
        self.levels.append(y)

    def set(self, **_: Any) -> None: ...

    def legend(self, **_: Any) -> None: ...

    def subplots(self, **_: Any) -> tuple[Axes, Axes]:
        return self, self

    def figure(self) -> Axes:
        return self

    def get_supported_filetypes(self) -> dict[str, str]:
        return {"png": "a picture", "pgf": "what needs a program that is not there"}

    def savefig(self, out: BytesIO, format: str, dpi: int) -> None:
        if format != "png":
            raise RuntimeError("xelatex not found")
        out.write(b"a picture")

    def close(self, figure: Axes) -> None: ...


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> Axes:
    made = Axes()
    monkeypatch.setattr(explain_plot, "pyplot", lambda: made)
    monkeypatch.setattr("kvserve_core.cli.explain.pyplot", lambda: made)
    return made


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    return tmp_path / "o.png"


def test_the_picture_holds_lines_envelope_thresholds_slo_and_choice(
    axes: Axes, path: str, picture: Path, kvserve: KVServe
) -> None:
    assert kvserve(*ASKED, "--library", path, "--slo", "50ms", "--plot", str(picture)).code == 0
    assert picture.read_bytes() == b"a picture"
    assert set(axes.drawn) == {*("raw", "lossless", "slow9", "fast5", "never"), "envelope", "choice: slow9"}
    names = ("raw", "lossless", "slow9", "fast5", "never")
    every = zip(*(axes.drawn[name][1] for name in names), strict=True)
    assert axes.drawn["envelope"][1] == [min(each) for each in every]
    rates = axes.drawn["raw"][0]
    assert (rates[0], rates[-1]) == (pytest.approx(1.0), pytest.approx(1000.0))
    assert axes.drawn["choice: slow9"][0] == [5.0]
    assert axes.levels == [pytest.approx(50.0)]
    limit, latency_ms = axes.marks[-2]
    raw_ms = 1e3 * 56 * 2**20 / (limit * GBPS)
    assert latency_ms == pytest.approx(raw_ms), "where it crosses raw"


def test_the_ticks_of_overlapped_stages_are_where_they_cross_raw(
    axes: Axes, path: str, picture: Path, kvserve: KVServe
) -> None:
    assert kvserve(*ASKED, "--library", path, "--chunk", "8MiB", "--plot", str(picture)).code == 0
    rates, raw_ms = axes.drawn["raw"]
    assert len(axes.marks) >= 3
    for limit, latency_ms in axes.marks:
        assert latency_ms == pytest.approx(float(np.interp(limit, rates, raw_ms)), rel=0.01)


@pytest.mark.parametrize(
    ("name", "message"),
    [("o.what", "format 'what' is not known, use one of png, pgf"), ("no/such/o.png", "there is no folder 'no/such'")],
)
def test_a_picture_that_cannot_be_written_is_found_out_before_the_work(
    name: str, message: str, axes: Axes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvserve: KVServe
) -> None:
    monkeypatch.chdir(tmp_path)
    done = kvserve(*ASKED, "--library", "none", "--plot", name)
    assert (done.code, done.out, done.err) == (2, "", f"error: {name}: cannot be written: {message}\n")


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_picture_that_fails_all_the_same_costs_nobody_the_answer(
    more: tuple[str, ...], axes: Axes, tmp_path: Path, kvserve: KVServe
) -> None:
    done = kvserve(*ASKED, *more, "--plot", str(tmp_path / "o.pgf"))
    assert (done.code, done.err) == (2, f"error: {tmp_path}/o.pgf: cannot be written: xelatex not found\n")
    assert "fastest" in done.out
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, kvserve: KVServe) -> None:
    def missing() -> None:
        raise UnavailableComponentError("a plot needs 'matplotlib'; pip install 'kvserve[profile]'")

    monkeypatch.setattr("kvserve_core.cli.explain.pyplot", missing)
    done = kvserve(*ASKED, "--plot", "o.png")
    assert done.out == ""
    assert done.code == 2
    assert "pip install 'kvserve[profile]'" in done.err


def test_a_real_picture(path: str, tmp_path: Path, kvserve: KVServe) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    out = tmp_path / "o.png"
    assert kvserve(*ASKED, "--library", path, "--plot", str(out)).code == 0
    assert out.read_bytes().startswith(b"\x89PNG")
