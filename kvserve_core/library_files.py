"""A library on disk: ``library.json`` beside ``artefacts/<blake3>``, as a folder or as one ``.kvlib`` file.

A ``.kvlib`` is a zip of stored (uncompressed) entries in a fixed order with fixed times: equal libraries are equal
files, and no entry can be larger than the file that holds it.
"""

from __future__ import annotations

import os
import re
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kvserve_core.artefacts import Artefacts
from kvserve_core.errors import ArtefactError, ConfigError
from kvserve_core.json_text import parsed

SUFFIX = ".kvlib"
INDEX = "library.json"
FOLDER = "artefacts"
_HASH = re.compile(r"^[0-9a-f]{64}$")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_DAMAGE = (OSError, zipfile.BadZipFile, KeyError, EOFError, RuntimeError, ValueError, struct.error)
"""What reading a damaged zip raises, and a path that no file can have. RuntimeError: an entry is encrypted, or of a zip
version that Python does not know (NotImplementedError)."""
_WHAT = "expected a folder with library.json or a .kvlib file; make one with 'kvserve measure'"


def json_of(text: bytes | str) -> Any:
    """The JSON object in ``library.json``.

    Raises:
        ConfigError: it is not JSON, or not an object.
    """
    try:
        value = parsed(text)
    except ValueError as error:
        raise ConfigError(f"{INDEX} is not JSON: {error}; {_WHAT}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{INDEX} must hold an object, got {type(value).__name__}; {_WHAT}")
    return value


def read(path: Path) -> tuple[bytes, Artefacts]:
    """``library.json`` and the artefacts. Those of a folder stay on disk until they are used.

    Raises:
        ConfigError: there is no library at ``path``, or the file is damaged.
    """
    try:
        return _read_folder(path) if path.is_dir() else _read_file(path)
    except FileNotFoundError:
        raise ConfigError(f"there is no profile library at {str(path)!r}; {_WHAT}") from None
    except _DAMAGE as error:
        raise ConfigError(f"the profile library {str(path)!r} cannot be read: {error}; {_WHAT}") from error


def _read_folder(path: Path) -> tuple[bytes, Artefacts]:
    found = (path / FOLDER).iterdir() if (path / FOLDER).is_dir() else ()
    return (path / INDEX).read_bytes(), Artefacts({f.name: f for f in found if _HASH.match(f.name)})


def _read_file(path: Path) -> tuple[bytes, Artefacts]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(f"entry {entry.filename!r} is compressed, a library's entries are stored")
        if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
            raise zipfile.BadZipFile("its entries claim to be larger than the file")
        names = [n for n in archive.namelist() if n.startswith(f"{FOLDER}/") and _HASH.match(_name(n))]
        return archive.read(INDEX), Artefacts({_name(n): archive.read(n) for n in names})


def _name(entry: str) -> str:
    return entry.removeprefix(f"{FOLDER}/")


def write(path: Path, index: bytes, artefacts: Mapping[str, bytes]) -> None:
    """Write a library so that a reader at any moment finds the old one or the new one, whole.

    Raises:
        ArtefactError: the disk is full or not writable; nothing half-written is left.
    """
    try:
        _write(path, index, artefacts)
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        raise ArtefactError(f"the profile library {str(path)!r} cannot be written: {error}") from error


def _write(path: Path, index: bytes, artefacts: Mapping[str, bytes]) -> None:
    if path.suffix == SUFFIX:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(path) as file:
            _write_zip(file, {INDEX: index} | {f"{FOLDER}/{h}": artefacts[h] for h in sorted(artefacts)})
        return
    (path / FOLDER).mkdir(parents=True, exist_ok=True)
    for digest, data in artefacts.items():  # first: what a new index names is already there, and never changes
        if not (path / FOLDER / digest).exists():
            write_bytes(path / FOLDER / digest, data)
    write_bytes(path / INDEX, index)


def _write_zip(file: IO[bytes], entries: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            info = zipfile.ZipInfo(name, _EPOCH)
            info.create_system = 3  # Unix: the default depends on the machine
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that a reader at any moment finds the old one or the new one, whole."""
    with _replacing(path) as file:
        file.write(data)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file beside ``path`` that takes its place once it is complete and on disk; removed on failure."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
