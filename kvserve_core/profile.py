"""Pipelines as text: chains per plane, and how the cache is cut into segments. Names are resolved by the registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvserve_core.component import ComponentSpec, config_error
from kvserve_core.spec import COMPOSITE, SEGMENT_TOKENS, Plane


class Chain(BaseModel):
    """T*, Q, C for one plane, in slots so that a wrong order cannot be written."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    transforms: tuple[ComponentSpec, ...] = ()
    quantizer: ComponentSpec
    codec: ComponentSpec = ComponentSpec(name="raw")


RAW_CHAIN = Chain(quantizer=ComponentSpec(name="identity"), codec=ComponentSpec(name="raw"))
LOSSLESS_CHAIN = Chain(quantizer=ComponentSpec(name="bitplane"), codec=ComponentSpec(name="zstd"))
OPAQUE_CHAIN = Chain(quantizer=ComponentSpec(name="identity"), codec=ComponentSpec(name="zstd"))
LOSSLESS_PLANES = frozenset({"rope", "opaque"})
"""Planes that ``"*"`` does not cover: they stay lossless unless named."""


class PipelineSpec(BaseModel):
    """How a cache is compressed: a chain per plane and the cut into segments.

    planes: ``k`` and ``v``, or ``kv`` (side by side), or ``*`` for all but ``rope`` and ``opaque``.
    layer_block: layers a segment. segment_tokens: the absolute token grid. head_groups: segments along heads;
    None is one per head for head-local chains, else one over all.
    sink_tokens, recent_tokens: raw, by absolute position and by final prompt length. raw_layers: negative from the end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    planes: Mapping[Plane, Chain]
    layer_block: int = Field(1, ge=1)
    segment_tokens: int = Field(SEGMENT_TOKENS, ge=16, le=65536)
    head_groups: int | None = Field(None, ge=1)
    sink_tokens: int = Field(4, ge=0)
    recent_tokens: int = Field(0, ge=0)
    raw_layers: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _one_chain_per_plane(self) -> PipelineSpec:
        for name, members in COMPOSITE.items():
            both = self.planes.keys() & set(members)
            if name in self.planes and both:
                raise ValueError(f"planes names {name!r} and {sorted(both)}; keep one of the two")
        if not self.planes:
            raise ValueError("planes is empty; give a chain for '*' or for each plane")
        return self

    @classmethod
    def parse(cls, value: PipelineSpec | Mapping[str, Any], path: str = "") -> PipelineSpec:
        """From a dict as in JSON; a spec is passed through.

        Raises:
            ConfigError: the first wrong field, named by its path, with the nearest name for an unknown one.
        """
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise config_error(error, cls, value).under(path) from None

    def __hash__(self) -> int:
        return hash((frozenset(self.planes.items()), self.layer_block, self.segment_tokens, self.head_groups))

    def chain_for(self, plane: Plane) -> Chain:
        """The chain of a plane: named, or ``*``, or lossless for ``rope`` and ``opaque``."""
        if plane in self.planes:
            return self.planes[plane]
        if plane == "opaque":
            return OPAQUE_CHAIN
        if plane in LOSSLESS_PLANES or "*" not in self.planes:
            return LOSSLESS_CHAIN
        return self.planes["*"]


EXACT_LAYER_BLOCK = 16
"""Layers a segment of the built-in pipelines: large enough to make per-segment costs small."""
RAW_PIPELINE = PipelineSpec(
    planes={"*": RAW_CHAIN, "rope": RAW_CHAIN, "opaque": RAW_CHAIN}, sink_tokens=0, layer_block=EXACT_LAYER_BLOCK
)
LOSSLESS_PIPELINE = PipelineSpec(planes={"*": LOSSLESS_CHAIN}, sink_tokens=0, layer_block=EXACT_LAYER_BLOCK)
GPU_CUT = {"segment_tokens": 2048, "layer_block": 32}
"""Of these two on a GPU: a segment costs the host as much time as a GPU takes for tens of MB."""
