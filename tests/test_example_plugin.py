"""The example package, and three bad ones, pip-installed into an environment of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any

import pytest

from plugin_folders import FOLDER, points

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "examples" / "kvserve-example"
GUIDE = ROOT / "docs" / "writing-a-plugin.md"
BAD = ("import_error", "misspelt", "duplicate")
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1"
dependencies = ["kvserve"]

[project.entry-points.kvserve]
{points}

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    environ |= {"KVSERVE_DISABLED_PLUGINS": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=cwd, env=environ, timeout=300
    )


def real_package(name: str, into: Path) -> Path:
    """A fake plugin as a folder that pip can install."""
    package = f"acme_{name}"
    folder = into / name
    shutil.copytree(FOLDER / name / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    declared = EntryPoints(points(name))
    lines = "\n".join(f'{point.name} = "{point.value}"' for point in declared)
    text = PYPROJECT.format(name=package.replace("_", "-"), package=package, points=lines)
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that sees everything installed here, with the four packages on top; its folder."""
    folder = tmp_path_factory.mktemp("example")
    made = run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    assert made.returncode == 0, made.stderr
    site = sysconfig.get_path("purelib", vars={"base": str(folder / "venv")})
    ours = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    seen = "; ".join(f"site.addsitedir({path!r})" for path in ours)
    (Path(site) / "_outer.pth").write_text(f"import site; {seen}\n", encoding="utf-8")
    shutil.copytree(EXAMPLE, folder / "kvserve-example", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    packages = [folder / "kvserve-example", *(real_package(name, folder) for name in BAD)]
    pip = ("-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation")
    done = run(python(folder), *pip, *packages, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def python(folder: Path) -> Path:
    return folder / "venv" / "bin" / "python"


@pytest.fixture(scope="module")
def rows(scratch: Path) -> list[dict[str, Any]]:
    """What is listed there."""
    done = run(python(scratch), "-m", "kvserve_core.cli", "list-components", "--json", cwd=scratch)
    assert done.returncode == 0, done.stderr
    listed: list[dict[str, Any]] = json.loads(done.stdout)
    return listed


def about(rows: list[dict[str, Any]], kind: str, name: str, provider: str) -> dict[str, Any]:
    (row,) = [r for r in rows if (r["kind"], r["name"], r["provider"]) == (kind, name, provider)]
    return row


def test_the_example_is_listed_with_its_source(rows: list[dict[str, Any]]) -> None:
    sign = about(rows, "quantizer", "example.sign", "kvserve-example")
    assert (sign["status"], sign["reason"], sign["version"]) == ("ok", "", "1.0.0")
    assert sign["source"] == "kvserve_example/sign.py"
    rle = about(rows, "codec", "example.rle", "kvserve-example")
    assert (rle["status"], rle["source"]) == ("ok", "kvserve_example/rle.py")
    assert rle["summary"] == "Run-length codes: a value and how often it is repeated."


def test_a_plugin_that_cannot_be_imported_is_a_row_with_the_reason(rows: list[dict[str, Any]]) -> None:
    row = about(rows, "plugin", "lost", "acme-import-error")
    assert row["status"] == "broken"
    assert "acme_module_that_is_not_there" in row["reason"]


def test_a_misspelt_hook_is_a_row_with_the_nearest_name(rows: list[dict[str, Any]]) -> None:
    reasons = [r["reason"] for r in rows if r["provider"] == "acme-misspelt" and r["status"] == "broken"]
    assert any("'kvserve_codec'" in reason and "'kvserve_codecs'" in reason for reason in reasons), reasons
    assert about(rows, "transform", "misspelt.right", "acme-misspelt")["status"] == "ok"


def test_a_taken_name_is_broken_and_the_built_in_stays(rows: list[dict[str, Any]]) -> None:
    taken = about(rows, "policy", "static", "acme-duplicate")
    assert taken["status"] == "broken"
    assert "already provided by 'kvserve'" in taken["reason"]
    assert about(rows, "policy", "static", "kvserve")["status"] == "ok"


def test_bad_neighbours_take_nothing_from_the_others(rows: list[dict[str, Any]]) -> None:
    ours = [row for row in rows if row["provider"] == "kvserve"]
    assert len(ours) > 10
    assert {row["status"] for row in ours} <= {"ok", "unavailable"}


def test_the_example_s_own_tests_pass(scratch: Path) -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    done = run(python(scratch), *command, cwd=scratch / "kvserve-example")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted is not None
    assert int(counted[1]) > 40
    assert "skipped" not in done.stdout


def test_check_needs_no_test_file(scratch: Path) -> None:
    command = ("-m", "kvserve_core.cli", "check", "example.sign", "--config", '{"axis": "channel"}', "--json")
    done = run(python(scratch), *command, cwd=scratch)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {each["status"] for each in json.loads(done.stdout)["checks"]} == {"ok"}


def blocks() -> list[tuple[str, str]]:
    """Each file that the guide shows, and its text there."""
    text = GUIDE.read_text(encoding="utf-8")
    return re.findall(r"^`(examples/\S+)`:\n\n```\w+\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_guide_shows_the_files_as_they_are() -> None:
    shown = dict(blocks())
    package = [p for p in EXAMPLE.rglob("*") if p.suffix in {".py", ".toml"}]
    assert set(shown) == {str(p.relative_to(ROOT / "docs")) for p in package}
    for name, text in shown.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, f"{name} and {GUIDE.name} differ"


def test_the_guide_names_what_exists() -> None:
    from kvserve_core.testing.suites import ComponentTests

    table = GUIDE.read_text(encoding="utf-8").partition("| attribute | meaning |")[2]
    named = re.findall(r"`(\w+)(?:\([^)]*\))?`(?:,|\s\|)", table.partition("\n\n")[0])
    for name in named:
        assert name == "artefacts" or hasattr(ComponentTests, name) or name in ComponentTests.__annotations__, name
    assert {"component", "configurations", "max_error", "golden", "model", "plane", "sample"} <= set(named)
