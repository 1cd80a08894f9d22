"""``kvserve simulate`` as it is called."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from kvserve_core.cli import main, specs
from kvserve_core.library import Profile, ProfileLibrary
from kvserve_core.settings import POLICY
from kvserve_core.simulate import plot
from kvserve_core.simulate import run as played
from kvserve_plugins.policies.analytic import Analytic
from simulated_worlds import library, profile

FAST = ["--requests", "60", "--seeds", "2", "--workers", "1"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    library().save(tmp_path / "m.kvlib")
    (tmp_path / "t.csv").write_text("time_s,bandwidth_gbps\n0,8\n5,80\n")
    return str(tmp_path / "m.kvlib"), str(tmp_path / "t.csv")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["simulate", *arguments])
    except SystemExit as error:
        code = int(error.code or 0)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_policies_are_compared(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    raw = '{"name": "static", "configuration": {"profile": "raw"}}'
    options = ["--library", files[0], "--trace", files[1], "--policy", "analytic", "--policy", raw, "--slo", "1s"]
    code, out, _ = run(capsys, *FAST, *options, "--min-quality", "0.4", "--workload", "x", "--json")
    found = json.loads(out)
    assert code == 0
    assert [p["policy"] for p in found["policies"]] == ["analytic", "static (profile=raw)"]
    assert (
        found["scenario"]["tenants"][0] | {"slo": 1.0, "min_quality": 0.4, "workload": "x"}
        == (found["scenario"]["tenants"][0])
    )
    assert found["seeds"] == [0, 1]
    assert "poor" in found["policies"][0]["profiles"]
    code, out, _ = run(capsys, *FAST, *options)
    assert code == 0
    assert "static (profile=raw)" in out


def test_a_trace_of_several_links_makes_a_tenant_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("time_s,bandwidth,link\n0,8Gbps,a\n0,80Gbps,b\n")
    _, out, _ = run(capsys, *FAST, "--trace", str(trace), "--json")
    assert [t["link"] for t in json.loads(out)["scenario"]["tenants"]] == ["a", "b"]


def test_a_scenario_with_options_on_top(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, trace = tmp_path / "s.toml", tmp_path / "t.csv"
    path.write_text('rate = 3\n[[links]]\nname = "wan"\n[[tenants]]\nname = "chat"\nlink = "wan"\n')
    trace.write_text("time_s,bandwidth,link\n0,8Gbps,wan\n")
    options = ["--scenario", str(path), "--rate", "5", "--slo", "2s", "--trace", str(trace), "--json"]
    _, out, _ = run(capsys, *FAST, *options)
    scenario = json.loads(out)["scenario"]
    assert (scenario["rate"], scenario["requests"], scenario["links"][0]["trace"]) == (5, 60, str(trace))
    assert (scenario["tenants"][0]["name"], scenario["tenants"][0]["slo"]) == ("chat", 2.0)


def test_the_requests_that_are_reported_are_those_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("time_s,tokens\n0,100\n1,200\n2,300\n")
    options = ["--arrivals", str(path), "--seeds", "2", "--workers", "1"]
    assert run(capsys, *options)[1].startswith("3 requests, 2 seeds")
    assert json.loads(run(capsys, *options, "--json")[1])["requests"] == 3
    assert run(capsys, *options, "--requests", "2")[1].startswith("2 requests")
    assert run(capsys, *options, "--requests", "9")[1].startswith("3 requests")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("links = 3", r"scenario\.links"),
        ("links = [3]", r"scenario\.links"),
        ('links = "wan"', r"scenario\.links"),
        ("[links]\nname = 'wan'", r"scenario\.links"),
        ("tenants = 3", r"scenario\.tenants"),
        ("tenants = [3]", r"scenario\.tenants"),
        ("tenants = []", r"scenario\.tenants"),
        ("engine = 3", r"scenario\.engine"),
        ("arrivals = 3", r"scenario\.arrivals"),
        ("[[tenants]]\nshare = 1e308", r"scenario\.tenants\.0\.share"),
        ("[[tenants]]\nshare = 1e-308", r"scenario\.tenants\.0\.share"),
        ("[[tenants]]\ntokens = {median = 1e300}", r"scenario\.tenants\.0\.tokens\.median"),
        ("[[tenants]]\ntokens = {high = 99999999999999999999}", r"scenario\.tenants\.0\.tokens\.high"),
        ("[engine]\nprefill_per_token = '1h'", r"scenario\.engine: a request of \d+ tokens"),
        ("[engine]\nbytes_per_token = 1e15", r"scenario\.engine: a request of \d+ tokens"),
        ("[speeds]\nbias = 1e3", r"scenario\.speeds\.bias"),
        ("[speeds]\ndrift_period = 1e-300", r"scenario\.speeds\.drift_period"),
    ],
)
@pytest.mark.parametrize("on_top", [(), ("--slo", "1s", "--trace", "TRACE")])
def test_a_malformed_scenario_is_one_line(
    text: str, message: str, on_top: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.toml").write_text(text)
    (tmp_path / "t.csv").write_text("time_s,bandwidth\n0,8Gbps\n")
    options = [str(tmp_path / "t.csv") if each == "TRACE" else each for each in on_top]
    code, out, err = run(capsys, *FAST, "--scenario", str(tmp_path / "s.toml"), *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "analytical"], "policy: .*'analytical'.*'analytic'"),
        (["--policy", "{nonsense"], "neither a name nor a spec in JSON"),
        (["--policy", '{"name": "static"}'], "policy.configuration.profile"),
        (["--trace", "no.csv"], "no.csv: cannot be read"),
        (["--scenario", "no.toml"], "no.toml: cannot be read as TOML"),
        (["--slo", "soon"], r"scenario.tenants.0.slo: .*'soon'"),
        (["--library", "no.kvlib"], "no.kvlib"),
        (["--rate", "1e-308"], r"scenario.rate: .*greater than or equal to"),
        (["--rate", "1e308"], r"scenario.rate: .*less than or equal to"),
        (["--requests", "1000000000000"], r"scenario.requests"),
        (["--slo", "1e300s"], r"scenario.tenants.0.slo"),
    ],
)
def test_errors_are_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *FAST, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert re.search(message, err)


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, *FAST, "--plot", "o.png")
    assert code == 2
    assert err == "error: a plot needs 'matplotlib'; pip install 'kvserve[profile]'\n"
    assert not Path("o.png").exists()


class Axes:
    """Stands in for matplotlib: keeps what is drawn."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def plot(self, x: list[float], y: list[float], **style: Any) -> None:
        assert len(x) == len(y)
        self.lines.append((style.get("label"), x, y))

    def twinx(self) -> Axes:
        self.other = Axes()
        return self.other

    def set(self, **_: Any) -> None: ...

    def legend(self) -> None: ...


