"""Means and covariances of a block's values, in float64, and where they are kept between two runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvserve_hf.calibrate.fisher import Sensitivity
from kvserve_hf.calibrate.work import Work


class Moments:
    """Sums over tokens of one block of n values: 8 n^2 bytes, whatever the number of texts."""

    def __init__(self, size: int) -> None:
        self.count = 0
        self.total = torch.zeros(size, dtype=torch.float64)
        self.outer = torch.zeros(size, size, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        """Values ``[T, n]``."""
        wide = rows.double()
        self.count += len(wide)
        self.total += wide.sum(0)
        self.outer.addmm_(wide.T, wide)

    def merge(self, other: Moments) -> None:
        """Add what ``other`` has summed up."""
        self.count += other.count
        self.total += other.total
        self.outer += other.outer

    def without(self, other: Moments) -> Moments:
        """These sums less those of ``other``, which are a part of them."""
        rest = Moments(0)
        rest.count, rest.total, rest.outer = (
            self.count - other.count,
            self.total - other.total,
            self.outer - other.outer,
        )
        return rest

    @property
    def mean(self) -> Tensor:
        """``[n]``."""
        return self.total / max(self.count, 1)

    def covariance(self) -> Tensor:
        """``[n, n]``."""
        mean = self.mean
        return self.outer / max(self.count, 1) - torch.outer(mean, mean)


class Sums:
    """What some texts add up to: the moments of each block, and the metric."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.texts = 0
        self.moments = [Moments(size) for size in sizes]
        self.sensitivity = Sensitivity()

    def merge(self, other: Sums) -> None:
        """Add what ``other`` has summed up."""
        self.texts += other.texts
        self.sensitivity.merge(other.sensitivity)
        for mine, theirs in zip(self.moments, other.moments, strict=True):
            mine.merge(theirs)


class State:
    """What a run has summed up, an entry a fold of texts; kept after each text, so that it can go on there."""

    def __init__(self, work: Work, sizes: Sequence[int]) -> None:
        self._work, self._sizes = work, list(sizes)

    def sums(self, fold: int) -> Sums:
        """Of one fold: zeros if nothing was saved.

        Raises:
            ArtefactError: the folder is another run's.
        """
        found = Sums(self._sizes)
        if (kept := self._work.read(f"sums-{fold}")) is not None:
            tensors, about = kept
            found.texts, found.sensitivity.texts = about["done"], about["texts"]
            for i, moments in enumerate(found.moments):
                moments.count = about["counts"][i]
                moments.total, moments.outer = tensors[f"total.{i}"], tensors[f"outer.{i}"]
            found.sensitivity.sums = {_key(n): x for n, x in tensors.items() if n.startswith("metric.")}
        return found

    def save(self, fold: int, sums: Sums) -> None:
        """Keep a fold's sums."""
        tensors = {f"total.{i}": m.total for i, m in enumerate(sums.moments)}
        tensors |= {f"outer.{i}": m.outer for i, m in enumerate(sums.moments)}
        tensors |= {f"metric.{layer}.{plane}": x for (layer, plane), x in sums.sensitivity.sums.items()}
        about = {"done": sums.texts, "counts": [m.count for m in sums.moments], "texts": sums.sensitivity.texts}
        self._work.keep(f"sums-{fold}", tensors, about)

    def held(self, fold: int) -> list[Tensor] | None:
        """What :meth:`save_held` kept of a fold."""
        kept = self._work.read(f"held-{fold}")
        return None if kept is None else [kept.tensors[str(i)] for i in range(len(kept.tensors))]

    def save_held(self, fold: int, found: Sequence[Tensor]) -> None:
        """One tensor a block."""
        self._work.keep(f"held-{fold}", {str(i): x for i, x in enumerate(found)}, {})

    def remove(self) -> None:
        """The run is done."""
        self._work.remove()


def _key(name: str) -> tuple[int, str]:
    _, layer, plane = name.split(".")
    return int(layer), plane
