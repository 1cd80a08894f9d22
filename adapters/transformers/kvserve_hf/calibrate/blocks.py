"""The blocks of a model that get a basis each: as the planner cuts them, so that segments are blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve_core.artefacts import NONE
from kvserve_core.component import ComponentSpec
from kvserve_core.errors import ConfigError, UnsupportedSpecError
from kvserve_core.registry import default_registry
from kvserve_core.spec import KVSpec, LayerGroup, PlaneSpec, Region
from kvserve_core.stages import Transform

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Block:
    """Layers and heads of one plane of a layer group."""

    group: LayerGroup
    plane: PlaneSpec
    layers: tuple[int, ...]
    heads: tuple[int, ...]

    @property
    def size(self) -> int:
        """Values a token."""
        return len(self.layers) * len(self.heads) * self.plane.dim

    @property
    def rope(self) -> tuple[bool, ...]:
        """Which parts of the plane are turned back."""
        return tuple(part.rope is not None for part in self.plane.parts)

    def region(self, start: int, stop: int) -> Region:
        """These layers and heads at some tokens."""
        return Region(self.group.id, self.plane.name, self.layers, self.heads, start, stop)

    def rows(self, read: Callable[[Region], Tensor], spec: KVSpec, start: int, stop: int) -> Tensor:
        """Values without positions, ``[T, size]`` in the order layer, head, channel."""
        at = self.region(start, stop)
        plain = unturned(spec, at)(read(at))
        return plain.permute(2, 0, 1, 3).flatten(1)


def blocks(spec: KVSpec, plane: str, layer_block: int, per: str) -> list[Block]:
    """All blocks of a model; ``per`` is ``head`` or ``all``.

    Raises:
        ConfigError: an unknown ``per``, or a layer block below 1. UnsupportedSpecError: a group without that plane.
    """
    if per not in ("head", "all"):
        raise ConfigError(f"unknown {per!r}; use 'head' or 'all'", "per")
    if layer_block < 1:
        raise ConfigError(f"a block of {layer_block} layers; use at least 1", "layer_block")
    return [block for group in spec.groups for block in _of_group(group, plane, layer_block, per)]


def unturned(spec: KVSpec, at: Region) -> Callable[[Tensor], Tensor]:
    """A function that undoes the positions of values at a place, in float32."""
    stage = derope(spec, at)
    return (lambda x: stage.encode(x, at)[0]) if stage is not None else (lambda x: x.float())


def derope(spec: KVSpec, at: Region) -> Transform | None:
    """The ``derope`` stage bound to a place; None where nothing is turned."""
    if all(part.rope is None for part in spec.group(at.group).plane(at.plane).parts):
        return None
    stage = default_registry().create("transform", ComponentSpec(name="derope"), "derope")
    if not isinstance(stage, Transform):
        raise UnsupportedSpecError("the installed 'derope' is not a transform; disable the plugin that provides it")
    return stage.bind(at, spec, CPU, NONE)


def _of_group(group: LayerGroup, name: str, size: int, per: str) -> Iterator[Block]:
    plane = group.plane(name)
    every = tuple(range(plane.num_heads))
    for i in range(0, len(group.layers), size):
        for heads in [(h,) for h in every] if per == "head" else [every]:
            yield Block(group, plane, group.layers[i : i + size], heads)
