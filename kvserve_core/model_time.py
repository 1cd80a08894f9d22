"""T_model and the deadline: what an engine takes besides moving KV, learned from what it reports."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from math import inf
from typing import Literal

from msgspec.structs import replace

from kvserve_core.bandwidth import MAX_SECONDS
from kvserve_core.latency import Line, crossing
from kvserve_core.policy import Decision, ServiceContext

ALPHA = 0.1
"""Weight of a new observation once there are ten; before that, all weigh the same."""
MAX_TOKENS = 2**40


class Mean:
    """A mean of the first values, then an EWMA. ``value`` is None until there is one."""

    __slots__ = ("_count", "value")

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def fold(self, sample: float) -> None:
        """Take a value in."""
        self._count += 1
        known = self.value if self.value is not None else 0.0
        self.value = known + max(ALPHA, 1.0 / self._count) * (sample - known)


class ModelTime:
    """Seconds per token of prefill and of decoding, and seconds in the queue before prefill. Thread-safe."""

    def __init__(self) -> None:
        self._prefill, self._queue, self._decode = Mean(), Mean(), Mean()
        self._lock = threading.Lock()

    @property
    def prefill_s_per_token(self) -> float | None:
        """None until a prefill was observed."""
        return self._prefill.value

    def observe_prefill(self, tokens: int, seconds: float, queue_s: float = 0.0) -> bool:
        """One prefill of ``tokens``, and what it waited; False where that cannot be true, and is ignored."""
        if not (_within(tokens, MAX_TOKENS) and _within(seconds, MAX_SECONDS)):
            return False
        if queue_s != 0 and not _within(queue_s, MAX_SECONDS):
            return False
        with self._lock:
            self._prefill.fold(seconds / tokens)
            self._queue.fold(queue_s)
        return True

    def observe_decode(self, tokens: int, seconds: float) -> bool:
        """``tokens`` generated in ``seconds``; for ``slo_kind`` "jct"."""
        if not (_within(tokens, MAX_TOKENS) and _within(seconds, MAX_SECONDS)):
            return False
        with self._lock:
            self._decode.fold(seconds / tokens)
        return True

    def prefill_s(self, tokens: int) -> float | None:
        """Seconds to compute ``tokens``; None until a prefill was observed."""
        rate = self._prefill.value
        return None if rate is None else rate * tokens

    def seconds(self, tokens: int) -> float:
        """Of T_model: the queue and the prefill. What was never observed counts as nothing."""
        return (self._queue.value or 0.0) + (self._prefill.value or 0.0) * tokens

    def generating_s(self, tokens: int) -> float:
        """Seconds to generate so many tokens, 0 until that was observed."""
        return (self._decode.value or 0.0) * tokens

    def reckon(self, context: ServiceContext) -> ServiceContext:
        """The same request with the T_model that was learned added, and ``elapsed_s`` taken off the budget.

        Of ``tokens`` that is the queue and their prefill; of ``output_tokens``, where the SLO is of the whole job,
        generating them, whether prefill is learned or was said as ``model_s``.
        """
        model_s, slo_s, tokens = context.model_s, context.slo_s, context.tokens
        if tokens is not None:  # as ``seconds``, without the cost of a call
            model_s += (self._queue.value or 0.0) + (self._prefill.value or 0.0) * tokens
        if context.output_tokens and context.slo_kind == "jct":
            model_s += self.generating_s(context.output_tokens)
        if slo_s is not None:
            slo_s -= context.elapsed_s
        if model_s > MAX_SECONDS:
            model_s = MAX_SECONDS
        return replace(context, model_s=model_s, slo_s=slo_s, elapsed_s=0.0, tokens=None, output_tokens=0)


def _within(value: object, most: float) -> bool:
    return isinstance(value, (int, float)) and 0 < value <= most


@dataclass(frozen=True)
class LoadDecision:
    """Whether to load a cached prefix or to compute it anew.

    tokens: the prefix's. load_s, recompute_s: what each takes; the former inf for what may not be loaded, the latter
    None while no prefill was observed. pays_from: tokens from which loading is faster at these speeds, inf for never.
    load: the bandwidth and the candidates that load_s was reckoned with, of which it names the fastest.
    """

    action: Literal["load", "recompute"]
    reason: str
    tokens: int
    load_s: float
    recompute_s: float | None
    pays_from: float
    load: Decision


def cannot_load(tokens: int, reason: str, load: Decision, recompute_s: float | None) -> LoadDecision:
    """Computing is all that is left."""
    return LoadDecision("recompute", f"it may not be loaded: {reason}", tokens, inf, recompute_s, inf, load)


def weigh(
    tokens: int, load: Decision, load_s: float, fixed_s: float, prefill_s_per_token: float | None
) -> LoadDecision:
    """Both are lines over the prefix length, computing from 0, loading from ``fixed_s``: they cross once or never."""
    if prefill_s_per_token is None:
        return LoadDecision("load", "no prefill was observed yet", tokens, load_s, None, 0.0, load)
    recomputing = Line(0.0, prefill_s_per_token)
    recompute_s, pays_from = recomputing.at(tokens), inf
    if tokens > 0 and (loading := Line(fixed_s, (load_s - fixed_s) / tokens)).slope < recomputing.slope:
        pays_from = crossing(loading, recomputing)
    loads = load_s < recompute_s
    reason = "loading is faster" if loads else "computing it anew is faster"
    return LoadDecision("load" if loads else "recompute", reason, tokens, load_s, recompute_s, pays_from, load)
