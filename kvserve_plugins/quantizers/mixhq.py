"""Mixed precision by attention head, layer or token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from math import lcm
from typing import Annotated, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ANY, Capabilities, ComponentConfig, ComponentSpec, Tunable
from kvserve_core.errors import ArtefactError, UnsupportedSpecError
from kvserve_core.registry import default_registry
from kvserve_core.spec import KVSpec, Region
from kvserve_core.stages import Codec, Fusion, Quantizer, Transform
from kvserve_core.tensor import TORCH, Quantized
from kvserve_plugins.kernels.fused_launch import Stream
from kvserve_plugins.kernels.fused_rotation import fusion
from kvserve_plugins.kernels.ranking import Scores, is_rectangular, last_layers, low_heads, low_layers
from kvserve_plugins.quantizers._by_head import HIGH, LOW, HeadClasses, Place
from kvserve_plugins.quantizers._by_token import TokenClasses, TokenScore
from kvserve_plugins.quantizers.uniform import Uniform

Granularity = Literal["head", "layer", "token"]
Score = Annotated[float, Field(allow_inf_nan=False)]
_SCORES: TypeAdapter[Scores] = TypeAdapter(tuple[tuple[Score, ...], ...])


class MixHQ(Quantizer):
    """Gives heads, layers or tokens of low score a coarser quantizer than the others.

    head: the ``low_ratio`` lowest scores over ALL layers and heads are low, by global index
    (:func:`kvserve_plugins.kernels.ranking.low_heads`). layer: likewise by the mean score of a layer, or without scores
    the last layers of the model, as PyramidKV (arXiv 2406.02069) gives them less. Either way any slice of layers or
    heads gets the same classes. ``low`` null is ``channel_mean``: a low head decodes to its means over the segment.

    token: classes are formed anew in every segment. ``position``: the first ``precise_tokens`` of the prompt are high
    (attention sinks). ``low_norm``, for keys, and ``high_norm``, for values: in each layer and head the tokens of
    smallest or largest norm are high, all but ``low_ratio`` of them; keys of small norm draw attention (arXiv
    2406.11430). Which they are goes as one bit a token, parameter ``low_tokens``.

    Streams and parameters come class by class, high first. By head and layer: once for the segment where its layers
    agree on their heads, else layer by layer, with parameters named ``high.0.lo``, ``low.2.scale``, and so on. By
    token: ``high.lo``, ``low.scale``. The inner quantizers must give as many streams for every segment. Scores:
    DuoAttention (arXiv 2410.10819) or any other; higher is more precise.
    """

    class Config(ComponentConfig):
        """scores: ``[L][H]`` inline, or scores_artefact: the blake3 of a JSON file with them, as ``kvserve calibrate
        heads`` writes it. high, low: quantizer specs."""

        granularity: Granularity = "head"
        scores: tuple[tuple[Score, ...], ...] | None = None
        scores_artefact: str | None = None
        low_ratio: float = Tunable(0.5, low=0.0, high=1.0, ge=0.0, le=1.0)
        token_score: TokenScore = "low_norm"
        precise_tokens: int = Field(64, ge=0)
        high: ComponentSpec = ComponentSpec(name="uniform", configuration={"levels": 16})
        low: ComponentSpec | None = ComponentSpec(name="uniform", configuration={"levels": 6})

        @model_validator(mode="after")
        def _scores_fit(self) -> Self:
            given = (self.scores is not None) + (self.scores_artefact is not None)
            if given == 2 or (given == 0 and self.granularity == "head"):
                raise ValueError("give scores or scores_artefact, and not both")
            if given and self.granularity == "token":
                raise ValueError("scores are for heads and layers; tokens are scored by token_score")
            if self.scores is not None and not is_rectangular(self.scores):
                raise ValueError("scores needs one row a layer, all with the same number of heads")
            if "mixhq" in (self.high.name, self.low.name if self.low else ""):
                raise ValueError("high and low name a plain quantizer; 'mixhq' within 'mixhq' is not supported")
            return self

    config: Config
    caps = Uniform.caps
    """Of the usual inner quantizers: a consumer says from these where it can decode; an instance has its own."""
    _classes: HeadClasses | TokenClasses

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        create = default_registry().create
        self._high: Quantizer = create("quantizer", config.high, "configuration.high")
        self._low: Quantizer = create(
            "quantizer", config.low or ComponentSpec(name="channel_mean"), "configuration.low"
        )
        self.caps = replace(_both(self._high.caps, self._low.caps), artefacts=bool(self.artefacts))
        if config.granularity == "token" and self.caps.token_multiple > 1:
            raise UnsupportedSpecError(
                f"quantizers of tokens in groups of {self.caps.token_multiple} cannot serve classes of tokens, whose"
                " sizes vary; use one that works token by token",
                "configuration",
            )

    @property
    def artefacts(self) -> frozenset[str]:
        """The scores and what the inner quantizers read."""
        own = frozenset(filter(None, [self.config.scores_artefact]))
        return own | self._high.artefacts | self._low.artefacts

    def bind(self, at: Region, spec: KVSpec, device: torch.device, artefacts: Artefacts) -> Self:
        """Rank the heads or layers, and bind the inner quantizers to what is theirs here.

        Raises:
            UnsupportedSpecError: the scores do not cover the model's layers and heads.
            ArtefactError: the scores are missing or not a table of numbers.
        """
        bound = super().bind(at, spec, device, artefacts)
        plane = spec.group(at.group).plane(at.plane)
        dtype = TORCH[plane.dtype] if self.caps.exact else torch.float32
        bound._classes = self._split((at, spec, device, artefacts), dtype)
        return bound

    def fuse(self, transforms: Sequence[Transform], codec: Codec, spec: KVSpec, device: torch.device) -> Fusion | None:
        """One kernel behind ``hadamard`` for classes of heads or layers that are both ``uniform`` along one axis."""
        high, low = self._high, self._low
        if not (isinstance(high, Uniform) and isinstance(low, Uniform)) or self.config.granularity == "token":
            return None
        same = (high.config.axis, high.config.param_dtype) == (low.config.axis, low.config.param_dtype)
        finer = high if high.config.levels >= low.config.levels else low
        return fusion(transforms, codec, finer, False, spec, device) if same else None

    def streams(self, at: Region) -> tuple[Stream, ...]:
        """The streams of a place, class by class, of a bound quantizer that :meth:`fuse` has a kernel for."""
        high, low, classes = self._high, self._low, self._classes
        if not (isinstance(high, Uniform) and isinstance(low, Uniform) and isinstance(classes, HeadClasses)):
            return ()
        return classes.streams(at, {HIGH: high.config.levels, LOW: low.config.levels})

    def _split(self, place: Place, dtype: torch.dtype) -> HeadClasses | TokenClasses:
        cfg, both = self.config, (self._high, self._low)
        if cfg.granularity == "token":
            return TokenClasses(cfg.token_score, cfg.low_ratio, cfg.precise_tokens, both, dtype, place)
        return HeadClasses(self._low_here(place), both, dtype, place)

    def _low_here(self, place: Place) -> NDArray[np.bool_]:
        """``[L, H]`` of the segment: which of its heads are low."""
        at, spec, _, artefacts = place
        heads = spec.group(at.group).plane(at.plane).num_heads
        last = max(layer for group in spec.groups for layer in group.layers)
        if self.config.granularity == "layer" and self._scores(artefacts) is None:
            low = np.repeat(last_layers(last + 1, self.config.low_ratio)[:, None], heads, 1)
        else:
            low = self._by_scores(self._scores(artefacts) or (), heads, place)
        return low[list(at.layers)][:, list(at.heads)]

    def _by_scores(self, scores: Scores, heads: int, place: Place) -> NDArray[np.bool_]:
        at, (rows, columns) = place[0], (len(scores), len(scores[0]))
        by_layer = self.config.granularity == "layer"
        if columns not in ((1, heads) if by_layer else (heads,)) or rows <= max(at.layers):
            raise UnsupportedSpecError(
                f"scores cover {rows} layers of {columns} heads; plane {at.plane!r} has"
                f" {heads} heads and a layer {max(at.layers)}; give a score for each layer and KV head"
            )
        if by_layer:
            return np.repeat(low_layers(scores, self.config.low_ratio)[:, None], heads, 1)
        return low_heads(scores, self.config.low_ratio)

    def _scores(self, artefacts: Artefacts) -> Scores | None:
        if self.config.scores_artefact is None:
            return self.config.scores
        digest = self.config.scores_artefact
        try:
            found = artefacts.json(digest)
            scores = _SCORES.validate_python(found.get("scores") if isinstance(found, dict) else found)
        except (ValidationError, ValueError) as error:
            raise ArtefactError(f"artefact {digest!r} is not a table of head scores: {error}") from None
        if not scores or not is_rectangular(scores):
            raise ArtefactError(f"artefact {digest!r} needs one row a layer, all with the same number of heads")
        return scores

    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` to the streams of each class. Raises what the inner quantizers raise."""
        return self._classes.encode(x, at)

    def decode(self, q: Quantized, at: Region) -> Tensor:
        """``[L, H, T, D]`` in f32, or the plane's dtype if both quantizers are exact."""
        return self._classes.decode(q, at)


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
