"""Small pools, objectives that know the answer, and objectives that fail. Importable by worker processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvserve_core.profile import PipelineSpec
from kvserve_core.profiling.point import Measurement, Point

TOLD = 0.01
"""Half-width of the intervals that the objectives give."""


def point(family: str, levels: int) -> Point:
    """A pipeline of one family; ``levels`` decides everything."""
    quantizer = {"name": "uniform", "configuration": {"levels": levels, "axis": family}}
    spec = PipelineSpec.model_validate({"planes": {"*": {"quantizer": quantizer}}})
    return Point((("family", family), ("levels", levels)), spec, f"{family}-{levels}")


def pool(each: int = 12) -> list[Point]:
    """Two families: at the same ratio, ``channel`` keeps more quality than ``token``, so that quality does not fall
    with the ratio over both."""
    return [point(family, levels) for family in ("token", "channel") for levels in range(4, 4 + each)]


def ratio(p: Point) -> float:
    return 64.0 / float(p.at["levels"])


def quality(p: Point) -> float:
    return 1.0 - ratio(p) * (0.01 if p.at["family"] == "channel" else 0.03)


def measurement(p: Point, **changes: object) -> Measurement:
    q = quality(p)
    given: dict[str, object] = {"quality": q, "quality_low": q - TOLD, "quality_high": q + TOLD, "cr": ratio(p)}
    return Measurement(key=p.key, **(given | changes))  # type: ignore[arg-type]  # names are checked by msgspec


@dataclass
class Known:
    """Knows every answer. log: a file that gets a line for each measurement, so that several processes can be counted.

    fails: names of points whose measurement raises; dies: names of points that end their process.
    """

    log: Path | None = None
    fails: frozenset[str] = frozenset()
    dies: frozenset[str] = frozenset()

    def estimate(self, p: Point) -> float:
        return ratio(p)

    def measure(self, points: Sequence[Point]) -> Iterator[Measurement]:
        for p in points:
            if self.log:
                with self.log.open("a", encoding="utf-8") as file:
                    file.write(f"{os.getpid()} {p.name}\n")
            if p.name in self.dies:
                os._exit(1)
            if p.name in self.fails:
                raise ValueError(f"cannot do {p.name}")
            yield measurement(p)

    def measured(self) -> list[str]:
        """Names in the log, in order."""
        assert self.log is not None
        return (
            [line.split()[1] for line in self.log.read_text(encoding="utf-8").splitlines()] if self.log.exists() else []
        )
