"""``kvserve calibrate``: files that calibrated components read."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvserve_core.cli.output import AsJson, print_json, print_table
from kvserve_core.errors import ConfigError, did_you_mean
from kvserve_hf.calibrate.request import KLTOptions, Request, TablesOptions
from kvserve_hf.commands import CALIBRATED, MODEL, model_folder, progress_bar
from kvserve_hf.engine import Engine
from kvserve_hf.texts import calibration_texts, load_texts, read_pins

KINDS = {
    "klt": "kvserve_hf.calibrate.klt:calibrate_klt",
    "heads": "kvserve_hf.calibrate.heads:calibrate_heads",
    "tables": "kvserve_hf.calibrate.tables:calibrate_tables",
}
"""Kind -> function from a :class:`Request` to what is printed, one row."""
OWN = {
    "klt": ("per", "layer_block", "planes", "metric", "from_weights", "sink_tokens", "cutoff", "rank"),
    "heads": (),
    "tables": ("pipelines", "family", "calibrated"),
}
"""Options that only one kind reads."""
DEFAULT = KLTOptions()
PIPELINES = "tables: JSON of the pipelines whose codes are coded; default: family 'free' of those shipped."


def calibrate(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(help=f"What to calibrate: {', '.join(KINDS)}.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    model: Annotated[Path | None, MODEL] = None,
    texts: Annotated[Path | None, typer.Option(help="JSON list of pinned texts; default: the shipped one.")] = None,
    allow_unpinned: Annotated[bool, typer.Option(help="Use other versions of the texts.")] = False,
    work: Annotated[Path | None, typer.Option(help="Folder for interrupted runs; default: beside the file.")] = None,
    per: Annotated[str, typer.Option(help="klt: a basis per 'head', or one over 'all' heads.")] = DEFAULT.per,
    layer_block: Annotated[int, typer.Option(min=1, help="klt: layers a basis.")] = DEFAULT.layer_block,
    planes: Annotated[str, typer.Option(help="klt: 'kv' (jointly), 'k' or 'v'.")] = DEFAULT.plane,
    metric: Annotated[str, typer.Option(help="klt: 'fisher', or 'none'.")] = DEFAULT.metric,
    from_weights: Annotated[bool, typer.Option(help="klt: no texts, the model's weights only.")] = False,
    sink_tokens: Annotated[int, typer.Option(min=0, help="klt: first tokens to leave out.")] = DEFAULT.sink_tokens,
    cutoff: Annotated[float, typer.Option(min=0, help="klt: leave out components below this.")] = DEFAULT.cutoff,
    rank: Annotated[int | None, typer.Option(min=1, help="klt: keep at most so many a block.")] = DEFAULT.rank,
    pipelines: Annotated[Path | None, typer.Option(help=PIPELINES)] = None,
    family: Annotated[list[str] | None, typer.Option(help="tables: only this family; may be repeated.")] = None,
    calibrated: Annotated[Path | None, typer.Option(help=f"tables: {CALIBRATED}")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a calibrated file from a model and texts; run the same command again to go on after an interruption."""
    if kind not in KINDS:
        raise ConfigError(did_you_mean(kind, KINDS, "kind of calibration"))
    _check_given(kind, _given(context))
    torch.set_num_threads(1)
    options = KLTOptions(per, layer_block, planes, metric, from_weights, sink_tokens, cutoff, rank)
    pins = [] if from_weights else read_pins(texts) if texts else calibration_texts()
    loaded = load_texts(pins, allow_unpinned)
    with progress_bar() as bar:
        engine = Engine.load(model_folder(model, bar))
        task = bar.add_task(kind)
        request = Request(
            engine,
            loaded,
            out,
            work or out.with_name(out.name + ".work"),
            lambda what, done, of: bar.update(task, description=what, completed=done, total=of),
            options,
            TablesOptions(pipelines, tuple(family or ()), calibrated),
        )
        made = _function(kind)(request)
    if as_json:
        print_json(made)
    else:
        print_table(f"{kind} calibrated", list(made), [[str(value) for value in made.values()]])


def _given(context: typer.Context) -> set[str]:
    """Names of the parameters that the command line sets."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _check_given(kind: str, given: set[str]) -> None:
    """Refuse options that would be passed over.

    Raises:
        ConfigError: one of another kind, or texts for a calibration that reads none.
    """
    for owner, name in ((owner, name) for owner, names in OWN.items() for name in names):
        if name in given and owner != kind:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option!r} is an option of 'calibrate {owner}', not of 'calibrate {kind}'; leave it out"
            )
    if {"from_weights", "texts"} <= given:
        raise ConfigError("'--from-weights' reads no texts; leave one of the two out", "texts")


def _function(kind: str) -> Any:
    module, _, name = KINDS[kind].partition(":")
    return getattr(import_module(module), name)
