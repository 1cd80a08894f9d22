"""Two tables of the reference as pools: every candidate with its ratio and its accuracy."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from kvserve_core.profile import PipelineSpec
from kvserve_core.profiling.point import Measurement, Point

DATA = Path(__file__).parents[2] / "tests" / "data" / "kvserve"
FLOOR = 0.97
LEVELS = ("high_key", "high_value", "low_key", "low_value")


@dataclass(frozen=True)
class Table:
    """A pool and the answers. It is an objective: it estimates a ratio and measures a candidate by looking it up."""

    name: str
    points: tuple[Point, ...]
    answers: Mapping[str, Measurement]
    rows: tuple[Mapping[str, str], ...]

    def estimate(self, point: Point) -> float:
        return self.answers[point.key].cr

    def measure(self, points: Sequence[Point]) -> Iterator[Measurement]:
        return (self.answers[p.key] for p in points)

    @cached_property
    def ratios(self) -> list[float]:
        return [self.estimate(p) for p in self.points]

    def optimum(self, floor: float) -> float:
        return max(m.cr for m in self.answers.values() if m.quality_low >= floor)


@lru_cache(maxsize=1)
def smoke() -> Table:
    """The 144 pipelines of the reference's own search on Qwen2.5-7B; accuracy is the formula of its smoke test."""
    rows = _rows("search_space_qwen7b_hadamard_ans_144.csv")
    given = [
        _Row(r["transform_type"], "ans", r["heads_selection"], [r[f"{n}_max_value"] for n in LEVELS], r["cr"])
        for r in rows
    ]
    return _table("144", rows, given, [_proxy(row) for row in given])


@lru_cache(maxsize=1)
def measured() -> Table:
    """66 quantizers by 2 codecs on Llama-3.1-8B and Qasper, accuracy measured: it jumps by 2 % between neighbours."""
    rows = _rows("profiles_132_llama8b_qasper_100gbps.csv")
    given = [
        _Row(r["transform"], r["codec"], r["heads_selection"], [r[f"{n}_levels"] for n in LEVELS], r["cr"])
        for r in rows
    ]
    return _table("132", rows, given, [float(r["accuracy_rel_pct"]) for r in rows])


class _Row:
    def __init__(self, transform: str, codec: str, low_ratio: str, levels: Sequence[str], cr: str) -> None:
        self.transform, self.codec, self.low_ratio, self.cr = transform, codec, float(low_ratio), float(cr)
        self.levels = [int(text) for text in levels]

    def point(self) -> Point:
        numbers = zip(LEVELS, self.levels, strict=True)
        values = (("transform", self.transform), ("codec", self.codec), ("low_ratio", self.low_ratio), *numbers)
        return Point(values, PipelineSpec.model_validate({"planes": {"k": self._chain(0), "v": self._chain(1)}}))

    def _chain(self, plane: int) -> dict[str, Any]:
        high, low = (
            {"name": "uniform", "configuration": {"levels": self.levels[i], "axis": ("channel", "token")[plane]}}
            for i in (plane, plane + 2)
        )
        mixed = {"name": "mixhq", "configuration": {"low_ratio": self.low_ratio, "high": high, "low": low}}
        transforms = [] if self.transform == "none" else [self.transform]
        return {"transforms": transforms, "quantizer": mixed, "codec": f"nvcomp_{self.codec}"}


def _proxy(row: _Row) -> float:
    score = 101.2 - 0.45 * row.cr - 0.25 * row.low_ratio + 0.04 * (row.levels[2] + row.levels[3])
    return round(min(100.0, max(0.0, score)), 2)


def _table(name: str, rows: Sequence[Mapping[str, str]], given: Sequence[_Row], percent: Sequence[float]) -> Table:
    points = tuple(row.point() for row in given)
    answers = {
        p.key: Measurement(
            key=p.key, quality=a / 100, quality_low=a / 100, quality_high=a / 100, cr=row.cr, cr_estimate=row.cr
        )
        for p, row, a in zip(points, given, percent, strict=True)
    }
    return Table(name, points, answers, tuple(rows))


def _rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
