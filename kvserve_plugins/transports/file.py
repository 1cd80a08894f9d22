"""The ``file`` store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import Field

from kvserve_core import wire
from kvserve_core.component import ComponentConfig
from kvserve_core.container import ENTRY_BYTES, TRAILER_BYTES, FrameReader, write_frame
from kvserve_core.errors import FrameError, LeaseLost, StoreFull, TransportError
from kvserve_core.policy import Outcome
from kvserve_core.transport import Delivery, SegmentSource, Selection, Store
from kvserve_core.units import Bandwidth, Size, format_bytes
from kvserve_core.wire import Sealed
from kvserve_plugins.transports._folder import Folder
from kvserve_plugins.transports._hashing import HashesOnDevice
from kvserve_plugins.transports._leases import checked_lease
from kvserve_plugins.transports._pacing import Pacer
from kvserve_plugins.transports._serving import LocalDelivery, select, timed_out

SCHEME = "file://"


class File(HashesOnDevice, Store):
    """A folder as a store: atomic publish, bounded size, LRU eviction.

    Address: ``file:///absolute/folder``. ``publish`` blocks until the source gave every segment (each within
    ``lease_s``) and the frame is on disk; nothing of the producer is needed after that. Several processes may share
    the folder. Keys name contents, so the last of two writers wins; a reader keeps the frame it opened. An object
    whose header, table or trailer is damaged is removed when it is fetched, and raises FrameError that once; damage
    to a segment shows when it is unsealed, and ``withdraw`` then removes the object. A frame of a newer version is
    FrameError too, and kept.
    """

    class Config(ComponentConfig):
        """``path``: the folder, made if absent. ``max_bytes``: its bound. ``max_bandwidth``: the fastest it reads."""

        path: Path
        max_bytes: Size = Field(64 * 2**30, gt=0)
        max_bandwidth: Bandwidth | None = Field(None, gt=0)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._folder = Folder(config.path, config.max_bytes)
        self._pacer = Pacer(config.max_bandwidth)

    def publish(self, key: str, source: SegmentSource, lease_s: float) -> str:
        """Write the whole frame and make it visible at once.

        Raises:
            StoreFull: larger than ``max_bytes``, or the disk is full; nothing is left behind.
            TransferTimeout: a segment was not ready within ``lease_s``.
        """
        lease_s = checked_lease(lease_s)
        count = source.header.num_segments
        segments = [source.get(i, time.monotonic() + lease_s) for i in range(count)]
        size = len(wire.pack_header(source.header)) + count * ENTRY_BYTES + TRAILER_BYTES
        size += sum(sealed.nbytes for sealed in segments)
        if size > self.config.max_bytes:
            raise StoreFull(
                f"{key!r} needs {format_bytes(size)}, the store {self.address!r} holds"
                f" {format_bytes(self.config.max_bytes)} in all; raise 'transport.file.max_bytes'"
            )
        self._folder.put(key, size, lambda out: write_frame(out, source.header, segments))
        return self.address

    @property
    def address(self) -> str:
        """``file://`` and the absolute path of the folder."""
        return SCHEME + str(self._folder.path)

    def fetch(self, address: str, key: str, want: Selection, deadline: float) -> Delivery:
        """The covering segments, as views of the mapped file.

        Raises:
            LeaseLost: no such object. FrameError: it is damaged, and removed now. Unacceptable: see ``select``.
        """
        self._check(address)
        reader, started = self._open(key), time.monotonic()
        try:
            indices = select(reader.header, reader.regions, want)
        except BaseException:
            reader.close()
            raise
        self._folder.touch(key)
        self._pacer.rest()

        def get(index: int) -> Sealed:
            sealed = reader.sealed(index)
            self._pace(sealed.nbytes, deadline, key, started)
            return sealed

        return LocalDelivery(reader.header, indices, get, waits=False, on_close=reader.close)

    def _open(self, key: str) -> FrameReader:
        path = self._folder.file(key)
        try:
            if not path.is_file() and path.exists():
                raise TransportError(f"{str(path)!r} is no file; remove it")  # a pipe would wait for a writer
            return FrameReader(path)
        except FileNotFoundError:
            self._missing(key)
        except FrameError as error:
            self._discard(key, error)
            raise
        except OSError as error:
            raise TransportError(f"cannot read {key!r} from {self.address!r}: {error}; check the folder") from error

    def _discard(self, key: str, damage: FrameError) -> None:
        """Remove what is damaged, so that it is met once; what only a newer kvserve reads is not damaged."""
        if _is_newer(self._folder.file(key)):
            return
        try:
            self._folder.remove(key)
        except TransportError as error:
            raise TransportError(f"{key!r} is damaged ({damage}), and stays so: {error}") from damage

    def _missing(self, key: str) -> NoReturn:
        raise LeaseLost(f"the store {self.address!r} does not hold {key!r}: never stored, or evicted") from None

    def _pace(self, nbytes: int, deadline: float, key: str, started: float) -> None:
        due = self._pacer.due(nbytes)
        time.sleep(max(0.0, min(due, deadline) - time.monotonic()))
        if time.monotonic() > deadline:
            raise timed_out(f"the store {self.address}", key, time.monotonic() - started)

    def _check(self, address: str) -> None:
        if address != self.address:
            raise TransportError(
                f"the locator names {address!r}, this store is {self.address!r};"
                " set 'transport.file.path' to the same folder on both sides"
            )

    def renew(self, address: str, key: str, lease_s: float) -> None:
        """Count as a use; a store has no leases."""
        self._check(address)
        if not self._folder.touch(key):
            self._missing(key)

    def release(self, address: str, key: str, share: tuple[int, int], report: Outcome | None) -> None:
        """Nothing: stored objects outlive their readers, and leave by eviction."""

    def withdraw(self, key: str, reason: str) -> None:
        """Remove the object; raises :class:`TransportError` when the disk does not let it go."""
        self._folder.remove(key)

    def contains(self, keys: Sequence[str]) -> int:
        """How many leading keys are present with a sound header. Changes nothing, so that a scheduler may ask."""
        return next((n for n, key in enumerate(keys) if not self._has(key)), len(keys))

    def _has(self, key: str) -> bool:
        try:
            path = self._folder.file(key)
            if not path.is_file():  # a pipe would wait for a writer
                return False
            with path.open("rb") as file:
                wire.unpack_header(file.read(wire.PRELUDE_BYTES + wire.MAX_HEADER + wire.ALIGN))
        except (FrameError, OSError):
            return False
        return True


def _is_newer(path: Path) -> bool:
    """Whether a file starts like a frame that asks for a newer reader."""
    try:
        with path.open("rb") as file:
            start = file.read(wire.PRELUDE_BYTES)
    except OSError:
        return False
    magic, min_reader = start[: len(wire.MAGIC)], start[len(wire.MAGIC) + 2 :][:1]
    return magic == wire.MAGIC and min_reader > bytes(wire.READS[1:])
