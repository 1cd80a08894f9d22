"""Shares of answers that survive compression, as an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.quality import Interval
from kvserve_core.evaluation.sampling import share
from kvserve_core.evaluator import Evaluation


def kept(by_task: Mapping[str, Sequence[bool]]) -> Evaluation:
    """Of the answers that count, the share that is kept: over all tasks, and by task as metrics."""
    every = [ok for answers in by_task.values() for ok in answers]
    metrics: dict[str, Interval] = {task: share(sum(answers), len(answers)) for task, answers in by_task.items()}
    return Evaluation(share(sum(every), len(every)), len(every), metrics)


def require_counted(uncompressed: Mapping[str, float], solved: float) -> None:
    """Refuse to judge by tasks that the uncompressed model cannot do.

    Raises:
        ConfigError: none reaches ``solved``.
    """
    if not any(accuracy >= solved for accuracy in uncompressed.values()):
        scores = ", ".join(f"{task} {accuracy:.2f}" for task, accuracy in uncompressed.items())
        raise ConfigError(
            f"the uncompressed model solves no task often enough to judge by ({scores}; {solved:g} is needed); use"
            " another evaluator"
        )
