"""Codes that pipelines give an entropy coder, and where they are kept between two runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvserve_core.artefacts import Artefacts
from kvserve_core.chains import ChainSet
from kvserve_core.errors import EscapeSegment
from kvserve_core.pipeline import Pipeline
from kvserve_core.plan import RAW_CHAIN_ID
from kvserve_core.profile import PipelineSpec
from kvserve_core.registry import default_registry
from kvserve_core.session.events import gather_region
from kvserve_core.spec import whole
from kvserve_core.tensor import Part
from kvserve_hf.calibrate.blocks import CPU
from kvserve_hf.calibrate.request import TEXT
from kvserve_hf.calibrate.work import Work
from kvserve_hf.engine import Engine


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
        for planned in self._pipeline.header(TEXT, total, TEXT)[1]:
            chain = self.spec.chain_for(planned.at.plane)
            if planned.chain == RAW_CHAIN_ID or chain.codec.name != self.codec:
                continue
            x = gather_region(lambda _, at: self.engine.gather(TEXT, at), "", planned.at)
            try:
                _, quantized = self._chains.bound(self._order.index(chain) + 1, planned.at).quantize(x, planned.at)
            except EscapeSegment:
                continue
            yield from quantized.parts


class Store:
    """Codes on disk, an entry a text, so that an interrupted run goes on and no number of texts fills the memory."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def has(self, i: int) -> bool:
        """Whether a text's codes are there.

        Raises:
            ArtefactError: they are another run's.
        """
        return self._work.about(_name(i)) is not None

    def save(self, i: int, parts: list[Part]) -> None:
        """Keep a text's codes, all or none."""
        kept = [p for p in parts if p.codes.numel()]
        tensors = {str(n): p.codes.contiguous() for n, p in enumerate(kept)}
        self._work.keep(_name(i), tensors, {"shapes": [(p.alphabet, p.rows) for p in kept]})

    def parts(self) -> Iterator[Part]:
        """All of them, one text after the other."""
        i = 0
        while (kept := self._work.read(_name(i))) is not None:
            for n, (alphabet, rows) in enumerate(kept.about["shapes"]):
                yield Part(kept.tensors[str(n)], alphabet, rows)
            i += 1

    def remove(self) -> None:
        """The run is done."""
        self._work.remove()


def _name(i: int) -> str:
    return f"codes-{i}"
