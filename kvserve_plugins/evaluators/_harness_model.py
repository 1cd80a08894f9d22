"""A model for lm-evaluation-harness whose prompts' KV can go through a roundtrip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.engine import Engine, Roundtrip
from kvserve_core.evaluation.prompts import restored

GENERATED = 256
"""Tokens, where a task does not say."""
_NUMBERS = count()


class HarnessModel(LM):
    """Scores continuations and generates greedily, one request after the other.

    A prompt is prefilled when it is first seen and its KV kept for later runs. While ``roundtrip`` is set, the KV of
    every prompt goes through it; None is the uncompressed model.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._keys: dict[tuple[int, ...], str] = {}
        self.roundtrip: Roundtrip | None = None

    @property
    def tokenizer_name(self) -> str:
        """What the harness keys its caches by."""
        return self._engine.spec.model_id

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Sum of log probabilities of each continuation, and whether it is what greedy decoding gives."""
        pairs = [self._split(*request.args) for request in requests]
        found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        for prompt, members in _by_prompt(pairs):
            with self._held(prompt) as key:
                for i in members:
                    found[i] = self._score(key, prompt, pairs[i][1])
        return found

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Greedy text up to the first of the task's stop strings."""
        return [self._generate(*request.args) for request in requests]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Not a question about a prompt's KV."""
        raise ConfigError(
            f"{len(requests)} requests of this task score a whole text without a prompt, so that no KV would be"
            " transferred; choose another task, or the evaluator 'continuation'",
            "tasks",
        )

    def close(self) -> None:
        """Release the held KV."""
        for key in self._keys.values():
            self._engine.release(key)
        self._keys.clear()

    def _split(self, context: str, continuation: str) -> tuple[tuple[int, ...], list[int]]:
        """Tokens of both; spaces at the end of the context belong to the first word after it."""
        bare = context.rstrip()
        prompt = tuple(self._engine.tokenize(bare))
        whole = self._engine.tokenize(bare + context[len(bare) :] + continuation)
        rest = whole[len(prompt) :]
        if not rest:
            raise ConfigError(f"the continuation {continuation!r} has no tokens of its own", "tasks")
        return _prompt(prompt, context), rest

    def _score(self, key: str, prompt: Sequence[int], rest: Sequence[int]) -> tuple[float, bool]:
        logits = torch.log_softmax(self._engine.teacher_forced(key, [prompt[-1], *rest[:-1]]).float(), -1)
        said = torch.tensor(list(rest))
        greedy = bool((logits.argmax(-1) == said).all())
        return float(logits.gather(1, said[:, None]).sum()), greedy

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        limit = int(options.get("max_gen_toks", GENERATED))
        prompt = _prompt(tuple(self._engine.tokenize(context)), context)
        with self._held(prompt) as key:
            return self._until(key, prompt[-1], limit, stops)

    def _until(self, key: str, last: int, limit: int, stops: Sequence[str]) -> str:
        ids: list[int] = []
        text = ""
        for token in self._engine.stream(key, last, limit):
            ids.append(token)
            text = self._engine.detokenize(ids)
            if any(stop in text for stop in stops):
                break
        return min((text.partition(stop)[0] for stop in stops), key=len, default=text)

    @contextmanager
    def _held(self, prompt: tuple[int, ...]) -> Iterator[str]:
        key = self._keys.get(prompt)
        if key is None:
            key = f"lm-eval-{next(_NUMBERS)}"
            self._engine.prefill(key, prompt[:-1])
            self._keys[prompt] = key
        if self.roundtrip is None:
            yield key
            return
        with restored(self._engine, key, len(prompt) - 1, self.roundtrip) as through:
            yield through


def _prompt(ids: tuple[int, ...], context: str) -> tuple[int, ...]:
    if len(ids) < 2:
        raise ConfigError(f"the prompt {context!r} has no KV to transfer; choose a task with longer ones", "tasks")
    return ids


def _by_prompt(pairs: Sequence[tuple[tuple[int, ...], list[int]]]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Each prompt with the indices of its continuations: choices of one question restore its KV once."""
    found: dict[tuple[int, ...], list[int]] = {}
    for i, (prompt, _) in enumerate(pairs):
        found.setdefault(prompt, []).append(i)
    yield from found.items()
