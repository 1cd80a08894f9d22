"""``kvserve profile``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress, TaskID

from kvserve_core.cli.output import AsJson, print_json, print_table
from kvserve_core.cli.space import narrowed
from kvserve_core.cli.specs import component_spec
from kvserve_core.evaluation.engine import Text
from kvserve_core.evaluation.quality import Interval
from kvserve_core.evaluation.sampling import unresolved
from kvserve_core.library import ProfileLibrary
from kvserve_core.profiling.build import build_space
from kvserve_core.profiling.calibrated import calibrated_files
from kvserve_core.profiling.executor import EXECUTORS
from kvserve_core.profiling.families import SpaceConfig, shipped
from kvserve_core.profiling.search import Options
from kvserve_hf.commands import MODEL, model_folder, progress_bar
from kvserve_hf.profile.asked import begin_anew, journal_path, named_pipelines, require_known, require_place
from kvserve_hf.profile.objective import ModelObjective, Setup
from kvserve_hf.profile.run import Plan, ProfileRun, searching
from kvserve_hf.texts import LoadedText, load_texts, workload_texts

WORKLOAD = "Texts to judge by and the name of the quality record: default (prose and code), or a kind such as prose."
EVALUATOR = 'An evaluator, by name or as JSON; may be repeated. The first names the metric. E.g. "passkey".'
ALSO = "JSON of named pipelines that go into the library as well, as for 'kvserve measure'."
RESUME = "The journal of a run that was ended early: take what it holds, measure the rest."


def profile(
    out: Annotated[Path, typer.Option(help="The library to write: a folder, or one file ending in .kvlib.")],
    model: Annotated[Path | None, MODEL] = None,
    workload: Annotated[str, typer.Option(help=WORKLOAD)] = "default",
    budget: Annotated[int, typer.Option(min=1, help="Measurements at most.")] = 40,
    min_quality: Annotated[list[float] | None, typer.Option(help="Floor, default 0.99; may be repeated.")] = None,
    calibrated: Annotated[Path | None, typer.Option(help="Folder with the files of 'kvserve calibrate'.")] = None,
    space: Annotated[Path | None, typer.Option(help="JSON or TOML with families, instead of those shipped.")] = None,
    families: Annotated[list[str] | None, typer.Option(help="Only this family; may be repeated.")] = None,
    without: Annotated[list[str] | None, typer.Option(help="Leave this component out; may be repeated.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many candidates, drawn evenly over families.")] = None,
    evaluator: Annotated[list[str] | None, typer.Option(help=EVALUATOR)] = None,
    samples: Annotated[int, typer.Option(min=2, help="Samples an evaluator while searching; at the end all.")] = 6,
    keep: Annotated[int, typer.Option(min=1, help="Profiles to measure again at the end, at most.")] = 12,
    also: Annotated[Path | None, typer.Option(help=ALSO)] = None,
    executor: Annotated[str, typer.Option(help=f"Who measures: {', '.join(EXECUTORS)}.")] = "serial",
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 for one a core.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the draw and the search; evaluators have their own.")] = 0,
    resume: Annotated[Path | None, typer.Option(help=RESUME)] = None,
    allow_unpinned: Annotated[bool, typer.Option(help="Measure on other versions of the pinned texts.")] = False,
    as_json: AsJson = False,
) -> None:
    """Search the pipelines that are installed for the best ones on a model, and write them as a profile library."""
    torch.set_num_threads(1)
    options = Options(floors=tuple(min_quality or (0.99,)), budget=budget, seed=seed)
    require_place(out)
    loaded = load_texts(workload_texts(workload), allow_unpinned)
    named = named_pipelines(also, calibrated) if also else {}
    with progress_bar() as bar:
        setup = Setup(
            model_folder(model, bar),
            tuple(Text(t.pin.name, t.pin.kind, t.text) for t in loaded),
            tuple(component_spec(text, "evaluator") for text in evaluator or ("continuation",)),
            calibrated,
        )
        journal = journal_path(out, resume)
        require_known(executor, setup)
        plan = replace(_plan(setup, options, workload, samples, executor, workers, keep, journal), also=named)
        task = bar.add_task("model", total=None)
        objective = ModelObjective(plan.search)
        config = narrowed(SpaceConfig.read(space) if space else shipped(), families or [], without or [])
        files, artefacts = calibrated_files(calibrated) if calibrated else ([], objective.artefacts)
        found = build_space(config, kv=objective.engine.spec, calibrated=files, artefacts=artefacts)
        run = ProfileRun(plan, objective, found, found.points(limit, seed))
        if resume is None:  # only now, for nothing more can be wrong with what was asked for
            begin_anew(journal)
        command = shlex.join(["kvserve", *sys.argv[1:]])
        library = run.run(provenance(loaded, command), _Shown(bar, task))
    library.save(out)
    _print(library, out, workload, 1 - max(options.floors), as_json)


def _plan(
    setup: Setup,
    options: Options,
    workload: str,
    samples: int,
    executor: str,
    workers: int,
    keep: int,
    journal: Path,
) -> Plan:
    batch = 1 if executor == "serial" else workers or 2
    search = searching(setup, samples)
    return Plan(search, setup, options, workload, executor, workers, batch, journal, keep)


class _Shown:
    """Shows how far a run is, with the best profile so far; where there is no bar, one line a measurement."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def __call__(self, task: str, done: int, of: int, best: str) -> None:
        text = f"{task} {best}".strip()
        self._bar.update(self._task, description=text, completed=done, total=of)
        if not self._bar.console.is_terminal and (task != "estimate" or done in (1, of)):
            self._bar.console.print(f"{done}/{of} {text}", markup=False, highlight=False)


