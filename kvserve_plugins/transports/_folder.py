"""A bounded folder of files by key: written whole or not at all, least recently used first out."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from kvserve_core.errors import StoreFull, TransportError
from kvserve_core.units import format_bytes
from kvserve_plugins.transports._host import host_id

SUFFIX = ".kvframe"
TEMP = ".tmp-"
STALE_S = 3600.0
"""A temporary file of another host that was not written to for this long has no writer any more."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Folder:
    """File names are the blake3 of the key, so that no key can name a path. mtime is the time of last use.

    Raises:
        TransportError: the folder cannot be made or read.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path, self._max_bytes = Path(os.path.abspath(path)), max_bytes
        self._lock = threading.Lock()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._sweep()
        except OSError as error:
            raise TransportError(f"cannot use {str(self.path)!r} as a store: {error}; check 'path'") from error

    def file(self, key: str) -> Path:
        """Where ``key`` lies, present or not."""
        return self.path / (blake3(key.encode()).hexdigest() + SUFFIX)

    def touch(self, key: str) -> bool:
        """Note a use; False when the key is not here."""
        try:
            os.utime(self.file(key))
        except OSError:
            return False
        return True

    def remove(self, key: str) -> None:
        """Remove the object, if it is here. Maps of it stay readable."""
        self.file(key).unlink(missing_ok=True)

    def put(self, key: str, size: int, write: Callable[[BinaryIO], object]) -> None:
        """Make room for ``size`` bytes, write, sync, and make the file visible at once.

        Raises:
            StoreFull: the disk has no room. TransportError: any other failure of the disk. Nothing is left behind.
        """
        temp = self.path / f"{TEMP}{host_id('pid')}-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with self._lock:
                self._make_room(size, self.file(key))
                self._write(temp, write)
                temp.replace(self.file(key))
            self._sync()
        except OSError as error:
            if error.errno in _FULL:
                raise StoreFull(
                    f"no room for {format_bytes(size)} in {str(self.path)!r}: {error.strerror};"
                    " free disk space or lower 'transport.file.max_bytes'"
                ) from error
            raise TransportError(f"cannot write to {str(self.path)!r}: {error}; check the folder") from error
        finally:
            with contextlib.suppress(OSError):
                temp.unlink(missing_ok=True)

    @staticmethod
    def _write(temp: Path, write: Callable[[BinaryIO], object]) -> None:
        with temp.open("xb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())

    def _sync(self) -> None:
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _make_room(self, size: int, replaced: Path) -> None:
        """Evict by last use. Counted anew each time, since other processes write here too."""
        there = sorted((use, nbytes, name) for name, use, nbytes in self._scan() if name != replaced.name)
        total = sum(nbytes for _, nbytes, _ in there) + size
        for _, nbytes, name in there:
            if total <= self._max_bytes:
                return
            (self.path / name).unlink(missing_ok=True)
            total -= nbytes

    def _scan(self) -> Iterator[tuple[str, int, int]]:
        """Name, last use in ns and bytes of every object."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    with contextlib.suppress(FileNotFoundError):  # evicted by another process meanwhile
                        stat = entry.stat()
                        yield entry.name, stat.st_mtime_ns, stat.st_size

    def _sweep(self) -> None:
        """Remove what killed writers left."""
        for temp in self.path.glob(f"{TEMP}*"):
            with contextlib.suppress(FileNotFoundError):
                if _abandoned(temp):
                    temp.unlink()


def _abandoned(temp: Path) -> bool:
    host, pid = temp.name.removeprefix(TEMP).split("-")[:2]
    if host == host_id("pid") and pid.isdigit():
        return not _alive(int(pid))
    return time.time() - temp.stat().st_mtime > STALE_S


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
