"""What every kind of calibration is given, and what it tells of itself in the file that it writes."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kvserve_core
from kvserve_core.errors import ConfigError
from kvserve_hf.engine import Engine
from kvserve_hf.texts import LoadedText

Progress = Callable[[str, int, int], None]
"""``(what, done, of)``."""
TEXT = "calibration"
"""The transfer id of the text at hand."""


@dataclass(frozen=True)
class KLTOptions:
    """Options of ``calibrate klt``; see :mod:`kvserve_hf.calibrate.klt`."""

    per: str = "head"
    layer_block: int = 15
    plane: str = "kv"
    metric: str = "fisher"
    from_weights: bool = False
    sink_tokens: int = 4
    cutoff: float = 0.03
    rank: int | None = None


@dataclass(frozen=True)
class TablesOptions:
    """Options of ``calibrate tables``: a file of pipelines, which of its families, and the files that they read."""

    pipelines: Path | None = None
    families: tuple[str, ...] = ()
    calibrated: Path | None = None


@dataclass(frozen=True)
class Request:
    """One run of ``kvserve calibrate``.

    texts: at least 960 tokens each. out: the file to write. work: a folder for what an interrupted run has done, on
    which the same command goes on.
    """

    engine: Engine
    texts: Sequence[LoadedText]
    out: Path
    work: Path
    progress: Progress
    klt: KLTOptions = KLTOptions()
    tables: TablesOptions = TablesOptions()

    def require_texts(self) -> None:
        """Refuse a run that has nothing to learn from.

        Raises:
            ConfigError: there are no texts.
        """
        if not self.texts:
            raise ConfigError("there are no texts to calibrate on; name a list of some", "texts")

    def provenance(self, command: str) -> dict[str, Any]:
        """Model, texts, versions and command, for the file's metadata."""
        return {
            "command": command,
            "model_id": self.engine.spec.model_id,
            "fingerprint": self.engine.spec.fingerprint,
            "kvserve": kvserve_core.__version__,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "texts": [
                {"name": t.pin.name, "package": t.pin.package, "version": t.pin.version, "blake3": t.pin.blake3}
                for t in self.texts
            ],
            "pinned": all(t.pinned for t in self.texts),
        }
