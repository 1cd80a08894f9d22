"""Methods side by side in the shape of the KVServe paper's Table 1, on a model, per workload.

Relative quality with 95 % intervals, and effective CR. ``python benchmarks/table1.py --calibrated DIR [--model M]
[--library L] [--samples N] [--workers 2] [--json]``; DIR holds ``heads.json`` of ``kvserve calibrate heads``. Profiles
of the library that keep the floor make the rows ``unified`` and ``aware``. A workload that the uncompressed model
cannot do is left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import torch

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ComponentSpec
from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.engine import Text
from kvserve_core.library import ProfileLibrary
from kvserve_core.profile import RAW_PIPELINE, PipelineSpec
from kvserve_core.registry import default_registry
from kvserve_hf.bench.pipelines import Calibrated, candidates, shipped
from kvserve_hf.commands import model_folder, progress_bar, shipped_library
from kvserve_hf.engine import Engine
from kvserve_hf.profile.comparison import DEFAULT, Cell, Workload, as_json, choices, markdown, measured
from kvserve_hf.profile.masks import StreamingEngine, streaming_heads
from kvserve_hf.texts import load_texts, pinned_texts

BASELINES = {
    "cachegen": "cachegen,first=32,middle=16,last=16",
    "kivi": "kivi,bits=4",
    "kivi, 2 bit": "kivi,bits=2",
    "reference default": "reference",
}
STREAMING = 0.75
"""Heads that stream in the DuoAttention row: near the ratio of 3.1 that the paper has."""
STRICT = "copy_lookup"
"""Every one of 32 tokens must be that of the uncompressed run, so that one late token loses a sample."""
Rows = dict[str, dict[str, Cell]]


def workloads(samples: int) -> list[Workload]:
    """Continuations of prose and of code, a passkey, and copies with lookups: what takes longest is last."""
    texts = tuple(Text(t.pin.name, t.pin.kind, t.text) for t in load_texts(pinned_texts()))
    found = []
    for kind in ("prose", "code"):
        spec = ComponentSpec(name="continuation", configuration={"samples": samples})
        found.append(Workload(kind, spec, tuple(t for t in texts if t.kind == kind)))
    for name in ("passkey", STRICT):
        spec = ComponentSpec(name=name, configuration={"samples": samples})
        found.append(Workload(name, spec, tuple(t for t in texts if t.kind == "prose")))
    return found


def baselines(model_type: str, calibrated: Calibrated) -> dict[str, PipelineSpec]:
    """The other methods; one whose calibrated file is missing is an error."""
    known = {c.name: c for c in candidates(shipped(model_type), calibrated, default_registry())}
    found = {DEFAULT: RAW_PIPELINE}
    for name, candidate in BASELINES.items():
        if candidate not in known or known[candidate].spec is None:
            raise SystemExit(f"{candidate}: {known[candidate].problem if candidate in known else 'not a family here'}")
        spec = known[candidate].spec
        if spec is not None:
            found[name] = spec
    return found


@dataclass(frozen=True)
class Given:
    """What a worker process needs."""

    folder: Path
    calibrated: Path
    library: Path | None

    def opened(self) -> ProfileLibrary:
        """The library that is named, or the shipped one."""
        return ProfileLibrary.load(self.library) if self.library else shipped_library()

    def profiles(self) -> dict[str, PipelineSpec]:
        """Its lossy profiles."""
        return {p.name: p.pipeline for p in self.opened().profiles if not p.exact}


def rows_of(given: Given, workload: Workload) -> tuple[Rows, str, float]:
    """All rows on one workload; or none, and why it is left out. With the processor seconds."""
    torch.set_num_threads(1)
    cpu, engine, calibrated = time.process_time(), Engine.load(given.folder), Calibrated(given.calibrated)
    pipelines = baselines(engine.model.config.model_type, calibrated) | given.profiles()
    scores = json.loads(calibrated.artefacts.read(calibrated.digest("heads")))["scores"]
    duo = StreamingEngine(engine, streaming_heads(scores, STREAMING))
    artefacts = both(calibrated.artefacts, given.opened().artefacts)
    try:
        rows = measured(engine, [workload], pipelines, artefacts, duo, lambda s: print(s, file=sys.stderr, flush=True))
    except ConfigError as error:  # the evaluator refuses to judge
        return {}, str(error), time.process_time() - cpu
    return rows, "", time.process_time() - cpu


def both(some: Artefacts, others: Artefacts) -> Artefacts:
    """The files of two places."""
    return Artefacts({h: source.read(h) for source in (some, others) for h in source.hashes})


def table(given: Given, asked: list[Workload], workers: int) -> tuple[Rows, dict[str, str], float]:
    """Every row over the workloads, what is left out, and processor seconds; a workload is one worker's."""
    rows: Rows = {}
    left_out: dict[str, str] = {}
    cpu_s = 0.0
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(rows_of, given, workload): workload.name for workload in reversed(asked)}
        for done in as_completed(waiting):
            found, problem, seconds = done.result()
            cpu_s += seconds
            if problem:
                left_out[waiting[done]] = problem
            for name, row in found.items():
                rows.setdefault(name, {}).update(row)
    order = [w.name for w in asked if w.name not in left_out]
    return {name: {w: row[w] for w in order} for name, row in rows.items()}, left_out, cpu_s


def chosen(rows: Mapping[str, Mapping[str, Cell]], profiles: list[str], floor: float) -> Rows:
    """The methods, then what the library's profiles come to."""
    plain = {name: dict(row) for name, row in rows.items() if name not in profiles}
    return plain | choices(rows, profiles, floor, [STRICT])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrated", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--floor", type=float, default=0.97)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    with progress_bar() as bar:
        given = Given(model_folder(options.model, bar), options.calibrated, options.library)
    rows, left_out, cpu_s = table(given, workloads(options.samples), options.workers)
    if not rows:
        raise SystemExit(f"no workload could be judged: {left_out}")
    profiles = [name for name in given.profiles() if name in rows]
    shown = chosen(rows, profiles, options.floor)
    if not options.json:
        print(markdown(shown), *(f"{name} is left out: {why}\n" for name, why in left_out.items()), sep="\n")
        return
    about = {
        "command": shlex.join(["python", "benchmarks/table1.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model_id": given.opened().model_id,
        "floor": options.floor,
        "machine": platform.machine(),
        "torch": version("torch"),
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(cpu_s, 1),
        "left_out": left_out,
    }
    print(json.dumps(about | {"table": as_json(shown), "profiles": as_json({n: rows[n] for n in profiles})}, indent=1))


if __name__ == "__main__":
    main()
