from __future__ import annotations

import ast
import inspect
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

import pytest

from kvserve_core import hookspecs
from kvserve_core.component import API_VERSION, KINDS, Component
from kvserve_core.plugins import ENTRY_POINT_GROUP
from kvserve_core.registry import BASES

TEXT = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return [part.partition("```")[0] for part in TEXT.split(f"```{language}\n")[1:]]


@pytest.mark.parametrize("name", hookspecs.HOOKS)
def test_each_hook_stands_in_the_document_with_its_signature(name: str) -> None:
    assert f"### `{name}{inspect.signature(getattr(hookspecs, name))}`".replace("'", "") in TEXT


def test_the_document_has_no_other_hooks() -> None:
    headings = [line for line in TEXT.splitlines() if line.startswith("### ")]
    assert len(headings) == len(hookspecs.HOOKS)


def test_there_is_one_hook_per_kind_and_each_is_documented_in_code() -> None:
    assert tuple(hookspecs.HOOKS.values()) == KINDS
    for name in hookspecs.HOOKS:
        spec = getattr(hookspecs, name)
        assert spec() == ()
        assert spec.__doc__
        assert get_args(inspect.get_annotations(spec, eval_str=True)["return"]) == (Component,)


@pytest.mark.parametrize("kind", BASES)
def test_the_base_class_of_each_kind_is_named(kind: Any) -> None:
    assert f"`kvserve_core.{BASES[kind].partition(':')[2]}`" in TEXT


def test_the_manifest_s_fields_and_defaults_are_as_written() -> None:
    shown = [f.name if f.default is MISSING else f"{f.name}={f.default!r}".replace("'", '"') for f in fields(Component)]
    assert f"Component({', '.join(shown)})" in TEXT
    assert f"this is {API_VERSION} |" in TEXT
    for field in fields(Component):
        assert f"| `{field.name}` |" in TEXT


def test_the_plugin_in_the_document_runs() -> None:
    code = blocks("python")[0]
    names: dict[str, Any] = {}
    exec(compile(ast.parse(code), "hooks.md", "exec"), names)
    (component,) = names["kvserve_codecs"]()
    assert (component.name, component.requires) == ("acme.rle", ("numpy",))
    assert tomllib.loads(blocks("toml")[0])["project"]["entry-points"] == {ENTRY_POINT_GROUP: {"acme": "acme"}}
