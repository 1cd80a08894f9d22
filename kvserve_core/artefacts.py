"""Calibrated files (bases, tables, head scores), addressed by their blake3. Names and paths never cross the wire."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

from kvserve_core.errors import ArtefactError
from kvserve_core.json_text import parsed

T = TypeVar("T")


class Artefacts:
    """What this side has. Contents are verified against their hash when first read."""

    def __init__(self, blobs: Mapping[str, bytes | Path] | None = None) -> None:
        self._blobs = dict(blobs or {})
        self._checked: dict[str, bytes] = {}
        self._made: dict[Hashable, Any] = {}

    @property
    def hashes(self) -> frozenset[str]:
        """The hashes held here; they take part in negotiation."""
        return frozenset(self._blobs)

    def add(self, data: bytes) -> str:
        """Hold ``data`` and return its hash."""
        digest = blake3(data).hexdigest()
        self._blobs[digest] = data
        return digest

    def read(self, digest: str) -> bytes:
        """The verified bytes of an artefact.

        Raises:
            ArtefactError: it is not here, or its bytes do not match.
        """
        if digest in self._checked:
            return self._checked[digest]
        source = self._blobs.get(digest)
        if source is None:
            raise ArtefactError(f"artefact {digest!r} is not in the loaded library; load the library that holds it")
        try:
            data = source if isinstance(source, bytes) else source.read_bytes()
        except OSError as error:
            raise ArtefactError(f"artefact {digest!r} cannot be read: {error}") from error
        if blake3(data).hexdigest() != digest:
            raise ArtefactError(f"artefact {digest!r} does not match its hash; restore the library's file")
        self._checked[digest] = data
        return data

    def memo(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made of an artefact (parsed, moved to a device): once, and kept as long as the artefacts are."""
        found: T | None = self._made.get(key)
        if found is None:
            found = self._made.setdefault(key, make())
        return found

    def fresh(self) -> Artefacts:
        """The same files, none of what was made of them: for a search, which would keep every variant in memory."""
        other = Artefacts(self._blobs)
        other._checked = self._checked
        return other

    def json(self, digest: str) -> Any:
        """A JSON artefact."""
        return parsed(self.read(digest))


NONE = Artefacts()
