"""Quality of anything that changes KV: real continuations, teacher-forced through the changed KV of a prompt.

For each text the KV of the first ``prompt_tokens`` tokens is exported, restored by what is under test and injected; the
next ``continuation_tokens`` tokens are fed through it and through the untouched KV, and the logits are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.evaluation.engine import Engine, Progress, Roundtrip, TokenText, quiet
from kvserve_core.evaluation.prompts import HeldPrompts
from kvserve_core.evaluation.quality import Quality, TextQuality, compare_to, log_probabilities

PROMPT_TOKENS = 768
CONTINUATION_TOKENS = 192


class Bench:
    """Prefills each text once; keeps its KV and what it predicts (40 MB a text at 49152 words); then measures."""

    def __init__(
        self,
        engine: Engine,
        texts: Sequence[TokenText],
        prompt_tokens: int = PROMPT_TOKENS,
        progress: Progress = quiet,
    ) -> None:
        for text in texts:
            if len(text.ids) < prompt_tokens + 2:
                raise UnsupportedSpecError(
                    f"text {text.name!r} has {len(text.ids)} tokens; the prompt takes {prompt_tokens} and the"
                    " continuation at least 2"
                )
        self._engine, self._texts = engine, tuple(texts)
        self._rest = [t.ids[prompt_tokens:] for t in texts]
        self._held = HeldPrompts(engine, [t.ids[:prompt_tokens] for t in texts], progress)
        self._reference: list[Tensor] = [
            log_probabilities(engine.teacher_forced(key, rest))
            for key, rest in zip(self._held.keys, self._rest, strict=True)
        ]

    def run(self, roundtrip: Roundtrip, progress: Progress | None = None) -> Quality:
        """Quality of one roundtrip over all texts. ``progress(done, of)`` after each."""
        results = []
        for i in range(len(self._texts)):
            results.append(self._one(i, roundtrip))
            if progress is not None:
                progress(i + 1, len(self._texts))
        return Quality(tuple(results))

    @property
    def keys(self) -> tuple[str, ...]:
        """Transfer ids under which the engine holds the untouched KV, in the order of the texts."""
        return self._held.keys

    def close(self) -> None:
        """Release the held KV."""
        self._held.close()

    def _one(self, i: int, roundtrip: Roundtrip) -> TextQuality:
        with self._held.restored(i, roundtrip) as key:
            tested = self._engine.teacher_forced(key, self._rest[i])
        return compare_to(self._texts[i].name, self._reference[i], tested, self._rest[i])
