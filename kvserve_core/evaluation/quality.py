"""How far answers through compressed KV are from answers through uncompressed KV, with confidence bounds.

The unit of the statistics is a text: tokens of one text are not independent. Quality is ``exp(-mean KL)``, its lower
bound comes from the upper end of the 95 % interval on the mean KL.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvserve_core.errors import UnsupportedSpecError

# Two-sided 95 % quantiles of Student's t for 1 .. 30 degrees of freedom.
T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % t-interval; with a single value the interval is unbounded."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class TextQuality:
    """One text: ``KL(reference || test)`` in nats a token, share of equal top-1 tokens, change of the NLL in nats."""

    name: str
    kl: float
    top1: float
    dnll: float
    num_tokens: int


@dataclass(frozen=True)
class Quality:
    """Per-text values and what they say together."""

    texts: tuple[TextQuality, ...]

    @cached_property
    def kl(self) -> Interval:
        """Nats per token."""
        return interval([t.kl for t in self.texts])

    @cached_property
    def top1(self) -> Interval:
        """Agreement of the most likely token, 0 .. 1."""
        return interval([t.top1 for t in self.texts])

    @cached_property
    def dnll(self) -> Interval:
        """Change of the negative log likelihood of the real text, nats per token."""
        return interval([t.dnll for t in self.texts])

    @property
    def value(self) -> float:
        """``exp(-mean KL)``: 1 is no difference."""
        return min(1.0, math.exp(-self.kl.mean))

    @property
    def lower(self) -> float:
        """The lower 95 % bound of :attr:`value`; what ``min_quality`` is compared with."""
        return min(1.0, math.exp(-self.kl.high))

    @property
    def upper(self) -> float:
        """The upper 95 % bound of :attr:`value`."""
        return min(1.0, math.exp(-self.kl.low)) if self.kl.low > 0 else 1.0


def compare(name: str, reference: Tensor, test: Tensor, ids: Sequence[int]) -> TextQuality:
    """Compare logits ``[T, V]`` of the same T fed tokens; ``ids`` are these tokens, for the likelihoods.

    The distribution at position i predicts ``ids[i + 1]``; the last one has KL and top-1 but no likelihood.

    Raises:
        UnsupportedSpecError: shapes differ, or there is nothing to compare.
    """
    return compare_to(name, log_probabilities(reference), test, ids)


def compare_to(name: str, p: Tensor, test: Tensor, ids: Sequence[int]) -> TextQuality:
    """:func:`compare` with :func:`log_probabilities` of the reference, which many comparisons can share."""
    if p.shape != test.shape or p.ndim != 2 or len(ids) != len(p) or len(ids) < 2:
        raise UnsupportedSpecError(
            f"text {name!r}: reference {tuple(p.shape)}, test {tuple(test.shape)} and {len(ids)} tokens; give"
            " equal [T, V] with T tokens, T at least 2"
        )
    q = log_probabilities(test)
    kl = max(0.0, float((p.exp() * (p - q)).sum(-1).mean()))  # rounding can leave -1e-9 for equal logits
    top1 = float((p.argmax(-1) == q.argmax(-1)).float().mean())
    return TextQuality(name, kl, top1, nll(q, ids) - nll(p, ids), len(ids))


def log_probabilities(logits: Tensor) -> Tensor:
    """Of logits ``[T, V]``, in float32."""
    return torch.log_softmax(logits.float(), -1)


def nll(log_p: Tensor, ids: Sequence[int]) -> float:
    """Mean negative log likelihood of ``ids[1:]`` under log probabilities ``[T, V]``, nats per token."""
    targets = torch.tensor(list(ids[1:]))[:, None]
    return -float(log_p[:-1].gather(1, targets).mean())


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % t-interval of the mean.

    Raises:
        UnsupportedSpecError: no values.
    """
    if not values:
        raise UnsupportedSpecError("no texts were measured; give at least two for an interval")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    half = t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def t95(df: int) -> float:
    """The two-sided 95 % quantile of Student's t; past the table by its expansion in 1/df (good to 1e-3)."""
    z = 1.959964
    return T95[df - 1] if df <= len(T95) else z + (z**3 + z) / (4 * df)
