"""Where a run keeps what it has done, so that the same command goes on after an interruption; and whole files."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvserve_core.errors import ArtefactError

PREFIX, SUFFIX, UNFINISHED, LOCK = "kept-", ".safetensors", ".new", "lock"


class Kept(NamedTuple):
    """Tensors, and what JSON can say beside them."""

    tensors: Mapping[str, Tensor]
    about: Any = None


class Work:
    """Named entries in a folder, each there whole or not at all. A context manager: until it is left, no other run may
    use the folder.

    asked: what identifies the run, for JSON; a folder of another one is refused.

    Raises:
        ArtefactError: another run is using the folder.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any]) -> None:
        self._folder, self._asked = folder, json.dumps(asked, sort_keys=True)
        self._lock = _locked(folder)

    def about(self, name: str) -> Any:
        """What an entry says beside its tensors; None without one.

        Raises:
            ArtefactError: it is another run's, or damaged.
        """
        path = self._path(name)
        if not path.exists():
            return None
        with _reading(path), safe_open(path, "pt") as file:
            found = file.metadata()
            asked, about = found["asked"], json.loads(found["about"])
        if asked != self._asked:
            raise ArtefactError(
                f"{str(self._folder)!r} holds a calibration of another model, other texts or options; remove it, or"
                " name another folder with --work"
            )
        return about

    def read(self, name: str) -> Kept | None:
        """An entry, or None. Raises what :meth:`about` raises."""
        about = self.about(name)
        if about is None:
            return None
        with _reading(self._path(name)):
            return Kept(load_file(self._path(name)), about)

    def keep(self, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Write an entry; a reader sees the old or the new one."""
        beside = self._path(name).with_suffix(UNFINISHED)
        save_file(dict(tensors), beside, {"asked": self._asked, "about": json.dumps(about)})
        beside.replace(self._path(name))

    def remove(self) -> None:
        """Delete the entries; the folder goes when the run is over, if nothing else is in it."""
        for suffix in (SUFFIX, UNFINISHED):
            for path in self._folder.glob(f"{PREFIX}*{suffix}"):
                path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Let others use the folder; if it holds nothing, it goes."""
        (self._folder / LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # not empty, or gone already
            self._folder.rmdir()
        self._lock.close()

    def _path(self, name: str) -> Path:
        return self._folder / f"{PREFIX}{name}{SUFFIX}"


def _locked(folder: Path) -> IO[str]:
    """The folder's lock, held until it is closed or this process ends."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ArtefactError(
                f"another run is using the work folder {str(folder)!r}; wait for it, or name another folder with --work"
            ) from None
        if _is_at(file, folder / LOCK):
            return file
        file.close()  # the run before deleted it between opening and locking: lock the one that is there now


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Says of an entry that cannot be read what to do about it."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ArtefactError(
            f"the work file {str(path)!r} is damaged ({error}); remove it, and what it held is calibrated again"
        ) from error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all, and the folder that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + UNFINISHED)
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
