"""The pytest classes, in a pytest of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[[str], str]
ROOT = Path(__file__).parents[2]
HEAD = """
from kvserve_core.artefacts import Artefacts
from kvserve_core.testing import CodecTests, PolicyTests, QuantizerTests, TransformTests, TransportTests
import pytest
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs pytest on a file of this text and gives its output. The plugin is loaded as the entry point would."""

    def go(text: str) -> str:
        path = tmp_path / "test_it.py"
        path.write_text(HEAD + text, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-rA", "-W", "error", "-p", "no:cacheprovider"]
        command += ["-p", "loads_the_plugin", str(path)]
        shim = "from kvserve_core.testing.plugin import artefacts as artefacts\n"
        (tmp_path / "loads_the_plugin.py").write_text(shim, encoding="utf-8")
        environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environ, cwd=tmp_path, timeout=120
        )
        return done.stdout + done.stderr

    return go


def test_one_subclass_gives_the_checks_of_its_kind(run: Run) -> None:
    said = run("class TestIt(CodecTests):\n    component = 'raw'\n")
    assert "PASSED test_it.py::TestIt::test_conforms[round_trip]" in said
    assert "PASSED test_it.py::TestIt::test_conforms[corruption]" in said
    assert "failed" not in said
    assert "head_dims" not in said


def test_configurations_bounds_and_kinds(run: Run) -> None:
    said = run(
        "class TestUniform(QuantizerTests):\n"
        "    component = 'uniform'\n"
        "    configurations = ({'levels': 4}, None)\n"
        "    def max_error(self, x, config):\n"
        "        return 0.0 if config.levels == 4 else None\n"
        "class TestPolicy(PolicyTests):\n"
        "    component = 'analytic'\n"
        "class TestMemory(TransportTests):\n"
        "    component = 'memory'\n"
    )
    assert "FAILED test_it.py::TestUniform::test_conforms[head_dims-levels=4]" in said
    assert "above max_error" in said
    assert "PASSED test_it.py::TestUniform::test_conforms[head_dims-default]" in said
    assert "PASSED test_it.py::TestPolicy::test_conforms[chooses_a_candidate]" in said
    assert "PASSED test_it.py::TestMemory::test_conforms[releases]" in said


def test_what_cannot_be_created_fails_in_each_test_and_not_at_collection(run: Run) -> None:
    said = run("class TestIt(TransformTests):\n    component = 'hadamart'\n")
    assert "did you mean 'hadamard'?" in said
    assert "FAILED test_it.py::TestIt::test_conforms[configuration]" in said
    assert "error" not in said.splitlines()[-1]


def test_files_come_from_the_fixture(run: Run) -> None:
    scores = "[[0.1, 0.9, 0.2, 0.8], [0.7, 0.3, 0.6, 0.4], [0.5, 0.05, 0.95, 0.15]]"
    suite = (
        f"FILES = Artefacts()\nHASH = FILES.add(b'{scores}')\n"
        "class TestIt(QuantizerTests):\n"
        "    component = 'mixhq'\n"
        "    configurations = ({'scores_artefact': HASH},)\n"
    )
    assert "SKIPPED" in (without := run(suite))
    assert "no calibrated files" in without or "none were given" in without
    given = run(suite + "@pytest.fixture\ndef artefacts():\n    return FILES\n")
    assert "PASSED test_it.py::TestIt::test_conforms[kinds_of_values]" in given
    assert "SKIPPED" not in given
