"""transformers caches that hold KV in the KV dtype, record it for export, or start from injected KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvserve_core.errors import UnsupportedSpecError
from kvserve_hf.buffers import KVBuffer


class KVCache(DynamicCache):
    """A DynamicCache whose values are those of a cache stored in ``kv_dtype``.

    New keys and values are rounded to ``kv_dtype`` before anything attends to them, as an engine with a bf16 cache does
    even when it computes in float32. So export and injection in ``kv_dtype`` are exact. With a ``buffer``, every
    token is recorded there too, also those that a sliding-window layer drops.
    """

    def __init__(self, config: Any, kv_dtype: torch.dtype, buffer: KVBuffer | None = None) -> None:
        super().__init__(config=config)
        self._kv_dtype, self._buffer = kv_dtype, buffer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Round, record, then do what DynamicCache does. K and V are ``[1, H, t, D]``."""
        k, v = key_states.to(self._kv_dtype), value_states.to(self._kv_dtype)
        if self._buffer is not None:
            self._buffer.record(layer_idx, self.attention_layer(layer_idx).get_seq_length(), k[0], v[0])
        return super().update(k.to(key_states.dtype), v.to(value_states.dtype), layer_idx, *args, **kwargs)

    def attention_layer(self, index: int) -> DynamicLayer:
        """A layer's cache.

        Raises:
            UnsupportedSpecError: it is not a cache of one K and one V.
        """
        layer = self.layers[index]
        if not isinstance(layer, DynamicLayer):
            raise UnsupportedSpecError(f"layer {index} keeps its cache as {type(layer).__name__}, not as K and V")
        return layer


def injected(config: Any, buffer: KVBuffer, kv_dtype: torch.dtype, compute_dtype: torch.dtype) -> KVCache:
    """A fresh cache that continues after the buffer's tokens.

    A sliding-window layer keeps its last ``window - 1`` tokens and counts all of them, which is the state it would have
    reached by itself.

    Raises:
        KVServeError: the buffer lacks a token that the next query attends to.
    """

    def layer(index: int) -> tuple[Tensor, Tensor, int]:
        k, v, start = buffer.layer(index)
        return k.to(compute_dtype), v.to(compute_dtype), start

    return continued(config, kv_dtype, layer, buffer.num_tokens)


def continued(
    config: Any, kv_dtype: torch.dtype, layer: Callable[[int], tuple[Tensor, Tensor, int]], num_tokens: int
) -> KVCache:
    """A fresh cache after ``num_tokens`` tokens; ``layer`` gives K and V ``[H, t, D]`` of a layer and their first."""
    cache = KVCache(config, kv_dtype)
    for index in range(len(cache.layers)):
        k, v, start = layer(index)
        held = cache.attention_layer(index)
        held.update(k[None], v[None])
        if start and isinstance(held, DynamicSlidingWindowLayer):
            held.cumulative_length = num_tokens
    return cache
