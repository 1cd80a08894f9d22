"""The served model as a :class:`KVSpec`, and how each layer's cache is stored on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.distributed.utils import get_pp_indices
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvserve_core.errors import ArtefactError, UnsupportedSpecError
from kvserve_core.model import kv_spec, model_id, text_config
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Shard
from kvserve_core.tensor import TORCH
from kvserve_vllm import compat, layout
from kvserve_vllm.layout import Cell, Views
from kvserve_vllm.placement import LayerCache

NAMES = {torch_dtype: name for name, torch_dtype in TORCH.items()}
CPU_ORDERED = ("vec", "vec16", "neon", "vxe", "vsx", "rvv")
"""Instruction sets whose kernels keep K as ``[D][N]`` and V as ``[N][D]`` inside a block of the CPU backend."""


@dataclass(frozen=True)
class Stored:
    """A layer as the engine stores it: its name, number, cache group, and what that group's spec says of it."""

    name: str
    layer: int
    pool: int
    spec: Any

    @property
    def is_state(self) -> bool:
        """Whether it holds recurrent state instead of tokens."""
        return isinstance(self.spec, MambaSpec)

    @property
    def is_packed(self) -> bool:
        """Whether its elements are not plain K and V: sent as bytes, without loss."""
        if self.is_state:
            return False
        dense = getattr(self.spec, "state_content_bytes", None) is None
        quantized = getattr(self.spec, "kv_quant_mode", KVQuantMode.NONE) != KVQuantMode.NONE
        return quantized or not dense or self.spec.dtype not in NAMES or not self.spec.dtype.is_floating_point


@dataclass(frozen=True)
class ServedModel:
    """What both roles of the connector know of the model.

    layers: on the scheduler those of the first pipeline stage. whole_blocks: tokens of a block that only makes sense
    whole (1 where every token can be sent by itself).
    """

    kv: KVSpec
    layers: tuple[Stored, ...]
    tp_size: int
    pp_size: int
    whole_blocks: int

    @property
    def has_state(self) -> bool:
        """Whether some layers hold recurrent state."""
        return any(group.unit == "state" for group in self.kv.groups)

    def sendable(self, num_prompt_tokens: int) -> int:
        """Tokens of a prompt that are worth sending: the last one is computed where decoding goes on."""
        return (num_prompt_tokens - 1) // self.whole_blocks * self.whole_blocks

    def shard(self, tp_rank: int, pp_rank: int) -> Shard:
        """What a rank holds."""
        count = max(layer for group in self.kv.groups for layer in group.layers) + 1
        first, last = get_pp_indices(count, pp_rank, self.pp_size)
        held = sorted(layer for group in self.kv.groups for layer in group.layers if first <= layer < last)
        return Shard(tuple(held), tp_rank, self.tp_size)

    def everyone(self) -> list[Shard]:
        """The shards of all ranks."""
        return [self.shard(tp, pp) for pp in range(self.pp_size) for tp in range(self.tp_size)]


def served_model(vllm_config: Any, kv_cache_config: Any) -> ServedModel:
    """Read off the engine's configuration; equal on the scheduler and on every rank.

    Raises:
        UnsupportedSpecError: a cache that cannot be sent; the message says why.
    """
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        raise UnsupportedSpecError("decode context parallelism splits a request's tokens over ranks; set it to 1")
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    layers = _stored(kv_cache_config, int(text_config(config)["num_hidden_layers"]))
    for stored in layers:
        _check(stored)
    states = {stored.layer: stored for stored in layers if stored.is_state}
    if states and parallel.pipeline_parallel_size > 1:
        raise UnsupportedSpecError("models with recurrent state are not served over several pipeline stages")
    kv = kv_spec(config, NAMES[model.dtype], model_id(model_folder(model)), without=states)
    packed = {stored.layer: stored for stored in layers if stored.is_packed}
    tp_size = parallel.tensor_parallel_size
    cpu = vllm_config.device_config.device_type == "cpu"
    kv = _with_packed(kv, packed, vllm_config.cache_config.cache_dtype, cpu)
    kv = _with_states(kv, states, tp_size)
    whole = max((stored.spec.block_size for stored in packed.values()), default=1) if cpu else 1
    return ServedModel(kv, layers, tp_size, parallel.pipeline_parallel_size, whole)


