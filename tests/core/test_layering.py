from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import kvserve_core

HEAVY = ("torch", "transformers", "triton", "zmq")
REPORT = f"""
import sys
loaded = [m for m in {HEAVY!r} if m in sys.modules]
print("loaded:", loaded, file=sys.stderr)
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("command", [["list-components", "--json"], ["list-components"], ["--help"], ["--version"]])
def test_light_commands_import_no_torch(command: list[str]) -> None:
    done = python(
        "-c", f"from kvserve_core.cli import main\ntry:\n    main({command!r})\nfinally:\n    exec({REPORT!r})"
    )
    assert done.returncode == 0
    assert done.stderr.strip() == "loaded: []"
    assert done.stdout


def test_the_module_form_imports_no_torch_either() -> None:
    code = (
        "import runpy, sys\nsys.argv = ['kvserve', 'list-components', '--json']\n"
        f"try:\n    runpy.run_module('kvserve_core.cli', run_name='__main__')\nfinally:\n    exec({REPORT!r})"
    )
    done = python("-c", code)
    assert done.returncode == 0
    assert done.stderr.strip() == "loaded: []"
    direct = python("-m", "kvserve_core.cli", "list-components", "--json")
    assert direct.stdout == done.stdout


def test_loading_plugins_is_silent_and_imports_no_component() -> None:
    code = (
        "import sys\nfrom kvserve_core.registry import default_registry\n"
        "registry = default_registry()\nregistry.rows()\n"
        "targets = {m.component.target.partition(':')[0] for m in registry.manifests.values()}\n"
        "assert not targets & set(sys.modules), targets & set(sys.modules)\nassert 'torch' not in sys.modules"
    )
    done = python("-W", "error", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_package_s_lazy_table_and_its_type_checking_block_agree() -> None:
    tree = ast.parse(Path(kvserve_core.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    typed = {(alias.asname, node.module) for node in imports for alias in node.names}
    lazy = {(name, f"kvserve_core.{module}") for name, module in kvserve_core._MODULE.items()}
    assert typed == lazy


@pytest.mark.parametrize("name", kvserve_core.__all__)
def test_every_public_name_is_its_module_s(name: str) -> None:
    home = importlib.import_module(f"kvserve_core.{kvserve_core._MODULE[name]}")
    assert getattr(kvserve_core, name) is getattr(home, name)


def test_an_unknown_name_is_an_attribute_error_and_names_are_listed() -> None:
    with pytest.raises(AttributeError, match="module 'kvserve_core' has no attribute 'Codecs'"):
        kvserve_core.__getattr__("Codecs")
    assert {"Codec", "Pipeline", "__version__"} <= set(dir(kvserve_core))
