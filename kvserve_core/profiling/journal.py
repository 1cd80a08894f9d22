"""What a search has learned so far, on disk: one JSON object a line, appended and synced, so that a kill loses at most
what was being measured."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from kvserve_core.errors import ConfigError
from kvserve_core.profiling.point import Estimate, Measurement

VERSION = 1


class Header(msgspec.Struct, frozen=True, tag="header"):
    """What the entries belong to. space: fingerprint of the pool. about: of the objective (model, texts, device)."""

    space: str
    seed: int
    about: dict[str, Any] = {}
    version: int = VERSION


class Estimated(msgspec.Struct, frozen=True, tag="estimate"):
    """One line for an estimate."""

    value: Estimate


class Measured(msgspec.Struct, frozen=True, tag="measurement"):
    """One line for a measurement."""

    value: Measurement


_line = msgspec.json.Decoder(Header | Estimated | Measured)


class Journal:
    """An open journal. ``estimates`` and ``measurements`` by the key of their point: what was there and what is added.

    Use it as a context manager, or call :meth:`close`.
    """

    def __init__(self, path: str | Path, space: str, seed: int, about: Mapping[str, Any] | None = None) -> None:
        """Open to go on, or begin one. A last line that was cut off is removed.

        Raises:
            ConfigError: it is of another space, seed or objective, is damaged, or cannot be written.
        """
        self.path = Path(path)
        self.estimates: dict[str, Estimate] = {}
        self.measurements: dict[str, Measurement] = {}
        header = Header(space, seed, msgspec.json.decode(msgspec.json.encode(dict(about or {}))))
        try:
            self._file: BinaryIO = self.path.open("a+b")
        except OSError as error:
            raise ConfigError(f"the journal cannot be used: {error}", str(self.path)) from error
        try:
            self._begin(header)
        except BaseException:
            self.close()
            raise

    def _begin(self, header: Header) -> None:
        _lock(self._file, self.path)
        self._file.seek(0)
        data = self._file.read()
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        if lines:
            self._read(lines, header)
        elif not _encoded(header).startswith(data):
            raise ConfigError("is not a journal; name a new file", str(self.path))
        self._file.truncate(data.rfind(b"\n") + 1)
        if not lines:
            self._write(header)

    def _read(self, lines: list[bytes], header: Header) -> None:
        first, *entries = (self._parsed(n, line) for n, line in enumerate(lines, 1))
        self._check(first, header)
        for entry in entries:
            self._take(entry)

    def _parsed(self, number: int, line: bytes) -> Header | Estimated | Measured:
        try:
            found: Header | Estimated | Measured = _line.decode(line)
        except msgspec.DecodeError as error:
            message = f"line {number} of the journal is damaged: {error}; restore the file, or name a new one"
            raise ConfigError(message, str(self.path)) from error
        return found

    def _check(self, found: Header | Estimated | Measured, wanted: Header) -> None:
        if not isinstance(found, Header) or found.version != VERSION:
            raise ConfigError(f"is not a journal of version {VERSION}; name a new file", str(self.path))
        for name in ("space", "seed", "about"):
            here, there = getattr(wanted, name), getattr(found, name)
            if here != there:
                here, there = _apart(here, there)
                message = f"the journal is of another search: its {name!r} is {there!r}, here it is {here!r}"
                raise ConfigError(f"{message}; name another file, or search as before", str(self.path))

    def _take(self, entry: Header | Estimated | Measured) -> None:
        if isinstance(entry, Estimated):
            self.estimates[entry.value.key] = entry.value
        elif isinstance(entry, Measured):
            self.measurements[entry.value.key] = entry.value

    def estimated(self, value: Estimate) -> None:
        """Keep an estimate. Estimates are cheap: they are on disk with the next measurement."""
        self._take(entry := Estimated(value))
        self._write(entry, sync=False)

    def measured(self, value: Measurement) -> None:
        """Keep a measurement; it is on disk when this returns."""
        self._take(entry := Measured(value))
        self._write(entry)

    def _write(self, entry: Header | Estimated | Measured, sync: bool = True) -> None:
        self._file.write(_encoded(entry))
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _apart(here: Any, there: Any) -> tuple[Any, Any]:
    """Of two mappings, what differs."""
    if not isinstance(here, dict) or not isinstance(there, dict):
        return here, there
    keys = {k for k in here.keys() | there.keys() if here.get(k) != there.get(k)}
    return {k: v for k, v in here.items() if k in keys}, {k: v for k, v in there.items() if k in keys}


def forget(path: Path) -> None:
    """Remove a journal, if there is one.

    Raises:
        ConfigError: another search is writing it, or it cannot be removed.
    """
    try:
        with path.open("rb") as file:
            _lock(file, path)
            path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"the old journal cannot be removed: {error}", str(path)) from error


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError("another search is writing this journal; wait for it", str(path)) from error


def _encoded(entry: Header | Estimated | Measured) -> bytes:
    return msgspec.json.encode(entry) + b"\n"
