"""The state of a bandit as a file: JSON with a version and the library it is about, replaced as a whole."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any

from kvserve_plugins.policies._arms import Memory

VERSION = 2
MAX_FILE_BYTES = 64 * 2**20
"""A larger file is not read, and none is written: the places longest unused are left out."""
_log = logging.getLogger(__name__)


class Keeper:
    """Keeps a memory in a file: from the first outcome on, every ``every_s``, and in the end.

    lock: held while the memory changes. library: of which it is, see :attr:`~kvserve_core.policy.Policy.library`.
    """

    def __init__(
        self, path: Path, library: str, memory: Memory, lock: Lock, clock: Callable[[], float], every_s: float
    ) -> None:
        self._path, self._library, self._memory, self._lock = path, library, memory, lock
        self._clock, self._every_s = clock, every_s
        self._due_s = float("-inf")
        self._unsaved = self._said = False
        self._turn = Lock()

    def learned(self, now: float) -> None:
        """There is something new to keep."""
        with self._turn:
            self._unsaved, due = True, now >= self._due_s
            if due:
                self._due_s = now + self._every_s
        if due:
            self._save_or_say()

    def end(self) -> None:
        """Nothing more will come."""
        if self._unsaved:
            self._save_or_say()

    def _save_or_say(self) -> None:
        """What was learned is kept in memory all the same, and the next save may succeed."""
        self._unsaved = False  # what is learned while it is written may not be in it
        try:
            save(self._path, self._library, self._memory, self._lock, self._clock())
        except OSError as error:
            with self._turn:
                self._unsaved, new, self._said = True, not self._said, True
            if new:
                _log.warning(
                    "the bandit cannot save its state to %s, and goes on without: %s (said once)", self._path, error
                )


def save(path: Path, library: str, memory: Memory, lock: Lock, now: float) -> None:
    """Write what is known; a reader sees the old file or the new one.

    Raises:
        OSError: it cannot be written.
    """
    with lock:
        dumped = memory.dump(now)
    write(path, library, dumped)


def write(path: Path, library: str, dumped: list[dict[str, Any]]) -> None:
    """Put the new file beside the old one, then in its place.

    Raises:
        OSError: it cannot be written.
    """
    path = _regular(path)
    data = _encoded(library, dumped)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _encoded(library: str, dumped: list[dict[str, Any]]) -> bytes:
    """As JSON. Names are of others, and may be what no text is: half a surrogate pair."""
    head, tail = json.dumps({"version": VERSION, "library": library}).encode()[:-1] + b', "places": [', b"]}"
    room, texts = MAX_FILE_BYTES - len(head) - len(tail) + 1, []  # one comma less than there are places
    for place in sorted(dumped, key=itemgetter("age_s")):
        text = json.dumps(place, ensure_ascii=False).encode("utf-8", "surrogatepass")
        room -= len(text) + 1
        if room < 0:
            break
        texts.append(text)
    return head + b",".join(texts) + tail


def load(path: Path, library: str, memory: Memory, now: float) -> bool:
    """Fill ``memory``; a file that is not there, or damaged, or of another version or library, is a cold start.

    All but the first are said.
    """
    try:
        path = _regular(path)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError(f"it is not of version {VERSION}")
        if found["library"] != library:
            raise ValueError("it was learned with another profile library; give each a file of its own")
        memory.restore(found["places"], now)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        _log.warning("the bandit starts without %s: %s: %s", path, type(error).__name__, error)
        return False
    return True


def _regular(path: Path) -> Path:
    """The file itself, links followed.

    Raises:
        OSError: it is there and is something else, such as a device, which must be neither read nor replaced.
    """
    found = Path(os.path.realpath(path))
    if found.is_symlink() or (found.exists() and not found.is_file()):  # the former: links that lead in a circle
        raise OSError(f"{str(path)!r} is no regular file; name another one in 'state'")
    return found
