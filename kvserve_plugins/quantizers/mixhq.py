"""Mixed precision by attention head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from math import lcm
from typing import Annotated, Self

import torch
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ANY, Capabilities, ComponentConfig, ComponentSpec, Tunable
from kvserve_core.errors import ArtefactError, FrameError, UnsupportedSpecError
from kvserve_core.registry import default_registry
from kvserve_core.spec import KVSpec, Region
from kvserve_core.stages import Quantizer
from kvserve_core.tensor import TORCH, Params, Part, Quantized
from kvserve_plugins.kernels.ranking import Scores, is_rectangular, low_heads, rectangles
from kvserve_plugins.kernels.shapes import shape_of

Score = Annotated[float, Field(allow_inf_nan=False)]
_SCORES: TypeAdapter[Scores] = TypeAdapter(tuple[tuple[Score, ...], ...])


@dataclass(frozen=True)
class Piece:
    """Layers times heads of one class: positions in the segment, the bound quantizer, and how many streams it gives."""

    prefix: str
    rows: slice
    columns: Tensor
    at: Region
    quantizer: Quantizer
    streams: int

    def where(self, at: Region) -> Region:
        """This piece's region at the tokens of ``at``."""
        return replace(self.at, start=at.start, stop=at.stop)


class MixHQ(Quantizer):
    """Gives the heads with the lowest scores a coarser quantizer than the others.

    The ``low_ratio`` lowest scores over ALL layers and heads are low, by global index
    (:func:`kvserve_plugins.kernels.ranking.low_heads`), so any slice of layers or heads gets the same classes. ``low``
    null is ``channel_mean``: a low head decodes to its channel means over the segment.

    Streams and parameters come class by class, high first; within a class once for the segment where its layers agree
    on their heads, else layer by layer. Parameter names are ``high.0.lo``, ``low.2.scale``, and so on. The inner
    quantizers must give as many streams for every segment. Scores: DuoAttention (arXiv 2410.10819) or any other;
    higher is more precise.
    """

    class Config(ComponentConfig):
        """scores: ``[L][H]`` inline, or scores_artefact: the blake3 of the same as JSON. high, low: quantizer specs."""

        scores: tuple[tuple[Score, ...], ...] | None = None
        scores_artefact: str | None = None
        low_ratio: float = Tunable(0.5, low=0.0, high=1.0, ge=0.0, le=1.0)
        high: ComponentSpec = ComponentSpec(name="uniform", configuration={"levels": 16})
        low: ComponentSpec | None = ComponentSpec(name="uniform", configuration={"levels": 6})

        @model_validator(mode="after")
        def _one_source_of_scores(self) -> Self:
            if (self.scores is None) == (self.scores_artefact is None):
                raise ValueError("give scores or scores_artefact, and not both")
            if self.scores is not None and not is_rectangular(self.scores):
                raise ValueError("scores needs one row a layer, all with the same number of heads")
            if "mixhq" in (self.high.name, self.low.name if self.low else ""):
                raise ValueError("high and low name a plain quantizer; 'mixhq' within 'mixhq' is not supported")
            return self

    config: Config
    _pieces: tuple[Piece, ...]
    _dtype: torch.dtype
    _device: torch.device

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        create = default_registry().create
        self._high: Quantizer = create("quantizer", config.high, "configuration.high")
        self._low: Quantizer = create(
            "quantizer", config.low or ComponentSpec(name="channel_mean"), "configuration.low"
        )
        self.caps = replace(_both(self._high.caps, self._low.caps), artefacts=bool(self.artefacts))

    @property
    def artefacts(self) -> frozenset[str]:
        """The scores and what the inner quantizers read."""
        own = frozenset(filter(None, [self.config.scores_artefact]))
        return own | self._high.artefacts | self._low.artefacts

    def bind(self, at: Region, spec: KVSpec, device: torch.device, artefacts: Artefacts) -> Self:
        """Rank the heads and bind the inner quantizers to what is theirs here.

        Raises:
            UnsupportedSpecError: the scores do not cover the model's layers and heads.
            ArtefactError: the scores are missing or not a table of numbers.
        """
        bound = super().bind(at, spec, device, artefacts)
        plane = spec.group(at.group).plane(at.plane)
        low = low_heads(self._scores(artefacts), self.config.low_ratio)
        if low.shape[1] != plane.num_heads or low.shape[0] <= max(at.layers):
            raise UnsupportedSpecError(
                f"scores cover {low.shape[0]} layers of {low.shape[1]} heads; plane {at.plane!r} has"
                f" {plane.num_heads} heads and a layer {max(at.layers)}; give a score for each layer and KV head"
            )
        bound._dtype = TORCH[plane.dtype] if self.caps.exact else torch.float32
        bound._device = device
        here = low[list(at.layers)][:, list(at.heads)]
        bound._pieces = tuple(
            _piece(f"{name}.{i}.", rows, columns, quantizer, (at, spec, device, artefacts))
            for name, quantizer, chosen in (("high", self._high, ~here), ("low", self._low, here))
            for i, (rows, columns) in enumerate(rectangles(chosen))
        )
        return bound

    def _scores(self, artefacts: Artefacts) -> Scores:
        if self.config.scores is not None:
            return self.config.scores
        digest = str(self.config.scores_artefact)
        try:
            scores = _SCORES.validate_python(artefacts.json(digest))
        except (ValidationError, ValueError) as error:
            raise ArtefactError(f"artefact {digest!r} is not a table of head scores: {error}") from None
        if not scores or not is_rectangular(scores):
            raise ArtefactError(f"artefact {digest!r} needs one row a layer, all with the same number of heads")
        return scores

    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` to the streams of each class. Raises what the inner quantizers raise."""
        parts: list[Part] = []
        params: dict[str, Tensor] = {}
        for piece in self._pieces:
            q = piece.quantizer.encode(x[piece.rows].index_select(1, piece.columns), piece.where(at))
            parts += q.parts
            params |= {piece.prefix + name: value for name, value in q.params.items()}
        return Quantized(tuple(parts), params, shape_of(x))

    def decode(self, q: Quantized, at: Region) -> Tensor:
        """``[L, H, T, D]`` in f32, or the plane's dtype if both quantizers are exact."""
        expected = sum(piece.streams for piece in self._pieces)
        if len(q.parts) != expected:
            raise FrameError(f"{len(q.parts)} streams, the head classes here have {expected}", at)
        x = torch.empty(q.shape, dtype=self._dtype, device=self._device)
        parts = iter(q.parts)
        for piece in self._pieces:
            shape = (len(piece.at.layers), len(piece.at.heads), *q.shape[2:])
            inner = Quantized(tuple(islice(parts, piece.streams)), _under(piece.prefix, q.params), shape)
            values = piece.quantizer.decode(inner, piece.where(at)).to(self._dtype)
            x[piece.rows].index_copy_(1, piece.columns, values)
        return x


def _piece(
    prefix: str,
    rows: tuple[int, ...],
    columns: tuple[int, ...],
    quantizer: Quantizer,
    place: tuple[Region, KVSpec, torch.device, Artefacts],
) -> Piece:
    at, spec, device, artefacts = place
    sub = replace(at, layers=tuple(at.layers[r] for r in rows), heads=tuple(at.heads[c] for c in columns))
    bound = quantizer.bind(sub, spec, device, artefacts)
    plane = spec.group(at.group).plane(at.plane)
    nothing = torch.empty((len(rows), len(columns), 0, plane.dim), dtype=TORCH[plane.dtype], device=device)
    streams = len(bound.encode(nothing, replace(sub, stop=sub.start)).parts)
    return Piece(prefix, slice(rows[0], rows[-1] + 1), torch.tensor(columns, device=device), sub, bound, streams)


def _under(prefix: str, params: Params) -> Mapping[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}


def _both(a: Capabilities, b: Capabilities) -> Capabilities:
    """What a quantizer can do that needs both."""
    planes = reduce(lambda p, q: q if p == ANY else p if q == ANY else p & q, (a.planes, b.planes))
    return Capabilities(
        exact=a.exact and b.exact,
        encode_on=a.encode_on & b.encode_on,
        decode_on=a.decode_on & b.decode_on,
        planes=planes,
        dtypes=a.dtypes & b.dtypes,
        head_local=a.head_local and b.head_local,
        layer_local=a.layer_local and b.layer_local,
        token_multiple=lcm(a.token_multiple, b.token_multiple),
        artefacts=a.artefacts or b.artefacts,
        max_alphabet=max(a.max_alphabet, b.max_alphabet),
    )
