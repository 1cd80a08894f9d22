"""Means and covariances of a block's values, in float64, and where they are kept between two runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvserve_core.errors import ArtefactError
from kvserve_hf.calibrate.fisher import Sensitivity

STATE = "state.safetensors"


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

    @property
    def mean(self) -> Tensor:
        """``[n]``."""
        return self.total / max(self.count, 1)

    def covariance(self) -> Tensor:
        """``[n, n]``."""
        mean = self.mean
        return self.outer / max(self.count, 1) - torch.outer(mean, mean)


class State:
    """What a run has summed up; saved after each text, so that a run that was stopped goes on where it was.

    asked: identifies the run; a folder of another one is refused.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any], sizes: list[int]) -> None:
        self.done = 0
        self.moments = [Moments(size) for size in sizes]
        self.sensitivity = Sensitivity()
        self._path, self._asked = folder / STATE, json.dumps(asked, sort_keys=True)
        if self._path.exists():
            self._load()

    def save(self) -> None:
        """Write all sums; a reader sees the old or the new ones."""
        tensors = {f"total.{i}": m.total for i, m in enumerate(self.moments)}
        tensors |= {f"outer.{i}": m.outer for i, m in enumerate(self.moments)}
        tensors |= {f"metric.{layer}.{plane}": x for (layer, plane), x in self.sensitivity.sums.items()}
        counts = {"done": self.done, "counts": [m.count for m in self.moments], "texts": self.sensitivity.texts}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(".new")
        save_file(tensors, beside, {"asked": self._asked, "state": json.dumps(counts)})
        beside.replace(self._path)

    def remove(self) -> None:
        """Delete the file, and its folder if nothing else is in it."""
        self._path.unlink(missing_ok=True)
        if self._path.parent.exists() and not any(self._path.parent.iterdir()):
            self._path.parent.rmdir()

    def _load(self) -> None:
        with safe_open(self._path, "pt") as file:
            about = file.metadata()
            if about["asked"] != self._asked:
                raise ArtefactError(
                    f"{str(self._path.parent)!r} holds a calibration of another model, other texts or options; remove"
                    " it, or name another folder with --work"
                )
            counts = json.loads(about["state"])
            self.done, self.sensitivity.texts = counts["done"], counts["texts"]
            for i, moments in enumerate(self.moments):
                moments.count = counts["counts"][i]
                moments.total, moments.outer = file.get_tensor(f"total.{i}"), file.get_tensor(f"outer.{i}")
            for name in file.keys():  # noqa: SIM118  # a safetensors file is not a mapping
                if name.startswith("metric."):
                    _, layer, plane = name.split(".")
                    self.sensitivity.sums[int(layer), plane] = file.get_tensor(name)
