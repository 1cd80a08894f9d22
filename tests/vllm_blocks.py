"""Paged blocks of a small model with a sliding window, for halves of the connector that run without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Shard
from kvserve_vllm.layout import Cell, dense
from kvserve_vllm.placement import LayerCache, Placement

HEADS, DIM, TOKENS, BLOCKS, WINDOW = 2, 8, 16, 40, 24
PLANES = tuple(PlaneSpec(name, HEADS, (PlanePart(name, DIM),), DType.F32) for name in ("k", "v"))
KV = KVSpec("test", (LayerGroup(0, (0, 2), PLANES), LayerGroup(1, (1,), PLANES, WINDOW)))
"""Layers 0 and 2 in pool 0 of the engine, layer 1 in pool 1."""


def caches() -> list[Tensor]:
    """By layer, ``[block, head, token in block, K beside V]``."""
    return [torch.randn(BLOCKS, HEADS, TOKENS, 2 * DIM) for _ in range(3)]


def placed(found: Sequence[Tensor], held: tuple[int, ...] = (0, 1, 2)) -> Placement:
    """The layers that a rank holds, over their caches."""
    cell = Cell(HEADS, DIM, DIM)
    layers = {i: LayerCache(f"l.{i}", i % 2, TOKENS, dense(found[i], cell)) for i in held}
    return Placement(KV, Shard(held), layers)


def tables() -> tuple[list[int], list[int]]:
    """Blocks of a prompt, by pool."""
    return list(range(1, 20)), list(range(20, 39))


def until(condition: Callable[[], bool]) -> None:
    """Polls; fails the test when it does not come."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)
