"""The search over everything that is installed, as ``kvserve profile`` does it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvserve_core.library import Profile, ProfileLibrary
from kvserve_core.profiling.families import shipped
from kvserve_core.profiling.search import Options
from kvserve_hf.bench.pipelines import Calibrated
from kvserve_hf.measured import read_pipelines
from kvserve_hf.profile.commands import provenance
from kvserve_hf.profile.objective import ModelObjective
from kvserve_hf.profile.run import Plan, ProfileRun, searching
from profiler_model.asked import Asked, say

JOURNAL, DONE, SESSIONS = "search.jsonl", "search.done.json", "sessions.json"
WORKLOAD = "default"


@dataclass(frozen=True)
class Searched:
    """The library, and the minutes from loading the model to having it: of each session, where it was interrupted."""

    library: ProfileLibrary
    sessions: Sequence[float]

    @property
    def minutes(self) -> float:
        """Of all sessions."""
        return sum(self.sessions)

    @property
    def about(self) -> dict[str, Any]:
        """The search as it went."""
        found: dict[str, Any] = self.library.provenance["search"]
        return found

    def best(self, floor: float) -> Profile | None:
        """The highest ratio that keeps a floor on all texts."""
        rows = [(p, p.quality_for(WORKLOAD)) for p in self.library.profiles if not p.exact]
        return max((p for p, q in rows if q is not None and q.lower >= floor), key=lambda p: p.cr, default=None)


def searched(asked: Asked, command: str) -> Searched:
    """Search, measure what is kept on all texts, and write the library; or what an earlier call wrote."""
    done, watch = asked.work / DONE, _Watch(asked.work / SESSIONS)
    if done.exists():
        return Searched(ProfileLibrary.load(asked.out), json.loads(done.read_bytes()))
    objective = ModelObjective(searching(asked.setup, asked.samples))
    space = asked.space(shipped(), objective.engine.spec)
    also = read_pipelines(asked.also, Calibrated(asked.calibrated)) if asked.also else {}
    plan = Plan(
        objective.setup,
        asked.setup,
        Options(floors=asked.floors, budget=asked.budget),
        WORKLOAD,
        "process",
        asked.workers,
        asked.workers,
        asked.work / JOURNAL,
        asked.keep,
        also,
    )
    run = ProfileRun(plan, objective, space, space.points(asked.limit, 0))
    library = run.run(provenance(asked.texts, command), watch.shown)
    _save(library, asked.out)
    done.write_text(json.dumps(watch.sessions()))
    return Searched(library, watch.sessions())


class _Watch:
    """Says how far a run is, and keeps the minutes of this session beside those of the ones before it."""

    def __init__(self, path: Path) -> None:
        self._path, self._began = path, time.monotonic()
        self._before: list[float] = json.loads(path.read_bytes()) if path.exists() else []

    def sessions(self) -> list[float]:
        """Up to now."""
        return [*self._before, (time.monotonic() - self._began) / 60]

    def shown(self, task: str, done: int, of: int, best: str) -> None:
        """A callback of the run."""
        if task != "estimate" or done % 100 == 0:
            self._path.write_text(json.dumps(self.sessions()))
            say(f"{task} {done}/{of} {best}")


def _save(library: ProfileLibrary, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    library.save(out)
