"""The reference engine: prefill, hold KV by transfer id, export and inject regions, continue.

Convention, as in vLLM and SGLang: of a prompt of N tokens the KV of tokens 0 .. N-2 is transferred, and the decode side
feeds the last prompt token itself. So the first token is produced where decoding goes on, and prefill needs no sampler.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvserve_core.errors import ConfigError, KVServeError
from kvserve_core.model import model_id as identity_of
from kvserve_core.spec import DType, KVSpec, Region
from kvserve_core.tensor import TORCH
from kvserve_hf.buffers import KVBuffer
from kvserve_hf.cache import KVCache, injected
from kvserve_hf.quiet import no_progress_bars
from kvserve_hf.spec import kv_spec

Ready = Callable[[range], None]


@dataclass(frozen=True)
class Prefilled:
    """What a prefill gives beside the KV it holds. logits: ``[V]`` float32, after the last token given."""

    num_tokens: int
    logits: Tensor
    seconds: float


class Engine:
    """One model on the CPU, batch size 1. ``gather`` and ``scatter`` are what a producer and a consumer call."""

    def __init__(self, model: Any, tokenizer: Any, model_id: str, kv_dtype: DType = DType.BF16) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.spec: KVSpec = kv_spec(model.config, kv_dtype, model_id)
        self.kv_dtype = TORCH[kv_dtype]
        self._held: dict[str, KVBuffer] = {}
        # transformers renamed 'past_key_values' to 'cache' in 5.x and warns on the old name.
        names = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in names else "past_key_values"

    @classmethod
    def load(cls, folder: str | Path, dtype: str = "float32", kv_dtype: DType = DType.BF16) -> Engine:
        """A Hugging Face folder. ``dtype`` is that of weights and compute, ``kv_dtype`` that of the cache.

        float32 is the default: on a CPU it decodes as fast as bfloat16 or faster, needs no bf16 instructions, and
        keeps noise of the compute out of quality figures. bfloat16 halves the memory, and prefill time where the CPU
        has such instructions.

        Raises:
            ArtefactError: not a folder with a config and safetensors weights. ConfigError: an unknown dtype.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"unknown compute dtype {dtype!r}; use 'float32', 'bfloat16' or 'float16'", "dtype")
        path = Path(folder)
        name = identity_of(path)
        with no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        return cls(model, tokenizer, name, kv_dtype)

    def tokenize(self, text: str, chat: bool = False) -> list[int]:
        """Token ids of a text, or of a user message in the model's chat template.

        A model without a template gets the message as plain text. Plain text starts as the tokenizer starts any text
        (with a BOS token where the model has one), a template brings its own start.
        """
        if not chat or not self.tokenizer.chat_template:
            return list(self.tokenizer(text)["input_ids"])
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of generated tokens, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        config = getattr(self.model, "generation_config", None)
        ids = getattr(config, "eos_token_id", None)
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    def prefill(
        self, transfer_id: str, ids: Sequence[int], chunk: int | None = None, on_ready: Ready | None = None
    ) -> Prefilled:
        """Compute and hold the KV of ``ids`` under ``transfer_id``, ``chunk`` tokens at a time (default: all at once).

        ``on_ready`` is told of each range of tokens once its KV is final. A failed prefill holds nothing.

        Raises:
            ConfigError: no tokens, more than the model takes, or a chunk below 1.
            KVServeError: the transfer id is in use.
        """
        self._check(len(ids), chunk)
        buffer = self.open(transfer_id, len(ids))
        cache = KVCache(self.model.config, self.kv_dtype, buffer)
        began = time.perf_counter()
        try:
            logits = self._chunks(cache, ids, chunk or len(ids), on_ready)
        except BaseException:
            self.release(transfer_id)
            raise
        return Prefilled(len(ids), logits, time.perf_counter() - began)

    def open(self, transfer_id: str, num_tokens: int) -> KVBuffer:
        """An empty buffer for KV that will arrive; ``scatter`` fills it."""
        if transfer_id in self._held:
            raise KVServeError(f"transfer {transfer_id!r} is already held; release it or choose another id")
        self._held[transfer_id] = buffer = KVBuffer(self.spec, num_tokens)
        return buffer

    def gather(self, transfer_id: str, at: Region) -> Tensor:
        """A copy of a region of held KV, ``[L, H, T, D]`` in the KV dtype."""
        return self._buffer(transfer_id).read(at)

    def scatter(self, transfer_id: str, at: Region, x: Tensor) -> None:
        """Put arrived KV in its place."""
        self._buffer(transfer_id).write(at, x)

    def release(self, transfer_id: str) -> None:
        """Forget a transfer; safe to call twice."""
        self._held.pop(transfer_id, None)

    @property
    def held(self) -> tuple[str, ...]:
        """Transfer ids whose KV is in memory."""
        return tuple(self._held)

    def teacher_forced(self, transfer_id: str, ids: Sequence[int]) -> Tensor:
        """Logits ``[len(ids), V]`` float32 when ``ids`` follow the held KV: the last prompt token, then given tokens.

        Works on a copy of the cache, so it can be repeated.
        """
        return self._forward(self._inject(transfer_id), ids, keep=len(ids))

    def stream(self, transfer_id: str, last: int, max_tokens: int) -> Iterator[int]:
        """Greedy tokens after the held KV and the ``last`` prompt token, before a stop token or up to the limit."""
        cache, token = self._inject(transfer_id), last
        for _ in range(max_tokens):
            token = int(self._forward(cache, [token], keep=1)[0].argmax())
            if token in self.stop_ids:
                return
            yield token

    def generate(self, transfer_id: str, last: int, max_tokens: int) -> list[int]:
        """All of :meth:`stream`."""
        return list(self.stream(transfer_id, last, max_tokens))

    def _inject(self, transfer_id: str) -> KVCache:
        return injected(self.model.config, self._buffer(transfer_id), self.kv_dtype, self.model.dtype)

    def _buffer(self, transfer_id: str) -> KVBuffer:
        if transfer_id not in self._held:
            raise KVServeError(f"transfer {transfer_id!r} is not held here; it was released or never prefilled")
        return self._held[transfer_id]

    def _chunks(self, cache: KVCache, ids: Sequence[int], chunk: int, on_ready: Ready | None) -> Tensor:
        logits = torch.empty(0)
        for start in range(0, len(ids), chunk):
            piece = ids[start : start + chunk]
            logits = self._forward(cache, piece, keep=1)[0]
            if on_ready is not None:
                on_ready(range(start, start + len(piece)))
        return logits

    def _forward(self, cache: KVCache, ids: Sequence[int], keep: int) -> Tensor:
        given: dict[str, Any] = {self.cache_argument: cache}
        with torch.inference_mode():
            out = self.model(torch.tensor([list(ids)]), use_cache=True, logits_to_keep=keep, **given)
        return torch.as_tensor(out.logits[0]).float()

    def _check(self, count: int, chunk: int | None) -> None:
        limit = self.model.config.get_text_config(decoder=True).max_position_embeddings
        if not 1 <= count <= limit:
            raise ConfigError(f"{count} tokens to prefill; this model takes 1 to {limit}", "ids")
        if chunk is not None and chunk < 1:
            raise ConfigError(f"a chunk of {chunk} tokens; use at least 1, or None for the whole prompt", "chunk")
