"""Questions asked through compressed KV: exact answers.

An answer is right when every one of its tokens is what greedy decoding gives. A task that the uncompressed model
answers less than half of the time says nothing about compression and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from blake3 import blake3

from kvserve_core.evaluation.engine import Engine, Roundtrip
from kvserve_core.evaluation.prompts import HeldPrompts
from kvserve_core.evaluation.questions import Instance

SOLVED = 0.5
"""The accuracy without compression from which a task is counted."""


class TaskBench:
    """Prefills each question once and keeps its KV; then measures any roundtrip.

    uncompressed: accuracy without compression, by task. solved: for each question, whether the uncompressed model
    answers it. digest: of all questions.
    """

    def __init__(self, engine: Engine, given: Sequence[Instance], progress: Callable[[], None] = lambda: None) -> None:
        self._engine, self.given = engine, tuple(given)
        self._held = HeldPrompts(engine, [i.prompt[:-1] for i in self.given], lambda *_: progress())
        self.solved = tuple(self._right(k, i) for k, i in zip(self._held.keys, self.given, strict=True))
        self.uncompressed = self._accuracies(dict(enumerate(self.solved)))
        self.digest = blake3(repr(self.given).encode()).hexdigest()

    @property
    def counted(self) -> tuple[str, ...]:
        """Tasks that the uncompressed model solves."""
        return tuple(task for task, accuracy in self.uncompressed.items() if accuracy >= SOLVED)

    def run(self, roundtrip: Roundtrip) -> dict[str, float]:
        """Accuracy of each counted task through a roundtrip."""
        return self._accuracies(self.each(roundtrip))

    def each(self, roundtrip: Roundtrip) -> dict[int, bool]:
        """For each question of a counted task, by its index in ``given``, whether the answer is right."""
        return {i: self._through(i, roundtrip) for i, q in enumerate(self.given) if q.task in self.counted}

    def close(self) -> None:
        """Release the held KV."""
        self._held.close()

    def _through(self, i: int, roundtrip: Roundtrip) -> bool:
        with self._held.restored(i, roundtrip) as key:
            return self._right(key, self.given[i])

    def _right(self, key: str, instance: Instance) -> bool:
        """Greedy decoding gives the answer iff each token is the most likely one after those before it."""
        fed = [instance.prompt[-1], *instance.answer[:-1]]
        said = self._engine.teacher_forced(key, fed).argmax(-1)
        return bool(said.tolist() == list(instance.answer))

    def _accuracies(self, right: Mapping[int, bool]) -> dict[str, float]:
        tasks = dict.fromkeys(self.given[i].task for i in right)
        members = {task: [r for i, r in right.items() if self.given[i].task == task] for task in tasks}
        return {task: sum(values) / len(values) for task, values in members.items()}
