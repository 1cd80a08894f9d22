from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest

from kvserve_core.component import Component, ComponentConfig
from kvserve_core.registry import summary_of

HOOKS = {"transforms": "kvserve_transforms", "quantizers": "kvserve_quantizers", "codecs": "kvserve_codecs"}


def declared() -> Iterator[Component]:
    for folder, hook in HOOKS.items():
        yield from getattr(import_module(f"kvserve_plugins.{folder}"), hook)()


@pytest.mark.parametrize("component", list(declared()), ids=lambda c: c.target)
def test_a_summary_is_the_first_docstring_line(component: Component) -> None:
    module, _, name = component.target.partition(":")
    cls = getattr(import_module(module), name)
    assert component.summary == summary_of(cls)
    assert 0 < len(component.summary) <= 90
    assert issubclass(cls.Config, ComponentConfig)
    assert cls.Config is not ComponentConfig


def test_declaring_imports_no_torch() -> None:
    modules = ", ".join(f"kvserve_plugins.{folder}" for folder in HOOKS)
    probe = f"import sys, {modules}; assert not {{'torch', 'zstandard'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
