"""The compression ratio of a pipeline from a small part of one prompt: cheap enough for every candidate.

Real stages and the real codec run on a sample, and what a segment's bytes come to is carried over to all segments of
that chain. Chains that work layer by layer see every fifth layer of 512 tokens; chains over a block of layers need all
of its layers and see 128 tokens instead. Segments that go raw by plan (sinks, protected layers) count in full.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.pipeline import Pipeline
from kvserve_core.plan import RAW_CHAIN_ID, Planned
from kvserve_core.profile import PipelineSpec
from kvserve_core.session.events import gather_region
from kvserve_core.spec import KVSpec, Region, Shard, whole

EVERY = 5
"""Layers of which one is sampled."""
SAMPLE_TOKENS = 512
FEW_TOKENS = 128
SEGMENT_BYTES = 112
"""What a sealed segment takes beside metadata and body: its entry in the table of segments and alignment, about."""
HEADER_BYTES = 4096


class RatioEstimator:
    """``read`` gives any region of a prompt of ``total`` tokens; ratios are for requests of that length."""

    def __init__(self, spec: KVSpec, read: Callable[[Region], Tensor], artefacts: Artefacts, total: int) -> None:
        self._spec, self._read, self._artefacts, self._total = spec, read, artefacts, total
        self._tokens = min(total, SAMPLE_TOKENS)

    def ratio(self, spec: PipelineSpec) -> float:
        """Original bytes over wire bytes, about.

        Raises:
            KVServeError: the pipeline cannot be built for this model.
        """
        artefacts = self._artefacts.fresh()
        full = Pipeline.build(spec, self._spec, whole(self._spec), artefacts=artefacts)
        header, planned = full.header("estimate", self._total, "estimate")
        rates = self._rates(spec, full, artefacts)
        payload = sum(self._spec.nbytes(p.at) * rates.get((p.at.plane, p.chain), 1.0) for p in planned)
        return header.raw_bytes / (HEADER_BYTES + SEGMENT_BYTES * len(planned) + payload)

    def _rates(self, spec: PipelineSpec, full: Pipeline, artefacts: Artefacts) -> dict[tuple[str, int], float]:
        """Bytes sent for an original byte, by plane and chain."""
        raw: dict[tuple[str, int], int] = defaultdict(int)
        sent: dict[tuple[str, int], int] = defaultdict(int)
        pipeline, sample = self._sample(spec, full, artefacts)
        chosen = [p for p in sample if p.chain != RAW_CHAIN_ID]
        data = [(p, gather_region(lambda _, at: self._read(at), "", p.at)) for p in chosen]
        for planned, segment in zip(chosen, pipeline.encode(data), strict=True):
            key = (planned.at.plane, planned.chain)
            raw[key] += self._spec.nbytes(planned.at)
            sent[key] += len(segment.meta) + len(segment.body)
        return {key: sent[key] / raw[key] for key in raw}

    def _sample(self, spec: PipelineSpec, full: Pipeline, artefacts: Artefacts) -> tuple[Pipeline, Sequence[Planned]]:
        layers = tuple(layer for group in self._spec.groups for layer in group.layers[::EVERY])
        try:
            some = Pipeline.build(spec, self._spec, Shard(tuple(sorted(layers))), artefacts=artefacts)
        except UnsupportedSpecError as error:
            if error.path.rpartition(".")[2] != "layer_block":
                raise
            return full, self._last(full, spec.segment_tokens)
        return some, list(some.regions(range(self._tokens), self._tokens))

    def _last(self, pipeline: Pipeline, cell: int) -> Sequence[Planned]:
        """The segments of a short last cell; of the only one, when the prompt has no other."""
        start = cell if cell + FEW_TOKENS <= self._tokens else 0
        total = min(start + FEW_TOKENS, self._tokens)
        return [p for p in pipeline.regions(range(total), total) if p.at.stop > start]
