"""The decode side: fetch, verify, decode, inject, generate; and what that cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.errors import KVServeError
from kvserve_core.evaluation.quality import TextQuality, compare
from kvserve_core.policy import Outcome
from kvserve_core.registry import default_registry
from kvserve_core.session import Consumer, LoadFailed
from kvserve_core.spec import whole
from kvserve_core.transport import Locator
from kvserve_hf.engine import Engine

DEADLINE_S = 120.0


@dataclass(frozen=True)
class Answered:
    """A generation from fetched KV. first_token_s counts from the start of the request, prefill apart."""

    outcome: Outcome
    ids: tuple[int, ...]
    first_token_s: float
    logits: Tensor | None


class DecodeSide:
    """An engine that never prefills: its KV comes over the transport."""

    def __init__(self, engine: Engine, artefacts: Artefacts = NONE) -> None:
        self.engine = engine
        self._transport = default_registry().create("transport", "tcp")
        self._consumer = Consumer(
            engine.spec, whole(engine.spec), lambda _: self._transport, engine.scatter, artefacts=artefacts
        )

    def answer(
        self, request: Callable[[], Locator], last: int, max_tokens: int, forced: Sequence[int] | None = None
    ) -> Answered:
        """Get the KV that ``request`` publishes and generate greedily after the ``last`` prompt token.

        forced: tokens to feed instead, for logits ``[len(forced) + 1, V]``; None: the generated ones.

        Raises:
            KVServeError: the KV did not arrive.
        """
        began = time.perf_counter()
        locator = request()
        outcome = self._load(locator)
        tokens = self.engine.stream(locator.transfer_id, last, max_tokens)
        first = next(tokens, None)
        first_token_s = time.perf_counter() - began
        ids = () if first is None else (first, *tokens)
        fed = [last, *(ids if forced is None else forced)]
        logits = self.engine.teacher_forced(locator.transfer_id, fed)
        self.engine.release(locator.transfer_id)
        return Answered(outcome, ids, first_token_s, logits)

    def warm_up(self, request: Callable[[], Locator]) -> None:
        """Fetch and forget."""
        locator = request()
        self._load(locator)
        self.engine.release(locator.transfer_id)

    def _load(self, locator: Locator) -> Outcome:
        self.engine.open(locator.transfer_id, locator.num_tokens)
        self._consumer.fetch(locator, range(locator.num_tokens), time.monotonic() + DEADLINE_S)
        while True:
            for event in self._consumer.poll():
                if isinstance(event, LoadFailed):
                    raise KVServeError(f"fetching {locator.transfer_id!r} failed: {event.error}") from event.error
                return event.outcome
            time.sleep(0.0005)

    def close(self) -> None:
        """Stop the fetch threads and close the sockets."""
        self._consumer.close()
        self._transport.close()


def quality_of(name: str, reference: Answered, test: Answered, last: int) -> TextQuality:
    """KL and top-1 of ``test`` against ``reference``, both fed the reference's tokens."""
    if reference.logits is None or test.logits is None:
        raise KVServeError("logits were not kept")
    return compare(name, reference.logits, test.logits, [last, *reference.ids])
