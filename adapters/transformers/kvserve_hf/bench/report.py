"""The result of a run as one JSON document, and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import kvserve_core
from kvserve_core.evaluation.bench import CONTINUATION_TOKENS, PROMPT_TOKENS
from kvserve_core.evaluation.tasks import SOLVED, TaskBench
from kvserve_hf.bench.curve import at_targets
from kvserve_hf.bench.pipelines import Family
from kvserve_hf.engine import Engine
from kvserve_hf.texts import LoadedText

COLUMNS = ("pipeline", "CR", "KL [95 %]", "top-1", "dNLL", "tasks", "artefacts")
FAMILY_COLUMNS = ("family", "CR at KL 0.0045", "0.0128", "0.05")


def document(
    command: str,
    engine: Engine,
    texts: Sequence[LoadedText],
    tasks: TaskBench | None,
    families: Sequence[Family],
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Everything: how it was measured, a row a pipeline, a curve a family."""
    return {
        "command": command,
        "model_id": engine.spec.model_id,
        "fingerprint": engine.spec.fingerprint,
        "kvserve": kvserve_core.__version__,
        "torch": torch.__version__,
        "prompt_tokens": PROMPT_TOKENS,
        "continuation_tokens": CONTINUATION_TOKENS,
        "pinned": all(t.pinned for t in texts),
        "texts": [
            {"name": t.pin.name, "kind": t.pin.kind, "package": t.pin.package, "version": t.pin.version}
            | {"blake3": t.pin.blake3}
            for t in texts
        ],
        "tasks": _tasks(tasks),
        "families": rounded([curve(family, rows) for family in families]),
        "pipelines": rounded(list(rows)),
    }


def rounded(value: Any) -> Any:
    """Numbers to six digits, within lists and objects; the seventh is noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def curve(family: Family, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Ratios of a family at the KL targets; None where the family was not measured on both sides of one."""
    points = [row for row in rows if row.get("family") == family.name]
    return {
        "family": family.name,
        "about": family.about,
        "calibrated": family.calibrated,
        "points": len(points),
        "at": at_targets(points),
    }


def _tasks(tasks: TaskBench | None) -> dict[str, Any] | None:
    if tasks is None:
        return None
    return {"uncompressed": tasks.uncompressed, "counted": list(tasks.counted), "counted_from": SOLVED}


def table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Cells under :data:`COLUMNS`; a pipeline that could not be measured says why."""
    return [_measured(row) if "cr" in row else [row["pipeline"], "", row["problem"], *[""] * 4] for row in rows]


def _measured(row: Mapping[str, Any]) -> list[str]:
    kl = row["kl"]
    span = "" if kl["low"] is None else f" [{kl['low']:.4f}, {kl['high']:.4f}]"
    tasks = row.get("tasks") or {}
    return [
        row["pipeline"],
        f"{row['cr']:.2f}",
        f"{kl['mean']:.4f}{span}",
        f"{row['top1']['mean']:.3f}",
        f"{row['dnll']['mean']:+.3f}",
        " ".join(f"{accuracy:.2f}" for accuracy in tasks.values()),
        " + ".join(f"{size / 1e6:.1f} MB" for size in row["artefacts"].values()),
    ]


def family_table(families: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Cells under :data:`FAMILY_COLUMNS`."""
    return [[f["family"], *(ratio(at) for at in f["at"])] for f in families if f["points"] > 1]


def ratio(at: Mapping[str, float | None]) -> str:
    """``12.3 [10.1, 15.0]``; a dash where it was not measured."""
    if at["cr"] is None:
        return "-"
    ends = [f"{at[end]:.1f}" if at[end] is not None else "?" for end in ("low", "high")]
    return f"{at['cr']:.1f} [{', '.join(ends)}]"
