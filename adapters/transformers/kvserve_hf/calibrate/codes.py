"""Codes that pipelines give an entropy coder, and where they are kept between two runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import save_file

from kvserve_core.artefacts import Artefacts
from kvserve_core.chains import ChainSet
from kvserve_core.errors import ArtefactError, EscapeSegment
from kvserve_core.pipeline import Pipeline
from kvserve_core.plan import RAW_CHAIN_ID
from kvserve_core.profile import PipelineSpec
from kvserve_core.registry import default_registry
from kvserve_core.session.events import gather_region
from kvserve_core.spec import whole
from kvserve_core.tensor import Part
from kvserve_hf.calibrate.blocks import CPU
from kvserve_hf.engine import Engine

HELD = "calibration"
"""The transfer id of the text at hand."""


@dataclass
class Source:
    """One pipeline on what the engine holds, up to the codes."""

    engine: Engine
    spec: PipelineSpec
    artefacts: Artefacts
    codec: str

    def __post_init__(self) -> None:
        kv = self.engine.spec
        self._pipeline = Pipeline.build(self.spec, kv, whole(kv), artefacts=self.artefacts)
        self._order = list(dict.fromkeys(self.spec.planes.values()))
        paths = [(f"planes.{i}", chain) for i, chain in enumerate(self._order)]
        self._chains = ChainSet(paths, kv, CPU, default_registry(), self.artefacts)

    def parts(self, total: int) -> Iterator[Part]:
        """The codes of all segments that would not go raw."""
        for planned in self._pipeline.header("calibration", total, "calibration")[1]:
            chain = self.spec.chain_for(planned.at.plane)
            if planned.chain == RAW_CHAIN_ID or chain.codec.name != self.codec:
                continue
            x = gather_region(lambda _, at: self.engine.gather(HELD, at), "", planned.at)
            try:
                _, quantized = self._chains.bound(self._order.index(chain) + 1, planned.at).quantize(x, planned.at)
            except EscapeSegment:
                continue
            yield from quantized.parts


class Store:
    """Codes on disk, a file a text, so that an interrupted run goes on and no number of texts fills the memory."""

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        self._folder, self._asked = folder, blake3(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def has(self, i: int) -> bool:
        """Whether a text's codes are there.

        Raises:
            ArtefactError: they are another run's.
        """
        path = self._path(i)
        if not path.exists():
            return False
        with safe_open(path, "pt") as file:
            if file.metadata()["asked"] != self._asked:
                raise ArtefactError(
                    f"{str(self._folder)!r} holds a calibration of another model, other texts or pipelines; remove it,"
                    " or name another folder with --work"
                )
        return True

    def save(self, i: int, parts: list[Part]) -> None:
        """Keep a text's codes, all or none."""
        self._folder.mkdir(parents=True, exist_ok=True)
        beside, kept = self._path(i).with_suffix(".new"), [p for p in parts if p.codes.numel()]
        shapes = json.dumps([(p.alphabet, p.rows) for p in kept])
        tensors = {str(n): p.codes.contiguous() for n, p in enumerate(kept)}
        save_file(tensors, beside, {"asked": self._asked, "shapes": shapes})
        beside.replace(self._path(i))

    def parts(self) -> Iterator[Part]:
        """All of them, one text after the other."""
        i = 0
        while self._path(i).exists():
            with safe_open(self._path(i), "pt") as file:
                for n, (alphabet, rows) in enumerate(json.loads(file.metadata()["shapes"])):
                    yield Part(file.get_tensor(str(n)), alphabet, rows)
            i += 1

    def remove(self) -> None:
        """Delete the files, and the folder if nothing else is in it."""
        for path in self._folder.glob("codes-*.safetensors"):
            path.unlink()
        if self._folder.exists() and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _path(self, i: int) -> Path:
        return self._folder / f"codes-{i}.safetensors"
