"""``kvserve simulate`` as it is called."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kvserve_core.cli import main
from kvserve_core.simulate import plot
from simulated_worlds import library

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
        self.saved: list[Path] = []

    def subplots(self, *_: int, **__: Any) -> tuple[Pyplot, tuple[Axes, Axes]]:
        return self, self.axes

    def savefig(self, out: Path, dpi: int) -> None:
        if out.suffix != ".png":
            raise ValueError(f"Format {out.suffix!r} is not supported")
        self.saved.append(out)

    def close(self, figure: Pyplot) -> None: ...


def test_what_a_plot_holds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = Pyplot()
    monkeypatch.setattr(plot, "pyplot", lambda: drawn)
    monkeypatch.setattr("kvserve_core.cli.simulate.pyplot", lambda: drawn)
    code, *_ = run(capsys, *FAST, "--plot", "o.png")
    left, right = drawn.axes
    assert (code, drawn.saved) == (0, [Path("o.png")])
    ((label, quantiles, shares),) = left.lines
    assert label == "analytic"
    assert quantiles == sorted(quantiles)
    assert (shares[0], shares[-1]) == (0, 1)
    assert set(right.other.lines[0][2]) == {10.0}  # Gbps
    code, _, err = run(capsys, *FAST, "--plot", "o.what")
    assert (code, err) == (2, "error: o.what: cannot be written: Format '.what' is not supported\n")


def test_a_real_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    out = tmp_path / "o.png"
    code, *_ = run(capsys, *FAST, "--plot", str(out))
    assert code == 0
    assert out.read_bytes().startswith(b"\x89PNG")
