"""``kvserve``: the command line. Importing it is cheap; each command's module is imported when it is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer

from kvserve_core import __version__
from kvserve_core.errors import KVServeError

TRACEBACK_ENV = "KVSERVE_TRACEBACK"


@dataclass(frozen=True)
class Command:
    """A command that is imported when called: ``"module:function"``, and its line in ``kvserve --help``.

    extra: what to ``pip install`` when its module cannot be imported; for commands of other packages.
    """

    target: str
    summary: str
    extra: str | None = None


COMMANDS: dict[str, Command] = {
    "list-components": Command("kvserve_core.cli.components:list_components", "List every installed component."),
    "show": Command("kvserve_core.cli.show:show", "Show one component: fields, capabilities and an example."),
    "check": Command(
        "kvserve_core.cli.check:check",
        "Check that a component does what every component of its kind must; exit with 1 if it does not.",
    ),
    "schema": Command("kvserve_core.cli.schema:schema", "Print the JSON schema of a pipeline of installed components."),
    "doctor": Command("kvserve_core.cli.doctor:doctor", "Check this installation and say where each setting is from."),
    "inspect": Command("kvserve_core.cli.frames:inspect", "Summarise a frame file and verify its digests."),
    "library": Command(
        "kvserve_core.cli.library:library",
        "Show or validate a profile library, or import files of the KVServe reference implementation.",
    ),
    "space": Command(
        "kvserve_core.cli.space:space", "Count and list the pipelines that the profiler would search here."
    ),
    "report": Command(
        "kvserve_core.cli.report:report",
        "Draw a profile library: ratio against quality, latency over bandwidth, the search, what each stage gives.",
    ),
    "explain": Command(
        "kvserve_core.cli.explain:explain",
        "Say which profile a request would get, what each would take, and who is left out by what.",
    ),
    "simulate": Command(
        "kvserve_core.cli.simulate:simulate",
        "Play a policy against arrivals, links of changing bandwidth, drifting speeds and noise.",
    ),
    "probe": Command(
        "kvserve_core.cli.probe:probe",
        "Measure the link to another machine with the configured transport, for the settings 'bandwidth' and 'priors'.",
    ),
    "demo": Command(
        "kvserve_hf.commands:demo",
        "Serve a real model from two processes over links of four speeds, compressed as the controller decides.",
        "kvserve[hf]",
    ),
    "bench": Command(
        "kvserve_hf.bench.commands:bench",
        "Measure ratio against quality of pipelines on a model: real frames, pinned texts, tasks with one answer.",
        "kvserve[hf]",
    ),
    "measure": Command(
        "kvserve_hf.commands:measure",
        "Measure ratio, speed and quality of named pipelines on a model, and write them as a profile library.",
        "kvserve[hf]",
    ),
    "profile": Command(
        "kvserve_hf.profile.commands:profile",
        "Search the pipelines that are installed for the best ones on a model, and write them as a profile library.",
        "kvserve[hf,profile]",
    ),
    "calibrate": Command(
        "kvserve_hf.calibrate.commands:calibrate",
        "Make a calibrated file from a model and texts; run the same command again to go on after an interruption.",
        "kvserve[hf]",
    ),
    "vllm-proxy": Command(
        "kvserve_vllm.proxy.command:vllm_proxy",
        "Route requests to prefill and decode servers that run the KVServe connector of vLLM.",
        "kvserve[proxy]",
    ),
}
"""Summaries equal the first docstring line of each function (tested), so that help imports none of them."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 a check failed, 2 an error, which is one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        build(arguments)(args=arguments, prog_name="kvserve")
    except KVServeError as error:
        if os.environ.get(TRACEBACK_ENV):
            raise
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        sys.exit(2)


def build(arguments: Sequence[str] = ()) -> typer.Typer:
    """The application; of its commands only the one that ``arguments`` name is imported."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_root)
    called = next((a for a in arguments if not a.startswith("-")), None)
    for name, command in COMMANDS.items():
        function = _load(name, command) if name == called else _listed_only
        app.command(name, help=None if name == called else command.summary)(function)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvserve {__version__}")
        raise typer.Exit()


_VERSION = typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)


def _root(version: Annotated[bool, _VERSION] = False) -> None:
    """KV-cache compression for disaggregated LLM serving."""


def _load(name: str, command: Command) -> Callable[..., Any]:
    module, _, attribute = command.target.partition(":")
    try:
        function: Callable[..., Any] = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if command.extra is None:
            raise
        message = f"'kvserve {name}' needs {error.name!r}, which is not installed; pip install '{command.extra}'"
        raise KVServeError(message) from error
    return function


def _listed_only() -> None:
    """Stands in for the commands that are not called: they appear in help by their summaries."""
