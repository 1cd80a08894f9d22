"""Scenarios: what a file may say, and how it is told what is wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvserve_core.errors import ConfigError
from kvserve_core.simulate.run import world
from kvserve_core.simulate.scenario import Scenario, parse_scenario, read_scenario


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(
        'rate = 3\n[[links]]\nname = "wan"\ntrace = "t.csv"\noverhead = "2ms"\n[[tenants]]\nlink = "wan"\nslo = "1s"\n'
    )
    (tmp_path / "t.csv").write_text("time_s,bandwidth,link\n0,8Gbps,wan\n")
    found = parse_scenario(read_scenario(path))
    assert (found.rate, found.links[0].overhead, found.tenants[0].slo) == (3, 0.002, 1)
    assert world(found, None).traces[0].rate(0) == 1e9


def test_the_file_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text(encoding="utf-8")
    found = parse_scenario(tomllib.loads(text.split("```toml\n")[1].partition("```")[0]))
    assert [t.link for t in found.tenants] == ["rack", "wan"]
    assert found.engine.prefill_per_token == pytest.approx(50e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rates": 1}, r"scenario\.rates: .*did you mean 'rate'"),
        ({"requests": 0}, r"scenario\.requests"),
        ({"links": [{"bandwidth": "quick"}]}, r"scenario\.links\.0\.bandwidth: .*'quick'"),
        ({"tenants": [{"slo": -1}]}, r"scenario\.tenants\.0\.slo"),
        ({"tenants": [{"link": "wan"}]}, r"uses link 'wan', but the links are \['default'\]"),
        ({"links": [{}, {}]}, "link names must differ"),
        ({"tenants": [{}, {}]}, "tenant names must differ"),
        ({"speeds": {"drift": 1}}, r"scenario\.speeds\.drift"),
        ({"links": []}, r"scenario\.links"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_scenario(given)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        read_scenario(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("= 1")
    with pytest.raises(ConfigError, match=r"bad\.toml: cannot be read as TOML"):
        read_scenario(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match=r"no\.csv: cannot be read"):
        world(Scenario.model_validate({"links": [{"trace": tmp_path / "no.csv"}]}), None)
    (tmp_path / "t.csv").write_text("time_s,bandwidth,link\n0,8Gbps,wan\n")
    with pytest.raises(ConfigError, match=r"holds no link 'default', only \['wan'\]"):
        world(Scenario.model_validate({"links": [{"trace": tmp_path / "t.csv"}]}), None)
