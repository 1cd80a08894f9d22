"""``kvserve bench quality``."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer

from kvserve_core.cli.output import AsJson, print_json, print_table
from kvserve_core.errors import ConfigError, UnknownNameError, did_you_mean
from kvserve_core.evaluation.bench import Bench
from kvserve_core.evaluation.questions import instances
from kvserve_core.evaluation.tasks import TaskBench
from kvserve_core.registry import default_registry
from kvserve_hf.bench import report
from kvserve_hf.bench.pipelines import Calibrated, Candidate, Family, candidates, named_families, read_families, shipped
from kvserve_hf.bench.run import Journal, QualityRun
from kvserve_hf.commands import CALIBRATED, MODEL, model_folder, progress_bar
from kvserve_hf.engine import Engine
from kvserve_hf.texts import Kind, LoadedText, PinnedText, domain_texts, load_texts, pinned_texts, tokens

KINDS = ("quality",)
DOMAIN = "Texts of this domain instead, e.g. manual; may be repeated. 'every' takes all."
RESUME = "Take what the journal (beside --out) holds, measure the rest."


def bench(
    kind: Annotated[str, typer.Argument(help=f"What to measure: {', '.join(KINDS)}.")],
    model: Annotated[Path | None, MODEL] = None,
    pipelines: Annotated[Path | None, typer.Option(help="JSON of pipeline families; default: those shipped.")] = None,
    family: Annotated[
        list[str] | None, typer.Option(help="Only this family; may be repeated, the order counts.")
    ] = None,
    calibrated: Annotated[Path | None, typer.Option(help=CALIBRATED)] = None,
    texts: Annotated[
        int | None, typer.Option(min=2, help="So many texts, half prose, half code; default: all.")
    ] = None,
    domain: Annotated[list[str] | None, typer.Option(help=DOMAIN)] = None,
    tasks: Annotated[int, typer.Option(min=0, help="Instances of each task; 0 for none.")] = 8,
    out: Annotated[
        Path | None, typer.Option(help="Write the JSON document here, and keep a journal beside it.")
    ] = None,
    resume: Annotated[bool, typer.Option(help=RESUME)] = False,
    allow_unpinned: Annotated[bool, typer.Option(help="Measure on other versions of the pinned texts.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure ratio against quality of pipelines on a model: real frames, pinned texts, tasks with one answer."""
    if kind not in KINDS:
        raise UnknownNameError(did_you_mean(kind, KINDS, "kind of benchmark"))
    if resume and out is None:
        raise ConfigError("the journal lies beside the document; name it with --out", "resume")
    torch.set_num_threads(1)
    loaded = load_texts(_pins(texts, domain), allow_unpinned)
    calibration = Calibrated(calibrated)
    with progress_bar() as bar:
        engine = Engine.load(model_folder(model, bar))
        every = read_families(pipelines) if pipelines else shipped(engine.model.config.model_type)
        families = named_families(every, family)
        given = list(candidates(families, calibration, default_registry()))
        with Journal(out.with_name(out.name + ".journal.jsonl") if out else None, resume) as journal:
            made = _document(engine, loaded, tasks, families, given, calibration, journal, bar)
    if out is not None:
        out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(made)
        return
    _show(made)


def _document(
    engine: Engine,
    loaded: Sequence[LoadedText],
    count: int,
    families: Sequence[Family],
    given: Sequence[Candidate],
    calibration: Calibrated,
    journal: Journal,
    bar: Any,
) -> dict[str, Any]:
    asked = instances(engine.tokenize, [t.text for t in loaded if t.pin.kind == "prose"], count) if count else []
    task = bar.add_task("prefill of the texts", total=len(given) + len(asked))
    bench = Bench(engine, tokens(loaded, engine.tokenize))
    questions = TaskBench(engine, asked, lambda: bar.update(task, description="prefill of the tasks", advance=1))
    try:
        run = QualityRun(engine, bench, questions if asked else None, loaded, calibration, journal)
        rows = list(run.rows(given, lambda name: bar.update(task, description=name, advance=1)))
    finally:
        bench.close()
        questions.close()
    command = shlex.join(["kvserve", *(a for a in sys.argv[1:] if a != "--resume")])  # it changes no figure
    return report.document(command, engine, loaded, questions if asked else None, families, rows)


def _pins(count: int | None, domains: Sequence[str] | None) -> list[PinnedText]:
    if domains:
        names = _every_domain() if "every" in domains else domains
        return [pin for name in names for pin in domain_texts(name)[:count]]
    by_kind = {kind: [p for p in pinned_texts() if p.kind == kind] for kind in ("prose", "code")}
    total = count or len(pinned_texts())
    return [*by_kind["prose"][: (total + 1) // 2], *by_kind["code"][: total // 2]]


def _every_domain() -> list[str]:
    return list(get_args(Kind))


def _show(made: dict[str, Any]) -> None:
    print_table(
        f"{len(made['texts'])} texts, model {made['model_id']}", report.COLUMNS, report.table(made["pipelines"])
    )
    if made["tasks"]:
        scores = ", ".join(f"{name} {score:.2f}" for name, score in made["tasks"]["uncompressed"].items())
        typer.echo(f"\ntasks without compression: {scores}; counted: {', '.join(made['tasks']['counted']) or 'none'}")
    if rows := report.family_table(made["families"]):
        typer.echo("")
        print_table("ratio at equal quality, with 95 % intervals", report.FAMILY_COLUMNS, rows)
