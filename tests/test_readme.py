"""The README tells the truth: its example runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvserve_core.cli import COMMANDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_example_runs_and_compresses(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert float(capsys.readouterr().out.strip().rstrip("x")) > 3
    kv, restored = names["kv"], names["restored"]
    assert all((kv[at].float() - x.float()).abs().max() < 1 for at, x in restored)


def test_the_example_is_short() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    statements = [line for line in block.splitlines() if line and not re.match(r"import |from ", line)]
    assert len(statements) <= 10


def test_every_command_is_listed() -> None:
    listed = set(re.findall(r"^\| `kvserve ([a-z-]+)", README, re.MULTILINE))
    assert listed == set(COMMANDS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


def test_the_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z]+)`?\n", README)) | {"venv"} <= targets