class Pyplot:
    def __init__(self) -> None:
        self.axes = (Axes(), Axes())
        self.canvas = self

    def figure(self) -> Pyplot:
        return self

    def get_supported_filetypes(self) -> dict[str, str]:
        return {"png": "a picture", "what": "what savefig refuses all the same"}

    def subplots(self, *_: int, **__: Any) -> tuple[Pyplot, tuple[Axes, Axes]]:
        return self, self.axes

    def savefig(self, out: BytesIO, format: str, dpi: int) -> None:
        if format != "png":
            raise ValueError(f"Format {format!r} is not supported")
        out.write(b"a picture")

    def close(self, figure: Pyplot) -> None: ...


def test_what_a_plot_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = Pyplot()
    monkeypatch.setattr(plot, "pyplot", lambda: drawn)
    monkeypatch.setattr("kvserve_core.cli.simulate.pyplot", lambda: drawn)
    code, *_ = run(capsys, *FAST, "--plot", "o.png")
    left, right = drawn.axes
    assert (code, Path("o.png").read_bytes()) == (0, b"a picture")
    ((label, quantiles, shares),) = left.lines
    assert label == specs.label(POLICY), "the policy that serves where none is set"
    assert quantiles == sorted(quantiles)
    assert (shares[0], shares[-1]) == (0, 1)
    assert set(right.other.lines[0][2]) == {10.0}  # Gbps
    code, out, err = run(capsys, *FAST, "--plot", "o.what")
    assert (code, err) == (2, "error: o.what: cannot be written: Format 'what' is not supported\n")
    assert "60 requests, 2 seeds" in out, "the figures are not lost with the picture"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/o.png", "o.png: cannot be written: there is no folder 'no/such'"),
        ("o.txt", "o.txt: cannot be written: format 'txt' is not known, use one of png"),
        ("folder.png", "folder.png: cannot be written: it is a folder"),
    ],
)
def test_a_picture_that_cannot_be_written_is_found_out_before_the_work(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    monkeypatch.setattr("kvserve_core.cli.simulate.pyplot", Pyplot)
    monkeypatch.setattr("kvserve_core.cli.simulate.play", lambda *_: pytest.fail("it began to work"))
    code, out, err = run(capsys, *FAST, "--plot", name)
    assert (code, out) == (2, "")
    assert message in err


def test_a_real_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    out = tmp_path / "o.png"
    code, *_ = run(capsys, *FAST, "--plot", str(out))
    assert code == 0
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--trace", "--arrivals"])
@pytest.mark.parametrize("cell", ["9" * 5000, "1" + "0" * 400, "x" * 200_000, '"' + "y" * 200_000])
def test_a_cell_without_end_is_one_short_line(
    option: str, cell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f.csv"
    path.write_text(f"time_s,tokens,bandwidth\n0,{cell},{cell}\n")
    code, out, err = run(capsys, *FAST, option, str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "f.csv" in err
    assert len(err) < 1000


@pytest.mark.parametrize("rows", ["0,1e-300", "0,1e308", "0,1\n1e300,1"])
def test_a_trace_that_no_link_has_is_refused(rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"time_s,bandwidth\n{rows}\n")
    code, _, err = run(capsys, *FAST, "--trace", str(path))
    assert code == 2
    assert re.search(r"t\.csv: the (bandwidths|times) of a trace must", err)


def test_what_a_bandit_knows_is_read_and_left_as_it_is(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state" / "s.json"
    state.parent.mkdir()
    known = f'{{"version": 2, "library": "{ProfileLibrary.load(files[0]).digest}", "places": []}}'
    state.write_text(known)
    spec = {"name": "bandit", "configuration": {"state": str(state), "save_every": "1ms"}}
    code, out, _ = run(capsys, *FAST, "--library", files[0], "--policy", json.dumps(spec), "--json")
    assert (code, json.loads(out)["requests"]) == (0, 60)
    assert state.read_text() == known
    assert list(state.parent.iterdir()) == [state]
    assert "starts without" not in caplog.text


def test_a_policy_that_fails_is_told_from_one_that_chooses_raw(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no")

    static = '{"name": "static", "configuration": {"profile": "raw"}}'
    monkeypatch.setattr(Analytic, "choose", fail)
    options = [*FAST, "--policy", "analytic", "--policy", static]
    failed, chose = json.loads(run(capsys, *options, "--json")[1])["policies"]
    assert (failed["policy_failures"], failed["profiles"]) == (120, {"raw": 1.0})
    assert (chose["policy_failures"], chose["profiles"]) == (0, {"raw": 1.0})
    shown = run(capsys, *options)[1]
    assert "analytic: its policy failed 120 times; what it was asked then went raw" in shown
    assert shown.count("failed") == 1


def test_reports_that_nothing_was_learned_from_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text("time_s,bandwidth\n0,10\n")
    options = [*FAST, "--trace", str(tmp_path / "t.csv")]
    (found,) = json.loads(run(capsys, *options, "--json")[1])["policies"]
    assert found["refused_outcomes"] == 120
    assert "analytic: 120 reports could not be true" in run(capsys, *options, "--policy", "analytic")[1]


def test_tenants_that_name_no_workload_have_the_only_one_of_the_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def only(workload: str) -> Profile:
        return p.model_copy(update={"quality": {workload: p.quality["default"]}})

    p = profile("fast", 3.0, 40e9)
    (tmp_path / "s.toml").write_text('[[tenants]]\nname = "a"\nworkload = "code"\n[[tenants]]\nname = "b"\n')
    library().model_copy(update={"profiles": (only("qasper"),)}).save(tmp_path / "m.kvlib")
    options = [*FAST, "--json", "--library", str(tmp_path / "m.kvlib")]
    for more, workloads in (
        (["--scenario", str(tmp_path / "s.toml")], ["code", "qasper"]),
        (["--scenario", str(tmp_path / "s.toml"), "--workload", "math"], ["math", "math"]),
        ([], ["qasper"]),
    ):
        found = json.loads(run(capsys, *options, *more)[1])
        assert [t["workload"] for t in found["scenario"]["tenants"]] == workloads
    assert "fast" in found["policies"][0]["profiles"]


def test_files_that_a_spreadsheet_wrote_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"trace": "time_s,bandwidth\n0,8Gbps\n", "arrivals": "time_s,tokens\n0,9\n", "scenario": "rate = 3\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    options = [part for name in texts for part in (f"--{name}", str(tmp_path / name))]
    assert run(capsys, *FAST, *options)[0] == 0


def test_more_than_the_memory_holds_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def large(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(played, "draw", large)
    code, _, err = run(capsys, *FAST)
    text = "error: seed 0 needs more memory than there is; simulate fewer requests, or with fewer workers\n"
    assert (code, err) == (2, text)


INTERRUPTIBLE = """import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that runs in the background ignores it
if __name__ == "__main__":
    from kvserve_core.cli import main
    main(sys.argv[1:])
"""


@contextmanager
def simulating() -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A long simulation in a process group of its own, and its two workers; all of them are gone in the end."""
    options = ["--requests", "3000000", "--seeds", "2", "--workers", "2"]
    started = [sys.executable, "-c", INTERRUPTIBLE, "simulate", *options]
    process = subprocess.Popen(started, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        while len(workers := children(process.pid)) < 2 and process.poll() is None:
            time.sleep(0.05)
        yield process, workers
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_an_interrupt_ends_all_processes_at_once(tmp_path: Path) -> None:
    """As a terminal does it: every process of the group gets the signal."""
    with simulating() as (process, workers):
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode != 0
        assert len(workers) == 2
        assert "Process SpawnProcess" not in err, "no child has anything to say"
        assert [worker for worker in workers if runs(worker)] == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_worker_outlives_the_process_that_started_it(number: int, code: int) -> None:
    """As a scheduler does it: only the process that it knows of gets the signal."""
    with simulating() as (process, workers):
        process.send_signal(number)
        _, err = process.communicate(timeout=60)  # whoever lives holds its stderr open
        assert (process.returncode, len(workers)) == (code, 2)
        assert "Traceback" not in err
        assert [worker for worker in workers if runs(worker)] == []


def children(pid: int) -> list[str]:
    """Spawned workers; multiprocessing's resource tracker is a child too."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def runs(pid: str) -> bool:
    """Whether a process is there and is not one that only waits to be counted as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
