"""Calibrated files as patterns name them, and what such a file says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvserve_core.artefacts import Artefacts
from kvserve_core.errors import ConfigError
from kvserve_core.json_text import parsed

SUFFIXES = (".safetensors", ".json")
OURS = "kvserve."
"""Start of the metadata keys under which ``kvserve calibrate`` describes a file, as JSON."""


@dataclass(frozen=True)
class Calibrated:
    """A calibrated file that patterns may name.

    layer_block: layers a segment that it was made for, if any. about: what else patterns ask for, such as ``per``.
    """

    name: str
    digest: str
    layer_block: int | None = None
    about: Mapping[str, Any] = field(default_factory=dict)


def calibrated_files(folder: Path) -> tuple[list[Calibrated], Artefacts]:
    """The files of a folder by the stems of their names, and the same as artefacts.

    Raises:
        ConfigError: it is no folder, or a file in it cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError("is no folder; name the one that 'kvserve calibrate' wrote to", str(folder))
    found, artefacts = [], Artefacts()
    for path in sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES):
        try:
            data = path.read_bytes()
            about = _about(data) if path.suffix == ".safetensors" else {}
            layers = _layer_block(about)
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            message = f"cannot be read: {type(error).__name__}: {error}; write it again with 'kvserve calibrate'"
            raise ConfigError(message, str(path)) from error
        found.append(Calibrated(path.stem, artefacts.add(data), layers, about))
    return found, artefacts


def _about(data: bytes) -> dict[str, Any]:
    """What the header of a safetensors file says: 8 bytes of length, then JSON."""
    size = int.from_bytes(data[:8], "little")
    metadata = parsed(data[8 : 8 + size]).get("__metadata__", {})
    found: dict[str, Any] = {}
    for key, text in metadata.items():
        if key.startswith(OURS):
            found |= parsed(text)
    return found


def _layer_block(about: Mapping[str, Any]) -> int | None:
    """The most layers of one of its blocks; the last block of a model may be shorter."""
    sizes = [len(block["layers"]) for block in about.get("blocks", ())]
    return max(sizes, default=None)
