from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

from kvserve_core.cli import COMMANDS
from kvserve_core.settings import RESERVED, Settings, load_settings

DOCS = Path(__file__).parents[2] / "docs"


def test_the_document_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate_cli", DOCS / "generate_cli.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert written == module.document(), "run: python docs/generate_cli.py"


def test_it_holds_every_command_setting_and_variable() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"## kvserve {name}\n" in text
    for name in Settings.model_fields:
        assert f"`{name}`" in text or f"`{name}." in text
    for variable in RESERVED:
        assert f"`{variable}`" in text


def test_the_settings_file_in_it_loads(tmp_path: Path) -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8").split("```toml\n")[1].partition("```")[0]
    path = tmp_path / "kv.toml"
    path.write_text(text, encoding="utf-8")
    settings = load_settings(None, {}, path).settings
    assert settings.transport.spec().configuration == tomllib.loads(text)["transport"]["tcp"]
