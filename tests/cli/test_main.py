from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from kvserve_core import __version__, cli
from kvserve_core.cli import COMMANDS, Command
from kvserve_core.errors import KVServeError

Run = Callable[..., Any]


def broken_command() -> None:
    """Fail on purpose."""
    raise KVServeError("something\n  happened")


def install_command(monkeypatch: pytest.MonkeyPatch, target: str, extra: str | None = None) -> None:
    monkeypatch.setitem(COMMANDS, "extra-command", Command(target, "Fail on purpose.", extra))
    monkeypatch.setitem(sys.modules, "test_main_commands", sys.modules[__name__])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lines_are_first_docstring_lines(name: str) -> None:
    module, _, attribute = COMMANDS[name].target.partition(":")
    doc = getattr(import_module(module), attribute).__doc__
    assert doc.partition("\n")[0] == COMMANDS[name].summary


def test_help_lists_every_command_and_imports_none(kvserve: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    install_command(monkeypatch, "kvserve_module_that_is_not_there:run")
    done = kvserve("--help")
    assert done.code == 0
    for name in COMMANDS:
        assert name in done.out
    assert "Fail on purpose." in done.out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(kvserve: Run, name: str) -> None:
    done = kvserve(name, "--help")
    assert done.code == 0
    assert "--help" in done.out


def test_the_version(kvserve: Run) -> None:
    assert kvserve("--version").out == f"kvserve {__version__}\n"


def test_an_unknown_command_gives_the_nearest(kvserve: Run) -> None:
    done = kvserve("list-component")
    assert done.code == 2
    assert "list-components" in done.err
    assert done.out == ""


def test_an_error_is_one_line_and_code_2(kvserve: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    install_command(monkeypatch, "test_main_commands:broken_command")
    done = kvserve("extra-command")
    assert (done.code, done.out, done.err) == (2, "", "error: something happened\n")


def test_a_traceback_is_given_on_request(kvserve: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    install_command(monkeypatch, "test_main_commands:broken_command")
    monkeypatch.setenv("KVSERVE_TRACEBACK", "1")
    with pytest.raises(KVServeError, match="something"):
        cli.main(["extra-command"])


def test_a_command_of_a_package_that_is_absent_says_what_to_install(
    kvserve: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_command(monkeypatch, "kvserve_module_that_is_not_there:run", "kvserve[hf]")
    message = "error: 'kvserve extra-command' needs 'kvserve_module_that_is_not_there', which is not installed;"
    assert kvserve("extra-command").err == f"{message} pip install 'kvserve[hf]'\n"


def test_a_command_without_an_extra_fails_as_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    install_command(monkeypatch, "kvserve_module_that_is_not_there:run")
    with pytest.raises(ModuleNotFoundError):
        cli.main(["extra-command"])


def test_arguments_come_from_the_process_by_default(kvserve: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kvserve", "--version"])
    with pytest.raises(SystemExit):
        cli.main()


def test_the_installed_script_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvserve_core.cli", "show", "no-such-component"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown component 'no-such-component'; ")
    assert done.stderr.count("\n") == 1
