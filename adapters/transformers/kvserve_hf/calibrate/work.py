"""Where a run keeps what it has done, so that the same command goes on after an interruption; and whole files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvserve_core.errors import ArtefactError

PREFIX, SUFFIX = "kept-", ".safetensors"


class Kept(NamedTuple):
    """Tensors, and what JSON can say beside them."""

    tensors: Mapping[str, Tensor]
    about: Any = None


class Work:
    """Named entries in a folder, each there whole or not at all.

    asked: what identifies the run, for JSON; a folder of another one is refused.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any]) -> None:
        self._folder, self._asked = folder, json.dumps(asked, sort_keys=True)

    def about(self, name: str) -> Any:
        """What an entry says beside its tensors; None without one.

        Raises:
            ArtefactError: it is another run's.
        """
        path = self._path(name)
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            found = file.metadata()
        if found["asked"] != self._asked:
            raise ArtefactError(
                f"{str(self._folder)!r} holds a calibration of another model, other texts or options; remove it, or"
                " name another folder with --work"
            )
        return json.loads(found["about"])

    def read(self, name: str) -> Kept | None:
        """An entry, or None. Raises what :meth:`about` raises."""
        about = self.about(name)
        return None if about is None else Kept(load_file(self._path(name)), about)

    def keep(self, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Write an entry; a reader sees the old or the new one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        beside = self._path(name).with_suffix(".new")
        save_file(dict(tensors), beside, {"asked": self._asked, "about": json.dumps(about)})
        beside.replace(self._path(name))

    def remove(self) -> None:
        """Delete the entries, and the folder if nothing else is in it."""
        for path in self._folder.glob(f"{PREFIX}*{SUFFIX}"):
            path.unlink()
        if self._folder.exists() and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _path(self, name: str) -> Path:
        return self._folder / f"{PREFIX}{name}{SUFFIX}"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all, and the folder that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(data)
    beside.replace(path)


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse to write what no engine could use.

    Raises:
        ArtefactError: a tensor holds NaN or Inf; the message names it.
    """
    for name, x in tensors.items():
        if not torch.isfinite(x).all():
            raise ArtefactError(
                f"{name!r} came out as NaN or Inf, so nothing is written: the model's weights may hold such values, or"
                " 'sink_tokens' leaves no token to learn from"
            )
