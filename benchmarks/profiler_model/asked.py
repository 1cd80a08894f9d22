"""What a run on a model is asked to do, and the calibrated files that it needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ComponentSpec
from kvserve_core.evaluation.engine import Text
from kvserve_core.profiling.build import build_space
from kvserve_core.profiling.calibrated import Calibrated, calibrated_files
from kvserve_core.profiling.families import SpaceConfig
from kvserve_core.profiling.space import Space
from kvserve_core.spec import KVSpec
from kvserve_hf.calibrate.heads import calibrate_heads
from kvserve_hf.calibrate.request import Request
from kvserve_hf.commands import shipped_library
from kvserve_hf.engine import Engine
from kvserve_hf.profile.library import read_by
from kvserve_hf.profile.objective import Setup
from kvserve_hf.texts import LoadedText, calibration_texts, load_texts, pinned_texts

HEADS = "heads.json"
KLT = "klt-head-15.safetensors"


def say(text: str) -> None:
    """For whoever waits; stdout is the report's."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Asked:
    """folder: of the model. work: journals, on which the same command goes on. also: named pipelines for the library,
    as ``kvserve measure`` takes them. samples: texts of a measurement while searching; in the end all 16.
    """

    folder: Path
    calibrated: Path
    work: Path
    out: Path
    also: Path | None = None
    floors: tuple[float, ...] = (0.97, 0.95)
    budget: int = 60
    limit: int = 1000
    samples: int = 6
    keep: int = 6
    workers: int = 2

    @cached_property
    def texts(self) -> list[LoadedText]:
        """The pinned ones."""
        return load_texts(pinned_texts())

    @cached_property
    def setup(self) -> Setup:
        """The thorough measurement: all texts."""
        texts = tuple(Text(t.pin.name, t.pin.kind, t.text) for t in self.texts)
        return Setup(self.folder, texts, (ComponentSpec(name="continuation"),), self.calibrated)

    def space(self, config: SpaceConfig, kv: KVSpec) -> Space:
        """What the families allow on the model."""
        files, artefacts = self._files
        return build_space(config, kv=kv, calibrated=files, artefacts=artefacts)

    @cached_property
    def _files(self) -> tuple[Sequence[Calibrated], Artefacts]:
        return calibrated_files(self.calibrated)


def calibrated(folder: Path, into: Path) -> Path:
    """Head scores, calibrated now unless they are there; and the shipped library's basis, if it is the model's."""
    into.mkdir(parents=True, exist_ok=True)
    library = shipped_library()
    if not (into / HEADS).exists():
        say("calibrating heads")
        engine = Engine.load(folder)
        texts = load_texts(calibration_texts())
        work = into.with_name(into.name + ".work")
        calibrate_heads(Request(engine, texts, into / HEADS, work, lambda what, done, of: say(f"{done}/{of} {what}")))
        basis = sorted({digest for p in library.profiles for digest in read_by(p.pipeline)})
        if engine.spec.fingerprint == library.fingerprint and basis:
            (into / KLT).write_bytes(library.artefacts.read(basis[0]))
    return into
