"""Tasks with one right answer, asked through compressed KV: a passkey in a long text, a lookup and a copy.

An answer is right when every one of its tokens is what greedy decoding gives. All are made from seeds, in plain text,
so a base model can be asked too. A task that the uncompressed model answers less than half of the time says nothing
about compression and is not counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3

from kvserve_core.spec import Region
from kvserve_hf.engine import Engine
from kvserve_hf.measure import Roundtrip

Tokenize = Callable[[str], Sequence[int]]
DEPTHS = (0.1, 0.5, 0.9)
HAYSTACK_TOKENS = 640
INSTANCES = 8
SOLVED = 0.5
"""The accuracy without compression from which a task is counted."""
VOCABULARY = (
    "apple river stone cloud garden window bridge candle forest harbor island jacket kettle ladder market needle orange"
    " pencil rabbit silver table umbrella valley wagon yellow zebra anchor basket castle desert engine feather guitar"
    " hammer iron jungle kitten lemon mirror nest ocean pepper quilt ribbon saddle tiger"
)
WORDS = tuple(VOCABULARY.split())


@dataclass(frozen=True)
class Instance:
    """One question: the tokens of the prompt, and those of the answer."""

    task: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def instances(tokenize: Tokenize, texts: Sequence[str], count: int = INSTANCES, seed: int = 0) -> list[Instance]:
    """``count`` questions a task, and a depth of the passkey; ``texts`` hide it, in turn."""
    rng = random.Random(seed)
    out = [passkey(tokenize, texts[i % len(texts)], depth, rng) for depth in DEPTHS for i in range(count)]
    return [*out, *(lookup(tokenize, rng) for _ in range(count)), *(copying(tokenize, rng) for _ in range(count))]


def passkey(tokenize: Tokenize, text: str, depth: float, rng: random.Random) -> Instance:
    """Five digits that are told once, at ``depth`` of a text of about 640 tokens, and asked for at its end."""
    key = " ".join(str(rng.randrange(10)) for _ in range(5))
    start = len(tokenize(""))
    hay = list(tokenize(text)[: HAYSTACK_TOKENS + start])
    cut = start + int(depth * HAYSTACK_TOKENS)
    told = _plain(tokenize, f"\n\nImportant: the pass key is {key} . Remember it: {key} is the pass key.\n\n")
    asked = _plain(tokenize, "\n\nQuestion: What is the pass key?\nAnswer: the pass key is")
    prompt = (*hay[:cut], *told, *hay[cut:], *asked)
    return Instance(f"passkey-{depth:g}", prompt, tuple(_plain(tokenize, f" {key}")))


def lookup(tokenize: Tokenize, rng: random.Random) -> Instance:
    """The number that stands behind one of 24 words, after four others were answered."""
    names = rng.sample(WORDS, 24)
    rows = {name: f"{name}: {rng.randrange(100, 1000)}" for name in names}
    *shown, wanted = rng.sample(names, 5)
    prompt = "\n".join(["A table of words and their numbers.", "", *rows.values(), "", "The same words, mixed.", ""])
    asked, answer = rows[wanted].split(":")
    return _instance("lookup", tokenize, "\n".join([prompt, *(rows[name] for name in shown), f"{asked}:"]), answer)


def copying(tokenize: Tokenize, rng: random.Random) -> Instance:
    """A line of five words, given among eight lines and repeated after those before it."""
    lines = [", ".join(rng.sample(WORDS, 5)) for _ in range(8)]
    wanted = rng.randrange(4, 8)
    head, _, answer = lines[wanted].partition(",")
    return _instance("copy", tokenize, "\n".join([*lines, "", *lines[:wanted], f"{head},"]), answer)


def _instance(task: str, tokenize: Tokenize, prompt: str, answer: str) -> Instance:
    return Instance(task, tuple(tokenize(prompt)), tuple(_plain(tokenize, answer)))


def _plain(tokenize: Tokenize, text: str) -> list[int]:
    """Tokens without those that start every text."""
    return list(tokenize(text)[len(tokenize("")) :])


class TaskBench:
    """Prefills each question once and keeps its KV; then measures any roundtrip.

    uncompressed: accuracy without compression, by task. digest: of all questions.
    """

    def __init__(self, engine: Engine, given: Sequence[Instance], progress: Callable[[], None] = lambda: None) -> None:
        self._engine, self._given = engine, tuple(given)
        right: dict[str, list[bool]] = {}
        for i, instance in enumerate(self._given):
            engine.prefill(self._key(i), instance.prompt[:-1])
            right.setdefault(instance.task, []).append(self._right(self._key(i), instance))
            progress()
        self.uncompressed = _accuracies(right)
        self.digest = blake3(repr(self._given).encode()).hexdigest()

    @property
    def counted(self) -> tuple[str, ...]:
        """Tasks that the uncompressed model solves."""
        return tuple(task for task, accuracy in self.uncompressed.items() if accuracy >= SOLVED)

    def run(self, roundtrip: Roundtrip) -> dict[str, float]:
        """Accuracy of each counted task through a roundtrip."""
        right: dict[str, list[bool]] = {}
        for i, instance in enumerate(self._given):
            if instance.task in self.counted:
                right.setdefault(instance.task, []).append(self._through(i, instance, roundtrip))
        return _accuracies(right)

    def close(self) -> None:
        """Release the held KV."""
        for i in range(len(self._given)):
            self._engine.release(self._key(i))

    def _through(self, i: int, instance: Instance, roundtrip: Roundtrip) -> bool:
        key = f"{self._key(i)}/restored"
        self._engine.open(key, len(instance.prompt) - 1)
        try:
            restored: Iterable[tuple[Region, torch.Tensor]] = roundtrip(
                lambda at: self._engine.gather(self._key(i), at), len(instance.prompt) - 1
            )
            for at, x in restored:
                self._engine.scatter(key, at, x)
            return self._right(key, instance)
        finally:
            self._engine.release(key)

    def _right(self, key: str, instance: Instance) -> bool:
        """Greedy decoding gives the answer iff each token is the most likely one after those before it."""
        fed = [instance.prompt[-1], *instance.answer[:-1]]
        said = self._engine.teacher_forced(key, fed).argmax(-1)
        return said.tolist() == list(instance.answer)

    def _key(self, i: int) -> str:
        return f"task-{id(self)}-{i}"


def _accuracies(right: Mapping[str, Sequence[bool]]) -> dict[str, float]:
    return {task: sum(values) / len(values) for task, values in right.items()}
