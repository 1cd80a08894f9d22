"""The KVSpec of what SGLang holds: the model's own spec, and what a transfer carries beside it.

``model_spec`` is engine-neutral where the cache is plain: its fingerprint is that of every other engine, so libraries
and stores agree. ``transfer_spec`` adds what only two SGLang servers exchange: recurrent state and the auxiliary row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.model import kv_spec
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec
from kvserve_core.tensor import TORCH

STATE_GROUPS, AUX_GROUP = 1000, 9999
"""Ids of the added groups; state groups are sent after the cache, in the order of their ids, so the row comes last."""


@dataclass(frozen=True)
class State:
    """One state component of SGLang: ``item_bytes`` a layer and request, split over ``ranks`` tensor-parallel ranks."""

    name: str
    layers: tuple[int, ...]
    item_bytes: int
    ranks: int


def model_spec(config: Mapping[str, Any], store_dtype: Any, model_id: str, attention: Sequence[int] | None) -> KVSpec:
    """The token cache of a model as a pool of ``store_dtype`` (a torch dtype) holds it.

    attention: the layers that have one, None for all. A pool of bytes (fp8, packed formats) gives opaque planes, which
    only exact chains touch: their bytes are no numbers to the core.

    Raises:
        UnsupportedSpecError: layers that the core does not know.
    """
    dtype = next((name for name, held in TORCH.items() if held is store_dtype), None)
    if dtype is None:
        raise UnsupportedSpecError(f"a KV cache of {store_dtype} has no name in kvserve; serve with another dtype")
    layers = range(int(config["num_hidden_layers"]))
    without = () if attention is None else tuple(sorted(set(layers) - set(attention)))
    kv = kv_spec(config, dtype, model_id, without=without)
    return kv if dtype.is_float else _opaque(kv)


def transfer_spec(
    kv: KVSpec, aux_bytes: int, num_layers: int, states: Sequence[State] = (), window: int | None = None
) -> KVSpec:
    """``kv`` with SGLang's additions.

    num_layers: of the model; the auxiliary row is a layer of its own after the last one. window: tokens that SGLang
    sends of sliding-window layers that have a pool of their own. Where they share one with the others (None), a later
    request may continue any prefix of it, so all their tokens are sent.
    """
    groups = [replace(g, window=window if g.window else None) for g in kv.groups]
    for i, state in enumerate(states):
        plane = PlaneSpec("opaque", state.ranks, (PlanePart(state.name, state.item_bytes),), DType.U8)
        groups.append(LayerGroup(STATE_GROUPS + i, state.layers, (plane,), unit="state"))
    row = PlaneSpec("opaque", 1, (PlanePart("aux", aux_bytes),), DType.U8)
    groups.append(LayerGroup(AUX_GROUP, (num_layers,), (row,), unit="state"))
    return KVSpec(kv.model_id, tuple(groups))


def _opaque(kv: KVSpec) -> KVSpec:
    """The same cache with the planes of a group side by side as bytes: a chain for numbers must not match them."""
    return KVSpec(kv.model_id, tuple(replace(g, planes=(_joined(g),)) for g in kv.groups))


def _joined(group: LayerGroup) -> PlaneSpec:
    parts = tuple(PlanePart(part.name, part.dim) for plane in group.planes for part in plane.parts)
    return PlaneSpec("opaque", group.planes[0].num_heads, parts, DType.U8)
