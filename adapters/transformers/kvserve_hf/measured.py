"""Measures named pipelines on a model and writes a profile library: ratio, speeds and quality, with provenance."""

from __future__ import annotations

import datetime
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

import kvserve_core
from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.bench import PROMPT_TOKENS, Bench
from kvserve_core.evaluation.quality import Quality
from kvserve_core.json_text import parsed
from kvserve_core.library import DEFAULT_WORKLOAD, EXACT, Profile, ProfileLibrary, QualityRecord
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import PipelineSpec
from kvserve_core.spec import whole
from kvserve_core.speed import LENGTHS, REPEATS, measure_speed
from kvserve_hf.bench.pipelines import Calibrated, filled
from kvserve_hf.engine import Engine
from kvserve_hf.roundtrip import FrameRoundtrip
from kvserve_hf.texts import LoadedText, tokens

METRIC = "exp(-KL)"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Measured:
    """A profile and the figures that do not fit into its record."""

    profile: Profile
    quality: Quality


def read_pipelines(path: Path, calibrated: Calibrated | None = None) -> dict[str, PipelineSpec]:
    """``{"name": {pipeline spec}}`` from a JSON file.

    ``{"$artefact": "klt-head-15"}`` in a spec stands for the hash of that calibrated file.

    Raises:
        ConfigError: it cannot be read, or a field is wrong; the message starts with the field's path.
        ArtefactError: a calibrated file that is not there.
    """
    try:
        text = parsed(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        raw = filled(text, {}, calibrated or Calibrated())
        return TypeAdapter(dict[str, PipelineSpec]).validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['msg']}, got {first.get('input')!r}", ".".join(map(str, first["loc"]))) from None


def measure_library(
    engine: Engine,
    pipelines: Mapping[str, PipelineSpec],
    texts: Sequence[LoadedText],
    progress: Progress | None = None,
    artefacts: Artefacts = NONE,
) -> tuple[ProfileLibrary, list[Measured]]:
    """Measure ``raw``, ``lossless`` and the given pipelines. ``progress(name, texts done, of)``.

    The library holds those of the ``artefacts`` that its profiles read.
    """
    bench = Bench(engine, tokens(texts, engine.tokenize))
    every = dict(EXACT) | dict(pipelines)
    try:
        found = [_measure(engine, bench, name, spec, progress, artefacts) for name, spec in every.items()]
    finally:
        bench.close()
    used = {digest for m in found for digest in m.profile.artefacts}
    library = ProfileLibrary(
        model_id=engine.spec.model_id,
        fingerprint=engine.spec.fingerprint,
        device=f"cpu {platform.machine()}, {torch.get_num_threads()} thread(s)",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        provenance=_provenance(texts),
        profiles=tuple(m.profile for m in found),
    )
    return library.with_artefacts(Artefacts({digest: artefacts.read(digest) for digest in sorted(used)})), found


def _measure(
    engine: Engine, bench: Bench, name: str, spec: PipelineSpec, progress: Progress | None, artefacts: Artefacts
) -> Measured:
    pipeline = Pipeline.build(spec, engine.spec, whole(engine.spec), artefacts=artefacts, path=f"profiles.{name}")
    roundtrip = FrameRoundtrip(pipeline, artefacts)
    quality = bench.run(roundtrip, lambda done, of: progress(name, done, of) if progress else None)
    read = partial(engine.gather, bench.keys[0])
    encode, decode = measure_speed(pipeline, read, artefacts, LENGTHS, REPEATS, time.process_time)
    record = QualityRecord(
        value=quality.value,
        lower=min(quality.lower, quality.value),
        upper=min(1.0, max(quality.upper, quality.value)),
        metric=METRIC,
        samples=len(quality.texts),
    )
    notes = (
        f"KL {quality.kl.mean:.4f} [{quality.kl.low:.4f}, {quality.kl.high:.4f}] nats/token,"
        f" top-1 {quality.top1.mean:.4f}, dNLL {quality.dnll.mean:+.4f}"
    )
    profile = Profile(
        name=name,
        pipeline=spec,
        cr=roundtrip.cr,
        encode=encode,
        decode=decode,
        quality={} if name in EXACT else {DEFAULT_WORKLOAD: record},
        artefacts=tuple(sorted(pipeline.used_artefacts)),
        notes=notes,
    )
    return Measured(profile, quality)


def _provenance(texts: Sequence[LoadedText]) -> dict[str, Any]:
    return {
        "command": "kvserve measure",
        "kvserve": kvserve_core.__version__,
        "torch": torch.__version__,
        "prompt_tokens": PROMPT_TOKENS,
        "texts": [
            {"name": t.pin.name, "package": t.pin.package, "version": t.pin.version, "blake3": t.pin.blake3}
            for t in texts
        ],
        "pinned": all(t.pinned for t in texts),
    }


def as_table(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """One JSON-able row a profile."""
    return [
        {
            "profile": m.profile.name,
            "cr": round(m.profile.cr, 3),
            "kl": m.quality.kl.mean,
            "kl_low": m.quality.kl.low,
            "kl_high": m.quality.kl.high,
            "top1": m.quality.top1.mean,
            "dnll": m.quality.dnll.mean,
            "quality": m.quality.value,
            "quality_lower": m.quality.lower,
            "encode_bytes_per_s": _rate(m.profile.encode.s_per_byte),
            "decode_bytes_per_s": _rate(m.profile.decode.s_per_byte),
            "encode_fixed_s": m.profile.encode.fixed_s,
            "decode_fixed_s": m.profile.decode.fixed_s,
        }
        for m in measured
    ]


def _rate(s_per_byte: float) -> float | None:
    return 1.0 / s_per_byte if s_per_byte else None


def dump(measured: Sequence[Measured]) -> str:
    """The table as JSON."""
    return json.dumps({"profiles": as_table(measured)}, indent=2)