def model_folder(model_config: Any) -> Path:
    """The folder of the served weights; a name on the Hugging Face hub is looked up among what was downloaded.

    Raises:
        ArtefactError: it is neither.
    """
    path = Path(model_config.model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ArtefactError(f"the weights of {model_config.model!r} are in no local folder: {error}") from error


def layer_number(name: str) -> int:
    """``model.layers.7.self_attn.attn`` -> 7: the first number in a layer's name.

    Raises:
        UnsupportedSpecError: there is none.
    """
    for part in name.split("."):
        if part.isdigit():
            return int(part)
    raise UnsupportedSpecError(f"layer {name!r} has no number in its name")


def _stored(kv_cache_config: Any, num_layers: int) -> tuple[Stored, ...]:
    """The layers of the model proper; those of a draft model are left to the decode engine."""
    found = []
    for pool, group in enumerate(kv_cache_config.kv_cache_groups):
        if not getattr(group, "enable_kv_transfer", True):
            continue
        for name in group.layer_names:
            layer = layer_number(name)
            if layer < num_layers:
                found.append(Stored(name, layer, pool, compat.layer_spec(group.kv_cache_spec, name)))
    twice = {s.layer for s in found if sum(other.layer == s.layer for other in found) > 1}
    if twice:
        raise UnsupportedSpecError(f"layers {sorted(twice)} hold more than one cache each; they cannot be sent")
    return tuple(sorted(found, key=lambda stored: stored.layer))


def _check(stored: Stored) -> None:
    kinds = (FullAttentionSpec, SlidingWindowSpec, MambaSpec)
    if not isinstance(stored.spec, kinds):
        raise UnsupportedSpecError(
            f"layer {stored.name!r} has a cache of kind {type(stored.spec).__name__}, known are full and sliding-window"
            " attention, MLA and Mamba"
        )
    if not stored.is_state and getattr(stored.spec, "tokens_per_state", 1) != 1:
        raise UnsupportedSpecError(f"layer {stored.name!r} keeps several tokens in one entry; it cannot be sent")


def _with_packed(kv: KVSpec, packed: Mapping[int, Stored], cache_dtype: str, cpu: bool) -> KVSpec:
    """Quantized layers hold bytes whose meaning is in the name of their part, so that it is in the fingerprint."""
    groups = []
    for group in kv.groups:
        held = [packed[layer] for layer in group.layers if layer in packed]
        if held and len(held) < len(group.layers):
            raise UnsupportedSpecError("layers of one kind are quantized in part; they cannot be sent")
        groups.append(replace(group, planes=(_opaque(group, held[0].spec, cache_dtype, cpu),)) if held else group)
    return KVSpec(kv.model_id, tuple(groups))


def _opaque(group: LayerGroup, spec: Any, cache_dtype: str, cpu: bool) -> PlaneSpec:
    heads = group.planes[0].num_heads
    if spec.num_heads != spec.num_kv_heads:
        raise UnsupportedSpecError(f"a cache of dtype {cache_dtype!r} keeps K and V in slots of their own; not known")
    name = f"{cache_dtype}-cpu-{spec.block_size}" if cpu else cache_dtype
    return PlaneSpec("opaque", heads, (PlanePart(name, content_bytes(spec)),), DType.U8)


def content_bytes(spec: Any) -> int:
    """Bytes that a head holds of one token."""
    return int(spec.state_content_size_bytes)


def _with_states(kv: KVSpec, states: Mapping[int, Stored], tp_size: int) -> KVSpec:
    """State is split over tensor-parallel ranks in ways of its own: one "head" a rank, so both sides need as many."""
    sizes: dict[int, list[int]] = {}
    for layer, stored in states.items():
        sizes.setdefault(content_bytes(stored.spec), []).append(layer)
    first = max((group.id for group in kv.groups), default=-1) + 1
    added = [
        LayerGroup(
            first + i,
            tuple(layers),
            (PlaneSpec("opaque", tp_size, (PlanePart("state", nbytes),), DType.U8),),
            unit="state",
        )
        for i, (nbytes, layers) in enumerate(sorted(sizes.items()))
    ]
    return KVSpec(kv.model_id, (*kv.groups, *added))


def layer_cache(stored: Stored, cache: Any, model: ServedModel, num_blocks: int, isa: str | None) -> LayerCache:
    """A registered tensor (or list of state tensors) with its views. isa: of the CPU backend, else None.

    Raises:
        UnsupportedSpecError: its shape is none that the spec allows.
    """
    state_at = None
    if stored.is_state:
        views = layout.state(cache, content_bytes(stored.spec))
        state_at = -1 - int(getattr(stored.spec, "num_speculative_blocks", 0))
    else:
        views = _layout(stored, model.kv, num_blocks, isa)(cache)
    return LayerCache(stored.name, stored.pool, int(stored.spec.block_size), views, state_at)


def _layout(stored: Stored, kv: KVSpec, num_blocks: int, isa: str | None) -> layout.Layout:
    spec = stored.spec
    if stored.is_packed:
        return partial(layout.packed, cell=Cell(spec.num_heads, content_bytes(spec)))
    if isinstance(spec, MLAAttentionSpec):
        group = next(g for g in kv.groups if stored.layer in g.layers)
        return partial(layout.latent, rank=group.plane("latent").dim, rope=group.plane("rope").dim)
    cell = Cell(spec.num_kv_heads, spec.head_size, getattr(spec, "head_size_v", spec.head_size))
    if isa is not None:
        if isa not in CPU_ORDERED:
            raise UnsupportedSpecError(
                f"the CPU backend's {isa!r} kernels keep K and V in tiles that kvserve cannot read; serve with"
                " '--dtype float32' or '--dtype float16'"
            )
        return partial(layout.cpu, cell=cell)

    def any_dense(cache: Tensor) -> Views:
        return layout.separate(cache, cell, num_blocks) if cache.dim() == 5 else layout.dense(cache, cell)

    return any_dense
