"""From what several evaluators say to one relative quality."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.quality import Interval
from kvserve_core.evaluator import Evaluation, Share
from kvserve_core.profiling import point

QUALITY, SAMPLES = "quality", "samples"
ROUNDING = 1e-9


def judged(found: Mapping[str, Evaluation]) -> tuple[Interval, dict[str, point.Interval]]:
    """The quality that counts, and every figure by name.

    Names: ``continuation.kl``, ``continuation.quality``, and by kind of text ``continuation.quality@code`` and
    ``continuation.samples@code``.

    Raises:
        ConfigError: an evaluator says a quality that is none.
    """
    metrics: dict[str, point.Interval] = {}
    for name, evaluation in found.items():
        for said in (Share(evaluation.quality, evaluation.samples), *evaluation.by_kind.values()):
            _require_quality(said.quality, said.samples, name)
        metrics[f"{name}.{QUALITY}"] = _plain(evaluation.quality)
        metrics |= {f"{name}.{metric}": _plain(value) for metric, value in evaluation.metrics.items()}
        for kind, share in evaluation.by_kind.items():
            metrics[f"{name}.{QUALITY}@{kind}"] = _plain(share.quality)
            metrics[f"{name}.{SAMPLES}@{kind}"] = (share.samples,) * 3
    return harshest({name: evaluation.quality for name, evaluation in found.items()}), metrics


def _require_quality(said: Interval, samples: int, name: str) -> None:
    ends = (said.low, said.mean, said.high)
    if samples < 1 or not all(-ROUNDING <= x <= 1 + ROUNDING for x in ends):
        message = (
            f"says a quality of {ends} from {samples} samples; expected low, mean and high in [0, 1] of at least 1"
        )
        raise ConfigError(message, f"evaluators.{name}")


def harshest(qualities: Mapping[str, Interval]) -> Interval:
    """The quality with the lowest upper bound: that of the evaluator which proves most against the pipeline.

    So a loss that one evaluator is sure of counts, and one with few samples does not hide what another resolves.
    """
    return min(qualities.values(), key=lambda q: (q.high, q.low))


def _plain(value: Interval) -> point.Interval:
    """Open ends of an interval are the mean itself plus or minus a large number, for JSON has no infinity."""
    return value.mean, _finite(value.low), _finite(value.high)


def _finite(x: float) -> float:
    return x if math.isfinite(x) else math.copysign(1e9, x)
