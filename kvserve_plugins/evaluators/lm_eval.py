"""Public benchmarks: whatever lm-evaluation-harness has a task for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from pydantic import Field

from kvserve_core.component import ComponentConfig
from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.engine import Engine, Progress, Roundtrip, Text, quiet
from kvserve_core.evaluation.quality import Interval
from kvserve_core.evaluation.sampling import evenly, ratio
from kvserve_core.evaluator import Evaluation, Evaluator, Prepared
from kvserve_plugins.evaluators._harness_model import HarnessModel

Scores = Mapping[str, Sequence[float]]
"""Task to the score of each of its documents, in order."""


class LmEval(Evaluator):
    """Any task of lm-evaluation-harness, its prompts' KV compressed and restored.

    Quality is the ratio of summed scores with and without compression over all documents, cut to [0, 1], with a 95 %
    bootstrap interval over documents; metrics are the ratios by task. The same documents are asked of every pipeline:
    one at random from each of ``samples`` equal stretches of a task. Tasks in local files need no network; others
    download their data. Their KV is kept between runs, so that memory grows with the documents.
    """

    class Config(ComponentConfig):
        """tasks: names that the harness knows. include_path: a folder with more of them, as YAML files. samples:
        documents a task; None for all. metric: a metric of the tasks that is better when higher; None for their first.
        few_shot: examples before each question; None for the task's own."""

        tasks: tuple[str, ...] = Field(min_length=1)
        include_path: str | None = None
        samples: int | None = Field(50, ge=1)
        seed: int = 0
        metric: str | None = None
        few_shot: int | None = Field(None, ge=0)

    config: Config

    def prepare(self, engine: Engine, texts: Sequence[Text], progress: Progress = quiet) -> Prepared:
        """Load the tasks and run the uncompressed model; the texts are not used."""
        del texts
        run = _Prepared(self.config, engine)
        try:
            run.measure_reference()
        except BaseException:
            run.close()
            raise
        progress(1, 1)
        return run


class _Prepared(Prepared):
    def __init__(self, config: LmEval.Config, engine: Engine) -> None:
        self._config, self._model = config, HarnessModel(engine)
        self._manager = _manager(config)
        self._tasks = dict(self._manager.load(list(config.tasks))["tasks"])
        self._chosen = {
            name: evenly(len(task.eval_docs), config.samples, config.seed) for name, task in self._tasks.items()
        }
        self._metrics = {name: _metric(name, task, config.metric) for name, task in self._tasks.items()}
        self._reference: Scores = {}

    def measure_reference(self) -> None:
        self._reference = self._scores(None)
        if not any(sum(scores) > 0 for scores in self._reference.values()):
            raise ConfigError("the uncompressed model scores nothing on these tasks; choose some it can do", "tasks")

    def run(self, roundtrip: Roundtrip) -> Evaluation:
        test, seed = self._scores(roundtrip), self._config.seed
        metrics: dict[str, Interval] = {
            name: ratio(test[name], scores, seed) for name, scores in self._reference.items() if sum(scores) > 0
        }
        joined = [[x for name in metrics for x in scores[name]] for scores in (test, self._reference)]
        return Evaluation(ratio(joined[0], joined[1], seed), len(joined[0]), metrics)

    def close(self) -> None:
        self._model.close()

    def _scores(self, roundtrip: Roundtrip | None) -> Scores:
        self._model.roundtrip = roundtrip
        try:
            with redirect_stderr(StringIO()):  # the harness's own progress bars
                found = simple_evaluate(
                    self._model,
                    tasks=list(self._config.tasks),
                    num_fewshot=self._config.few_shot,
                    samples=self._chosen,
                    bootstrap_iters=0,
                    task_manager=self._manager,
                )
        finally:
            self._model.roundtrip = None
        return {name: _of(found["samples"][name], metric) for name, metric in self._metrics.items()}


def _manager(config: LmEval.Config) -> TaskManager:
    """One that knows the tasks; the harness's own thousands are looked through only when they are asked for.

    Raises:
        ConfigError: nothing knows one of them.
    """
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    if config.include_path is not None:
        own = TaskManager(include_path=config.include_path, include_defaults=False)
        if set(config.tasks) <= set(own.all_tasks):
            return own
    found = TaskManager(include_path=config.include_path)
    if unknown := [name for name in config.tasks if name not in found.all_tasks]:
        raise ConfigError(f"lm-evaluation-harness knows no task {unknown[0]!r}; 'include_path' adds your own", "tasks")
    return found


def _metric(name: str, task: Any, wanted: str | None) -> str:
    """The metric to judge a task by.

    Raises:
        ConfigError: the task has no such metric, or it is better when lower.
    """
    better = {metric: bool(higher) for metric, higher in task.higher_is_better().items()}
    chosen = wanted or next(iter(better))
    if not better.get(chosen, False):
        known = ", ".join(metric for metric, higher in better.items() if higher) or "none"
        raise ConfigError(
            f"task {name!r} has no metric {chosen!r} that is better when higher; it has: {known}", "metric"
        )
    return chosen


def _of(samples: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """The scores in the order of the documents."""
    return [float(s[metric]) for s in sorted(samples, key=lambda s: int(s["doc_id"]))]