def provenance(loaded: Sequence[LoadedText], command: str) -> dict[str, Any]:
    """What a library says of how it came to be, beside its search."""
    return {
        "command": command,
        "texts": [
            {"name": t.pin.name, "kind": t.pin.kind, "package": t.pin.package, "version": t.pin.version}
            | {"blake3": t.pin.blake3}
            for t in loaded
        ],
        "pinned": all(t.pinned for t in loaded),
    }


def _print(library: ProfileLibrary, out: Path, workload: str, tolerance: float, as_json: bool) -> None:
    search = library.provenance["search"]
    rows = [_row(p, workload, tolerance) for p in library.profiles]
    if as_json:
        print_json({"library": str(out), "profiles": rows, "search": search})
        return
    columns = ("profile", "cr", "quality [95 %]", "encode fixed + slope", "decode fixed + slope", "note")
    print_table(f"{len(rows)} profiles in {out}", columns, [tuple(map(str, row.values())) for row in rows])
    for name, error in search["failed"].items():
        typer.echo(f"{name} is not in it: {error}")
    rho = search["rank_correlation"]
    typer.echo(
        f"{search['candidates']} candidates, {search['evaluations']} measured ({search['stopped']}),"
        f" {search['wall_s']:.0f} s, {search['cpu_s']:.0f} s of processor time in measurements; estimated and measured"
        f" ratios agree in rank to {'-' if rho is None else f'{rho:.3f}'}"
    )


def _row(p: Any, workload: str, tolerance: float) -> dict[str, Any]:
    record = p.quality_for(workload)
    shown = "exact" if record is None else f"{record.value:.4f} [{record.lower:.4f}, {record.upper:.4f}]"
    interval = None if record is None else Interval(record.value, record.lower, record.upper)
    return {
        "profile": p.name,
        "cr": f"{p.cr:.2f}",
        "quality": shown,
        "encode": _speed(p.encode),
        "decode": _speed(p.decode),
        "note": unresolved(interval, record.samples, tolerance) if record and interval else "",
    }


def _speed(speed: Any) -> str:
    return f"{speed.fixed_s * 1e3:.2f} ms + {1e9 * speed.s_per_byte:.2f} ns/byte"
