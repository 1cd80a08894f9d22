"""Where the loss of a compressed prompt falls: KL by distance from the prompt, for prompts of two lengths.

``python benchmarks/quality_positions.py --model gemma3 --calibrated DIR [--pipelines JSON] [--samples 12] [--workers 2]
[--json]``. Three prompts of each pinned text: its first 512 tokens, its first 768, and the last 512 of those, after
which the same tokens follow as after the 768. So length is told apart from what happens to follow.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from kvserve_core.evaluation.engine import Text
from kvserve_core.evaluation.prompts import HeldPrompts
from kvserve_core.evaluation.quality import Quality, TextQuality, log_probabilities
from kvserve_core.evaluation.sampling import stratified
from kvserve_core.pipeline import Pipeline
from kvserve_core.spec import whole
from kvserve_hf.bench.pipelines import Calibrated
from kvserve_hf.commands import model_folder, progress_bar
from kvserve_hf.engine import Engine
from kvserve_hf.measured import read_pipelines
from kvserve_hf.roundtrip import FrameRoundtrip
from kvserve_hf.texts import load_texts, pinned_texts

PROMPTS = {"first 512": (0, 512), "first 768": (0, 768), "last 512 of 768": (256, 768)}
FED = (96, 192)
STRETCHES = (0, 8, 24, 48, 96, 144, 192)
GEMMA = Path(__file__).parents[1] / "adapters/transformers/kvserve_hf/gemma3_pipelines.json"


@dataclass(frozen=True)
class Given:
    """What a worker process needs."""

    folder: Path
    calibrated: Path
    pipelines: Path


@dataclass(frozen=True)
class Seen:
    """One pipeline on one prompt of one text. kl: nats of each token that was fed, in order."""

    prompt: str
    pipeline: str
    text: str
    cr: float
    kl: Sequence[float]


def seen(given: Given, texts: Sequence[Text]) -> list[Seen]:
    """Every pipeline on every prompt of the texts."""
    torch.set_num_threads(1)
    engine = Engine.load(given.folder)
    return [found for text in texts for found in _of(text, engine, given)]


def _of(text: Text, engine: Engine, given: Given) -> Iterator[Seen]:
    ids, calibrated = engine.tokenize(text.text), Calibrated(given.calibrated)
    for prompt, (start, stop) in PROMPTS.items():
        held = HeldPrompts(engine, [[ids[0], *ids[start + 1 : stop]]])  # a sequence begins as the model was taught
        fed = ids[stop : stop + max(FED)]
        p = log_probabilities(engine.teacher_forced(held.keys[0], fed))
        for name, spec in read_pipelines(given.pipelines, calibrated).items():
            pipeline = Pipeline.build(spec, engine.spec, whole(engine.spec), artefacts=calibrated.artefacts, path=name)
            roundtrip = FrameRoundtrip(pipeline, calibrated.artefacts)
            with held.restored(0, roundtrip) as key:
                q = log_probabilities(engine.teacher_forced(key, fed))
            yield Seen(prompt, name, text.name, roundtrip.cr, (p.exp() * (p - q)).sum(-1).tolist())
        held.close()


def summary(rows: Sequence[Seen]) -> dict[str, Any]:
    """Of one pipeline on one kind of prompt: ratio, quality by fed tokens with its bounds, KL by stretch of tokens."""
    stretches = list(pairwise(STRETCHES))
    return {
        "cr": round(statistics.harmonic_mean([r.cr for r in rows]), 3),
        "quality": {str(n): _quality(rows, n) for n in FED},
        "kl": {f"{a}-{b}": round(statistics.fmean(k for r in rows for k in r.kl[a:b]), 5) for a, b in stretches},
    }


def _quality(rows: Sequence[Seen], fed: int) -> list[float]:
    texts = tuple(TextQuality(r.text, statistics.fmean(r.kl[:fed]), 1.0, 0.0, fed) for r in rows)
    quality = Quality(texts)
    return [round(x, 5) for x in (quality.value, quality.lower, quality.upper)]


def table(rows: Sequence[Seen]) -> dict[str, dict[str, Any]]:
    """By pipeline and prompt."""
    grouped: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    for row in rows:
        grouped[row.pipeline, row.prompt].append(row)
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for (pipeline, prompt), group in grouped.items():
        found[pipeline][prompt] = summary(group)
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("gemma3"))
    parser.add_argument("--calibrated", type=Path, required=True)
    parser.add_argument("--pipelines", type=Path, default=GEMMA)
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with progress_bar() as bar:
        given = Given(model_folder(options.model, bar), options.calibrated, options.pipelines)
    texts = [Text(t.pin.name, t.pin.kind, t.text) for t in load_texts(pinned_texts())]
    chosen, n = stratified(texts, lambda t: t.kind, options.samples, 0), options.workers
    with ProcessPoolExecutor(n, mp_context=get_context("spawn")) as pool:
        parts = pool.map(seen, [given] * n, [chosen[i::n] for i in range(n)])
    found = table([row for part in parts for row in part])
    about = {
        "command": shlex.join(["python", "benchmarks/quality_positions.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "torch": version("torch"),
        "texts": [t.name for t in chosen],
    }
    print(json.dumps(about | {"pipelines": found} if options.json else found, indent=1))


if __name__ == "__main__":
    main()
