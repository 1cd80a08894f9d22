"""Pruning baselines as attention masks: what a model answers when some heads see sinks and recent tokens only.

A transfer layer cannot drop tokens of single heads of an engine's cache, so this is a comparison and cannot be served.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvserve_core.errors import ConfigError
from kvserve_hf.cache import KVCache
from kvserve_hf.engine import Engine

Head = tuple[int, int]
"""Layer and KV head."""
RESTORED = "/restored"
"""End of the transfer ids whose KV came through a roundtrip: what is decoded from them is masked."""
IMPLEMENTATION = "sdpa"


def streaming_heads(scores: Sequence[Sequence[float]], share: float) -> frozenset[Head]:
    """The ``share`` of heads with the lowest scores (those that look back least), ties in order of layer and head."""
    order = sorted((score, layer, head) for layer, row in enumerate(scores) for head, score in enumerate(row))
    return frozenset((layer, head) for _, layer, head in order[: round(share * len(order))])


class StreamingEngine(Engine):
    """Shares another engine's model. DuoAttention (arXiv 2410.10819): a streaming head attends to the first ``sinks``
    tokens and the last ``recent`` ones.

    Raises:
        ConfigError: the model does not attend through torch's scaled dot product, which is where the mask goes.
    """

    def __init__(self, engine: Engine, streaming: Collection[Head], sinks: int = 16, recent: int = 64) -> None:
        super().__init__(engine.model, engine.tokenizer, engine.spec.model_id)
        if (used := engine.model.config._attn_implementation) != IMPLEMENTATION:
            raise ConfigError(f"the model attends with {used!r}; load it with {IMPLEMENTATION!r} to mask heads")
        self.kv_dtype, self.spec = engine.kv_dtype, engine.spec
        self._streaming, self._sinks, self._recent = frozenset(streaming), sinks, recent
        self._masked: KVCache | None = None

    def counted(self, num_tokens: int) -> tuple[int, int]:
        """Tokens of all heads together that are sent of a prompt, and those of them that the heads keep."""
        sent = kept = 0
        for group in self.spec.groups:
            start = max(0, num_tokens - group.window) if group.window else 0
            few = sum(t < self._sinks or t >= num_tokens - self._recent for t in range(start, num_tokens))
            heads = [
                (layer, h) for p in group.planes if p.name == "k" for layer in group.layers for h in range(p.num_heads)
            ]
            sent += len(heads) * (num_tokens - start)
            kept += sum(few if head in self._streaming else num_tokens - start for head in heads)
        return sent, kept

    def _inject(self, transfer_id: str) -> KVCache:
        cache = super()._inject(transfer_id)
        self._masked = cache if transfer_id.endswith(RESTORED) else None
        return cache

    def _forward(self, cache: KVCache, ids: Sequence[int], keep: int) -> Tensor:
        if cache is not self._masked:
            return super()._forward(cache, ids, keep)
        with self._masking(cache.get_seq_length() + len(ids)):
            return super()._forward(cache, ids, keep)

    @contextmanager
    def _masking(self, end: int) -> Iterator[None]:
        """Attention with masks, for tokens up to position ``end``."""

        def attend(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any
        ) -> tuple[Tensor, None]:
            groups = query.shape[1] // key.shape[1]
            allowed = self._allowed(module.layer_idx, key.shape[1], query.shape[2], key.shape[2], end)
            allowed = allowed.repeat_interleave(groups, 0)[None]
            if mask is not None:
                allowed = allowed & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min)
            k, v = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            out = F.scaled_dot_product_attention(query, k, v, attn_mask=allowed, scale=given.get("scaling"))
            return out.transpose(1, 2).contiguous(), None

        ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] = attend
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS.pop(IMPLEMENTATION)  # the one that was there before shows again

    def _allowed(self, layer: int, heads: int, queries: int, keys: int, end: int) -> Tensor:
        """``[heads, queries, keys]``: which token each query sees, by absolute positions; both end at ``end``."""
        q = torch.arange(end - queries, end)[:, None]
        k = torch.arange(end - keys, end)[None, :]
        causal = k <= q
        streamed = causal & ((k < self._sinks) | (q - k < self._recent))
        return torch.stack([streamed if (layer, head) in self._streaming else causal for head in range(heads)])
