"""Generation that depends on exact recall, compared with what is generated without compression."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from kvserve_core.component import ComponentConfig
from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.engine import Engine, Progress, Roundtrip, Text, quiet
from kvserve_core.evaluation.prompts import HeldPrompts
from kvserve_core.evaluation.questions import INSTANCES, Instance, copies_and_lookups
from kvserve_core.evaluation.tasks import SOLVED
from kvserve_core.evaluator import Evaluation, Evaluator, Prepared
from kvserve_plugins.evaluators._shares import kept, require_counted


class CopyLookup(Evaluator):
    """Whether copies and table lookups go on as they do without compression, token by token.

    A run agrees when its first ``tokens`` greedy tokens equal those of the uncompressed run. Quality is the share that
    agrees, with its 95 % Wilson interval; metrics are the shares of ``copy`` and ``lookup``. A task whose right answer
    the uncompressed model gives less than half of the time is left out. The strictest of the evaluators: a run that
    differs in one late token counts as lost.
    """

    class Config(ComponentConfig):
        """samples: questions a task. seed: of the words and numbers. tokens: greedy tokens that must agree."""

        samples: int = Field(INSTANCES, ge=1)
        seed: int = 0
        tokens: int = Field(32, ge=1)

    config: Config

    def prepare(self, engine: Engine, texts: Sequence[Text], progress: Progress = quiet) -> Prepared:
        """Generate without compression; the texts are not used."""
        del texts
        given = copies_and_lookups(engine.tokenize, self.config.samples, random.Random(self.config.seed))
        held = HeldPrompts(engine, [i.prompt[:-1] for i in given], progress)
        said = [engine.generate(key, i.prompt[-1], self.config.tokens) for key, i in zip(held.keys, given, strict=True)]
        prepared = _Prepared(engine, held, given, said, self.config.tokens)
        try:
            require_counted(prepared.uncompressed, SOLVED)
        except ConfigError:
            prepared.close()
            raise
        return prepared


class _Prepared(Prepared):
    def __init__(
        self, engine: Engine, held: HeldPrompts, given: Sequence[Instance], said: Sequence[list[int]], tokens: int
    ) -> None:
        self._engine, self._held, self._given, self._said, self._tokens = engine, held, given, said, tokens
        right: dict[str, list[bool]] = {}
        for instance, words in zip(given, said, strict=True):
            right.setdefault(instance.task, []).append(tuple(words[: len(instance.answer)]) == instance.answer)
        self.uncompressed = {task: sum(answers) / len(answers) for task, answers in right.items()}

    def run(self, roundtrip: Roundtrip) -> Evaluation:
        answers: dict[str, list[bool]] = {}
        for i, instance in enumerate(self._given):
            if self.uncompressed[instance.task] >= SOLVED:
                answers.setdefault(instance.task, []).append(self._agrees(i, instance, roundtrip))
        return kept(answers)

    def _agrees(self, i: int, instance: Instance, roundtrip: Roundtrip) -> bool:
        with self._held.restored(i, roundtrip) as key:
            return self._engine.generate(key, instance.prompt[-1], self._tokens) == self._said[i]

    def close(self) -> None:
        self._held.close()
