"""Measures candidates one after the other; each row is kept as soon as it is there, so that a run can go on."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Self

from blake3 import blake3

import kvserve_core
from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.bench import Bench
from kvserve_core.evaluation.quality import Interval, Quality, TextQuality, interval
from kvserve_core.evaluation.tasks import TaskBench
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import PipelineSpec
from kvserve_core.spec import whole
from kvserve_hf.bench.pipelines import Calibrated, Candidate
from kvserve_hf.engine import Engine
from kvserve_hf.roundtrip import FrameRoundtrip
from kvserve_hf.texts import LoadedText

Row = dict[str, Any]


class Journal:
    """Rows on disk, one a line, by what they were measured from. A line that was cut short is measured again.

    Raises:
        ConfigError: another run is writing it, or it cannot be written.
    """

    def __init__(self, path: Path | None, resume: bool) -> None:
        self._file = None if path is None else _opened(path)
        self._rows: dict[str, Row] = {}
        if self._file is None:
            return
        data = self._file.read() if resume else b""
        self._file.truncate(data.rfind(b"\n") + 1)  # what follows a line that was cut short would be lost with it
        for line in data.splitlines():
            try:
                entry = json.loads(line)
                self._rows[entry["key"]] = entry["row"]
            except (ValueError, KeyError, TypeError):
                continue

    def row(self, key: str) -> Row | None:
        """What was measured under a key."""
        return self._rows.get(key)

    def add(self, key: str, row: Row) -> None:
        """Keep a row."""
        self._rows[key] = row
        if self._file is not None:
            self._file.write((json.dumps({"key": key, "row": row}) + "\n").encode())
            self._file.flush()

    def close(self) -> None:
        """Let others write it."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _opened(path: Path) -> BinaryIO:
    """The file, to read and to append to, locked until it is closed."""
    try:
        file = path.open("a+b")
    except OSError as error:
        raise ConfigError(f"the journal cannot be written: {error}", str(path)) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            "another run is writing this journal; wait for it, or name another document with --out", str(path)
        ) from None
    file.seek(0)
    return file


class QualityRun:
    """One model, one set of texts and tasks; ``rows`` measures candidates on them."""

    def __init__(
        self,
        engine: Engine,
        bench: Bench,
        tasks: TaskBench | None,
        texts: Sequence[LoadedText],
        calibrated: Calibrated,
        journal: Journal,
    ) -> None:
        self._engine, self._bench, self._tasks = engine, bench, tasks
        self._texts, self._calibrated, self._journal = texts, calibrated, journal

    def rows(self, given: Sequence[Candidate], progress: Callable[[str], None]) -> Iterator[Row]:
        """A row a candidate; those of the journal at once. ``progress`` is told the name when one is done."""
        for candidate in given:
            if candidate.spec is None:
                yield {"pipeline": candidate.name, "problem": candidate.problem}
            else:
                yield self._row(candidate, candidate.spec)
            progress(candidate.name)

    def _row(self, candidate: Candidate, spec: PipelineSpec) -> Row:
        pipeline = Pipeline.build(
            spec,
            self._engine.spec,
            whole(self._engine.spec),
            artefacts=self._calibrated.artefacts,
            path=candidate.name,
        )
        row: Row = {
            "pipeline": candidate.name,
            "family": candidate.family.name,
            "values": dict(candidate.values),
            "calibrated": candidate.family.calibrated,
            "artefacts": dict(candidate.artefacts),
        }
        texts = [t.pin.blake3 for t in self._texts]
        row |= self._kept(spec, texts, lambda: self._quality(pipeline))
        if (tasks := self._tasks) is not None:
            row["tasks"] = self._kept(spec, tasks.digest, lambda: tasks.run(self._roundtrip(pipeline)))
        return row

    def _kept(self, spec: PipelineSpec, given: Any, measure: Callable[[], Row]) -> Row:
        """From the journal, or measured and kept. The key is all that a figure depends on, except the code."""
        parts = [kvserve_core.__version__, self._engine.spec.fingerprint, spec.model_dump_json(), given]
        key = blake3(json.dumps(parts).encode()).hexdigest()[:32]
        found = self._journal.row(key)
        if found is None:
            found = measure()
            self._journal.add(key, found)
        return found

    def _roundtrip(self, pipeline: Pipeline) -> FrameRoundtrip:
        return FrameRoundtrip(pipeline, self._calibrated.artefacts)

    def _quality(self, pipeline: Pipeline) -> Row:
        roundtrip = self._roundtrip(pipeline)
        sizes: list[tuple[int, int]] = []
        quality = self._bench.run(roundtrip, lambda *_: sizes.append((roundtrip.raw_bytes, roundtrip.wire_bytes)))
        ratios = _ratios(sizes)
        return {
            "cr": roundtrip.cr,
            "cr_by_text": as_interval(interval(ratios)),
            "escaped_segments": roundtrip.escaped,
            "segments": roundtrip.segments,
            **summary(quality),
            "by_kind": self._by_kind(quality.texts, ratios),
            "texts": [asdict(t) | {"cr": cr} for t, cr in zip(quality.texts, ratios, strict=True)],
        }

    def _by_kind(self, measured: Sequence[TextQuality], ratios: Sequence[float]) -> dict[str, Row]:
        kinds = dict.fromkeys(t.pin.kind for t in self._texts)
        found: dict[str, Row] = {}
        for kind in kinds:
            members = [i for i, t in enumerate(self._texts) if t.pin.kind == kind]
            quality = Quality(tuple(measured[i] for i in members))
            ratio = len(members) / sum(1 / ratios[i] for i in members)
            found[kind] = {"texts": len(members), "cr": ratio, **summary(quality)}
        return found


def summary(quality: Quality) -> Row:
    """KL, top-1 and dNLL with their 95 % intervals."""
    return {name: as_interval(getattr(quality, name)) for name in ("kl", "top1", "dnll")}


def as_interval(given: Interval) -> Mapping[str, float | None]:
    """A mean and its bounds for JSON, which has no infinity: None for an open end."""
    ends = {"low": given.low, "high": given.high}
    return {"mean": given.mean} | {name: end if abs(end) != float("inf") else None for name, end in ends.items()}


def _ratios(sizes: Sequence[tuple[int, int]]) -> list[float]:
    """Ratio of each text from running sums of (raw, wire) bytes."""
    before = [(0, 0), *sizes[:-1]]
    return [(raw - raw0) / (wire - wire0) for (raw, wire), (raw0, wire0) in zip(sizes, before, strict=True)]
