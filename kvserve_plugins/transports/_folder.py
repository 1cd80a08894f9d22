"""A bounded folder of files by key: written whole or not at all, least recently used first out."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from blake3 import blake3

from kvserve_core.errors import StoreFull, TransportError
from kvserve_core.units import format_bytes
from kvserve_plugins.transports._host import host_id
from kvserve_plugins.transports._serving import checked_key

SUFFIX = ".kvframe"
TEMP = ".tmp-"
STALE_S = 3600.0
"""A temporary file of another host that was not written to for this long has no writer any more."""
_OURS = re.compile(re.escape(TEMP) + "([0-9a-f]{16})-([0-9]+)-[0-9a-f]+")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Folder:
    """File names are the blake3 of the key, so that no key can name a path. mtime is the time of last use.

    Raises:
        TransportError: the folder cannot be made or read.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        try:
            self.path = Path(os.path.abspath(path))
            self.path.mkdir(parents=True, exist_ok=True)
            self._sweep()
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise TransportError(f"cannot use {str(path)!r} as a store: {error}; check 'path'") from error

    def file(self, key: str) -> Path:
        """Where ``key`` lies, present or not; raises TransportError when it is no key."""
        return self.path / (blake3(checked_key(key).encode()).hexdigest() + SUFFIX)

    def touch(self, key: str) -> bool:
        """Note a use, where the folder can be written to; False when the key is not here."""
        path = self.file(key)
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        except OSError:
            return path.exists()
        return True

    def remove(self, key: str) -> None:
        """Remove the object, if it is here. Maps of it stay readable.

        Raises:
            TransportError: the disk does not let it go.
        """
        try:
            self.file(key).unlink(missing_ok=True)
        except OSError as error:
            raise TransportError(f"cannot remove {key!r} from {str(self.path)!r}: {error}; check the folder") from error

    def put(self, key: str, size: int, write: Callable[[BinaryIO], object]) -> None:
        """Make room for ``size`` bytes, write, sync, and make the file visible at once.

        Raises:
            StoreFull: the disk has no room. TransportError: any other failure of the disk. Nothing is left behind.
        """
        temp = self.path / f"{TEMP}{host_id('pid')}-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with self._lock:
                self.path.mkdir(parents=True, exist_ok=True)  # who empties a store may remove its folder
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
            with contextlib.suppress(PermissionError):  # another's; the next one may go
                (self.path / name).unlink(missing_ok=True)
                total -= nbytes

    def _scan(self) -> Iterator[tuple[str, int, int]]:
        """Name, last use in ns and bytes of every object."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    with contextlib.suppress(FileNotFoundError):  # evicted by another process meanwhile
                        stat = entry.stat()
                        if not S_ISREG(stat.st_mode):
                            continue
                        yield entry.name, stat.st_mtime_ns, stat.st_size

    def _sweep(self) -> None:
        """Remove what killed writers left."""
        for temp in self.path.glob(f"{TEMP}*"):
            with contextlib.suppress(FileNotFoundError, PermissionError):  # gone, or another's
                if _abandoned(temp):
                    temp.unlink()


def _abandoned(temp: Path) -> bool:
    ours = _OURS.fullmatch(temp.name)
    if ours is None or not temp.is_file():
        return False
    host, pid = ours.groups()
    if host == host_id("pid"):
        return not _alive(int(pid))
    return time.time() - temp.stat().st_mtime > STALE_S


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:  # no process has such an id
        return False
    except PermissionError:
        return True
    return True
