"""The state of a bandit as a file: JSON with a version, replaced as a whole."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from kvserve_plugins.policies._arms import Memory

VERSION = 1
MAX_BYTES = 64 * 2**20
_log = logging.getLogger(__name__)


def write(path: Path, dumped: list[dict[str, Any]]) -> None:
    """Put the new file beside the old one, then in its place.

    Raises:
        OSError: it cannot be written.
    """
    path = _regular(path)
    data = json.dumps({"version": VERSION, "places": dumped}).encode()
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


def load(path: Path, memory: Memory, now: float) -> bool:
    """Fill ``memory``; a file that is not there, of another version or damaged is a cold start, and is said."""
    try:
        path = _regular(path)
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError(f"it is not of version {VERSION}")
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
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(f"{str(path)!r} is no regular file; name another one in 'state'")
    return path
