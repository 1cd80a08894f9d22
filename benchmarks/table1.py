"""Methods side by side in the shape of the KVServe paper's Table 1, on a model, per workload.

Relative quality with 95 % intervals, and effective CR. ``python benchmarks/table1.py --calibrated DIR [--model M]
[--library L] [--samples N] [--json]``; DIR holds ``heads.json`` of ``kvserve calibrate heads``. Profiles of the library
that keep the floor make the rows ``unified`` and ``aware``.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ComponentSpec
from kvserve_core.evaluation.engine import Text
from kvserve_core.library import ProfileLibrary
from kvserve_core.profile import RAW_PIPELINE, PipelineSpec
from kvserve_core.registry import default_registry
from kvserve_hf.bench.pipelines import Calibrated, candidates, shipped
from kvserve_hf.commands import model_folder, progress_bar, shipped_library
from kvserve_hf.engine import Engine
from kvserve_hf.profile.comparison import DEFAULT, Workload, as_json, choices, markdown, measured
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


def workloads(samples: int) -> list[Workload]:
    """Continuations of prose and of code, a passkey, and copies with lookups."""
    texts = tuple(Text(t.pin.name, t.pin.kind, t.text) for t in load_texts(pinned_texts()))
    found = []
    for kind in ("prose", "code"):
        spec = ComponentSpec(name="continuation", configuration={"samples": samples})
        found.append(Workload(kind, spec, tuple(t for t in texts if t.kind == kind)))
    for name in ("passkey", "copy_lookup"):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibrated", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--floor", type=float, default=0.95)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began, cpu = time.monotonic(), time.process_time()
    with progress_bar() as bar:
        engine = Engine.load(model_folder(given.model, bar))
    library = ProfileLibrary.load(given.library) if given.library else shipped_library()
    calibrated = Calibrated(given.calibrated)
    pipelines = baselines(engine.model.config.model_type, calibrated)
    profiles = {p.name: p.pipeline for p in library.profiles if not p.exact}
    held = (*calibrated.artefacts.hashes, *library.artefacts.hashes)
    sources = {h: calibrated.artefacts if h in calibrated.artefacts.hashes else library.artefacts for h in held}
    artefacts = Artefacts({h: source.read(h) for h, source in sources.items()})
    scores = json.loads(calibrated.artefacts.read(calibrated.digest("heads")))["scores"]
    duo = StreamingEngine(engine, streaming_heads(scores, STREAMING))
    asked = workloads(given.samples)
    rows = measured(
        engine, asked, pipelines | profiles, artefacts, duo, lambda said: print(said, file=sys.stderr, flush=True)
    )
    shown = {name: row for name, row in rows.items() if name not in profiles}
    shown |= choices(rows, list(profiles), given.floor)
    if not given.json:
        print(markdown(shown))
        return
    about = {
        "command": " ".join(sys.argv[1:]),
        "model_id": engine.spec.model_id,
        "floor": given.floor,
        "machine": platform.machine(),
        "torch": version("torch"),
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
    }
    print(json.dumps(about | {"table": as_json(shown), "profiles": as_json({n: rows[n] for n in profiles})}, indent=1))


if __name__ == "__main__":
    main()
