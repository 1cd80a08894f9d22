"""Retrieval of one fact from anywhere in a prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from kvserve_core.component import ComponentConfig
from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.engine import Engine, Progress, Roundtrip, Text, quiet
from kvserve_core.evaluation.questions import INSTANCES, passkeys
from kvserve_core.evaluation.tasks import SOLVED, TaskBench
from kvserve_core.evaluator import Evaluation, Evaluator, Prepared
from kvserve_plugins.evaluators._shares import kept, require_counted


class Passkey(Evaluator):
    """Digits told once in a long text and asked for at its end.

    At three depths of about 640 tokens. An answer counts when the uncompressed model gives it; quality is the share of
    those that is given through compressed KV too, with its 95 % Wilson interval. Depths that the uncompressed model
    solves less than half of the time are left out. Metrics: the share at each depth.
    """

    class Config(ComponentConfig):
        """samples: questions a depth. seed: of the digits."""

        samples: int = Field(INSTANCES, ge=1)
        seed: int = 0

    config: Config

    def prepare(self, engine: Engine, texts: Sequence[Text], progress: Progress = quiet) -> Prepared:
        """Ask the uncompressed model; the texts hide the digits, in turn."""
        if not texts:
            raise ConfigError("there are no texts to hide a passkey in; name some", "texts")
        rng, hay = random.Random(self.config.seed), [t.text for t in texts]
        given = passkeys(engine.tokenize, hay, self.config.samples, rng)
        done = iter(range(1, len(given) + 1))
        bench = TaskBench(engine, given, lambda: progress(next(done), len(given)))
        try:
            require_counted(bench.uncompressed, SOLVED)
        except ConfigError:
            bench.close()
            raise
        return _Prepared(bench)


class _Prepared(Prepared):
    def __init__(self, bench: TaskBench) -> None:
        self._bench = bench

    def run(self, roundtrip: Roundtrip) -> Evaluation:
        answers: dict[str, list[bool]] = {}
        for i, right in self._bench.each(roundtrip).items():
            if self._bench.solved[i]:
                answers.setdefault(self._bench.given[i].task, []).append(right)
        return kept(answers)

    def close(self) -> None:
        self._bench.close()
