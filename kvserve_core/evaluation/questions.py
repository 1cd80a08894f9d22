"""Questions with one right answer: a passkey in a long text, a lookup and a copy; in plain text, from seeds.

So a base model can be asked too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Tokenize = Callable[[str], Sequence[int]]
DEPTHS = (0.1, 0.5, 0.9)
HAYSTACK_TOKENS = 640
INSTANCES = 8
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
    return [*passkeys(tokenize, texts, count, rng), *copies_and_lookups(tokenize, count, rng)]


def passkeys(tokenize: Tokenize, texts: Sequence[str], count: int, rng: random.Random) -> list[Instance]:
    """``count`` passkeys at each depth."""
    return [passkey(tokenize, texts[i % len(texts)], depth, rng) for depth in DEPTHS for i in range(count)]


def copies_and_lookups(tokenize: Tokenize, count: int, rng: random.Random) -> list[Instance]:
    """``count`` lookups, then as many copies."""
    return [*(lookup(tokenize, rng) for _ in range(count)), *(copying(tokenize, rng) for _ in range(count))]


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
