"""Means and covariances of a block's values, in float64, and where they are kept between two runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvserve_core.errors import ArtefactError
from kvserve_hf.calibrate.fisher import Sensitivity


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
    """What a run has summed up, one file a fold of texts; saved after each text, so that it goes on where it stopped.

    asked: identifies the run; a folder of another one is refused.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any], sizes: Sequence[int]) -> None:
        self._folder, self._sizes, self._asked = folder, list(sizes), json.dumps(asked, sort_keys=True)

    def sums(self, fold: int) -> Sums:
        """Of one fold: zeros if nothing was saved.

        Raises:
            ArtefactError: the folder is another run's.
        """
        found, path = Sums(self._sizes), self._path("sums", fold)
        if path.exists():
            tensors, about = load_file(path), self._about(path)
            found.texts, found.sensitivity.texts = about["done"], about["texts"]
            for i, moments in enumerate(found.moments):
                moments.count = about["counts"][i]
                moments.total, moments.outer = tensors[f"total.{i}"], tensors[f"outer.{i}"]
            found.sensitivity.sums = {_key(n): x for n, x in tensors.items() if n.startswith("metric.")}
        return found

    def save(self, fold: int, sums: Sums) -> None:
        """Write a fold's sums; a reader sees the old or the new ones."""
        tensors = {f"total.{i}": m.total for i, m in enumerate(sums.moments)}
        tensors |= {f"outer.{i}": m.outer for i, m in enumerate(sums.moments)}
        tensors |= {f"metric.{layer}.{plane}": x for (layer, plane), x in sums.sensitivity.sums.items()}
        counts = {
            "done": sums.texts,
            "counts": [m.count for m in sums.moments],
            "texts": sums.sensitivity.texts,
        }
        self._write(self._path("sums", fold), tensors, counts)

    def held(self, fold: int) -> list[Tensor] | None:
        """What :meth:`save_held` kept of a fold."""
        path = self._path("held", fold)
        if not path.exists():
            return None
        self._about(path)
        tensors = load_file(path)
        return [tensors[str(i)] for i in range(len(tensors))]

    def save_held(self, fold: int, found: Sequence[Tensor]) -> None:
        """One tensor a block."""
        self._write(self._path("held", fold), {str(i): x for i, x in enumerate(found)}, {})

    def remove(self) -> None:
        """Delete the files, and the folder if nothing else is in it."""
        for path in [*self._folder.glob("sums-*.safetensors"), *self._folder.glob("held-*.safetensors")]:
            path.unlink()
        if self._folder.exists() and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _path(self, what: str, fold: int) -> Path:
        return self._folder / f"{what}-{fold}.safetensors"

    def _write(self, path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        save_file(dict(tensors), beside, {"asked": self._asked, "state": json.dumps(about)})
        beside.replace(path)

    def _about(self, path: Path) -> dict[str, Any]:
        with safe_open(path, "pt") as file:
            about = file.metadata()
        if about["asked"] != self._asked:
            raise ArtefactError(
                f"{str(self._folder)!r} holds a calibration of another model, other texts or options; remove it, or"
                " name another folder with --work"
            )
        return dict(json.loads(about["state"]))


def _key(name: str) -> tuple[int, str]:
    _, layer, plane = name.split(".")
    return int(layer), plane
