"""Makes the numbers of :mod:`kvserve_plugins.kernels.rans_tables`. They were made once; nothing calls this at run time.

Decimal arithmetic of 60 digits, so that the rounding to integers is the same on every machine.
``python -m kvserve_plugins.kernels.rans_make`` prints the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from itertools import pairwise

TOTAL = 4096
WIDEST = 15
SIGMAS = 21
HALF = Decimal("0.5")
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


def sigma(i: int) -> Decimal:
    """Standard deviation of rung ``i`` in quantization steps: ``0.1 * 2^(i / 3)``."""
    return Decimal("0.1") * Decimal(2) ** (Decimal(i) / 3)


def laplace_tail(x: Decimal, s: Decimal) -> Decimal:
    """P(X > x) of a Laplace variable with standard deviation ``s``."""
    return HALF * (-x * Decimal(2).sqrt() / s).exp()


def logistic_tail(x: Decimal, s: Decimal) -> Decimal:
    """P(X > x) of a logistic variable."""
    return 1 / (1 + (x * PI / (s * Decimal(3).sqrt())).exp())


def gaussian_tail(x: Decimal, s: Decimal) -> Decimal:
    """P(X > x) of a normal variable: 1/2 - phi(z) (z + z^3/3 + z^5/15 + ...), all terms positive; 0 from z = 10 on."""
    z = x / s
    if z >= 10:  # below 1e-23, and a count is 1/4096
        return Decimal(0)
    term = total = z
    n = 1
    while term > Decimal("1e-50"):
        n += 2
        term *= z * z / n
        total += term
    return HALF - total * (-z * z / 2).exp() / (2 * PI).sqrt()


TAILS: tuple[Callable[[Decimal, Decimal], Decimal], ...] = (laplace_tail, logistic_tail, gaussian_tail)
"""Shape 0, 1, 2."""


def nearest(p: Decimal) -> int:
    """``TOTAL p`` as an integer, ties to even."""
    return int((TOTAL * p).to_integral_value(ROUND_HALF_EVEN))


def table(shape: int, i: int) -> tuple[int, ...]:
    """Counts of the values 0, 1, ... r; -v has the count of v, and what is left of ``TOTAL`` is the escape's.

    r is the last value up to 15 with at least half a count. Every count is at least 1, and 0 takes the rounding.
    """
    with localcontext() as context:
        context.prec = 60
        tails = [TAILS[shape](v + HALF, sigma(i)) for v in range(WIDEST + 1)]
        p = [low - high for low, high in pairwise(tails)]
        r = max((v for v, each in enumerate(p, 1) if TOTAL * each >= HALF), default=0)
        counts = [max(1, nearest(each)) for each in p[:r]]
        escape = max(1, nearest(2 * tails[r]))
    return (TOTAL - escape - 2 * sum(counts), *counts)


def tables() -> list[tuple[int, ...]]:
    """Number ``21 shape + rung``."""
    return [table(shape, i) for shape in range(len(TAILS)) for i in range(SIGMAS)]


if __name__ == "__main__":
    sys.stdout.write("".join(f"    {row},\n" for row in tables()))
