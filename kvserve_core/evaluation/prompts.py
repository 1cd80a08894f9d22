"""Prompts that are prefilled once; the KV of each can then go through any roundtrip, as often as wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from kvserve_core.evaluation.engine import Engine, Progress, Roundtrip, quiet

_NUMBERS = count()


class HeldPrompts:
    """The untouched KV of some prompts, in an engine. ``close`` releases it."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], progress: Progress = quiet) -> None:
        self._engine, self._lengths = engine, [len(p) for p in prompts]
        self._name = f"evaluation-{next(_NUMBERS)}"
        try:
            for i, ids in enumerate(prompts):
                engine.prefill(self.key(i), ids)
                progress(i + 1, len(prompts))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._lengths)

    def key(self, i: int) -> str:
        """The transfer id of prompt ``i``."""
        return f"{self._name}-{i}"

    @property
    def keys(self) -> tuple[str, ...]:
        """All transfer ids, in order."""
        return tuple(map(self.key, range(len(self))))

    @contextmanager
    def restored(self, i: int, roundtrip: Roundtrip) -> Iterator[str]:
        """A transfer id that holds the KV of prompt ``i`` as the roundtrip gives it, for the time of the block."""
        with restored(self._engine, self.key(i), self._lengths[i], roundtrip) as key:
            yield key

    def close(self) -> None:
        """Release the held KV."""
        for key in self.keys:
            self._engine.release(key)


@contextmanager
def restored(engine: Engine, key: str, num_tokens: int, roundtrip: Roundtrip) -> Iterator[str]:
    """A transfer id that holds the KV of ``key`` as the roundtrip gives it, for the time of the block."""
    through = f"{key}/restored"
    engine.open(through, num_tokens)
    try:
        for at, x in roundtrip(lambda at: engine.gather(key, at), num_tokens):
            engine.scatter(through, at, x)
        yield through
    finally:
        engine.release(through)
