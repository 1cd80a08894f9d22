"""``kvserve calibrate heads``: how much each KV head looks back, as scores for ``mixhq``.

Per text and layer: the mean query of each attention head and the mean key of each KV head over the text's tokens,
before RoPE; both repeated over ``SPAN`` positions and rotated; the softmax of the last position's logits; its
cumulative sum, averaged over positions. The area is near 0 for a head that attends to what is recent, 0.5 for one that
attends evenly, more for one that looks to the beginning. A KV head's score is the mean over its queries and texts: only
ranks matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import KVSpec, RopeSpec
from kvserve_hf.calibrate.request import Request
from kvserve_hf.calibrate.work import Work, require_finite, write_whole

TEXT_TOKENS = 2048
SPAN = 1024


def calibrate_heads(request: Request) -> dict[str, Any]:
    """Score the heads on the request's texts and write ``{"scores": [[...]], "provenance": {...}}``.

    An interrupted run goes on after its last text.

    Raises:
        ConfigError: there are no texts. ArtefactError: the work folder is another run's, in use, or damaged.
    """
    request.require_texts()
    provenance = request.provenance("calibrate heads")
    with Work(request.work, provenance) as work:
        table = _Table(work)
        _add_texts(request, table)
        scores = table.mean()
        about = provenance | {"tokens": TEXT_TOKENS, "span": SPAN}
        data = (json.dumps({"scores": scores, "provenance": about}) + "\n").encode()
        write_whole(request.out, data)
        work.remove()
    digest, (low, high) = blake3(data).hexdigest(), (min(map(min, scores)), max(map(max, scores)))
    shape = {"layers": len(scores), "heads": len(scores[0])}
    return {"file": str(request.out), "blake3": digest, **shape, "lowest": low, "highest": high}


def _add_texts(request: Request, table: _Table) -> None:
    engine = request.engine
    for i, text in enumerate(request.texts):
        request.progress(text.pin.name, i, len(request.texts))
        if i >= table.done:
            table.add(text_scores(engine.model, engine.spec, engine.tokenize(text.text)[:TEXT_TOKENS]))


class _Table:
    """The sum over texts, saved after each."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.done, self._total = 0, torch.zeros(())
        if (kept := self._work.read("heads")) is not None:
            self.done, self._total = kept.about["done"], kept.tensors["total"]

    def add(self, scores: Tensor) -> None:
        """One more text."""
        self.done, self._total = self.done + 1, self._total + scores
        self._work.keep("heads", {"total": self._total}, {"done": self.done})

    def mean(self) -> list[list[float]]:
        """The mean, to 6 digits.

        Raises:
            ArtefactError: it is not finite.
        """
        require_finite({"scores": self._total})
        return [[round(x, 6) for x in row] for row in (self._total / self.done).tolist()]


def text_scores(model: Any, spec: KVSpec, ids: list[int]) -> Tensor:
    """``[L, H]`` float64 for one text.

    Raises:
        UnsupportedSpecError: no layer has a rotary embedding that is known, or attention is not built as expected.
    """
    layers = _attention_layers(model)
    ropes = {layer: g.plane("k").parts[0].rope for g in spec.groups for layer in g.layers}
    if not any(ropes.values()):
        raise UnsupportedSpecError("no layer has a known rotary embedding, without which heads cannot be scored")
    with _means(layers) as means, torch.inference_mode():
        model(torch.tensor([ids]), use_cache=False, logits_to_keep=1)
    rows = []
    for i, attention in enumerate(layers):
        dim = attention.head_dim
        queries, keys = means[i, "q"].view(-1, dim), means[i, "k"].view(-1, dim)
        area = looking_back(queries, keys, ropes[i], float(attention.scaling))
        rows.append(area.view(len(keys), -1).mean(1))
    return torch.stack(rows)


def looking_back(queries: Tensor, keys: Tensor, rope: RopeSpec | None, scaling: float, span: int = SPAN) -> Tensor:
    """The area under cumulative attention of mean queries ``[Q, D]`` over mean keys ``[H, D]``, ``[Q]`` float64."""
    k = keys.double().repeat_interleave(len(queries) // len(keys), 0)
    attention = (logits_by_distance(queries.double(), k, rope, span).flip(1) * scaling).softmax(1)
    return attention.cumsum(1).mean(1)


def logits_by_distance(q: Tensor, k: Tensor, rope: RopeSpec | None, span: int) -> Tensor:
    """``[Q, span]``: products of ``q`` and ``k`` ``[Q, D]`` rotated to positions that lie 0 .. span - 1 apart.

    With each pair of rotated channels as a complex number, the product at distance d is
    ``Re(q * conj(k) * e^{i d w})`` summed over pairs: it depends on the distance alone.
    """
    if rope is None:
        return (q * k).sum(1, keepdim=True).expand(-1, span)
    pairs = torch.arange(rope.rotary_dim)
    first, second = (pairs[0::2], pairs[1::2]) if rope.style == "gptj" else pairs.chunk(2)
    along = q[:, first] * k[:, first] + q[:, second] * k[:, second]
    across = q[:, first] * k[:, second] - q[:, second] * k[:, first]
    angle = torch.outer(torch.tensor(rope.inv_freq, dtype=torch.float64), torch.arange(span, dtype=torch.float64))
    rotated = along @ angle.cos() + across @ angle.sin()
    rest = (q[:, rope.rotary_dim :] * k[:, rope.rotary_dim :]).sum(1, keepdim=True)
    return rotated * rope.attn_factor**2 + rest


def _attention_layers(model: Any) -> list[Any]:
    found = [m for m in model.modules() if hasattr(m, "q_proj") and hasattr(m, "k_proj") and hasattr(m, "layer_idx")]
    found.sort(key=lambda m: int(m.layer_idx))
    if [m.layer_idx for m in found] != list(range(model.config.get_text_config(decoder=True).num_hidden_layers)):
        raise UnsupportedSpecError(
            f"model type {model.config.model_type!r} does not keep its attention in modules with 'q_proj' and 'k_proj'"
        )
    return found


@contextmanager
def _means(layers: list[Any]) -> Iterator[dict[tuple[int, str], Tensor]]:
    """Mean queries and keys over tokens, before RoPE and after their norms where there are any."""
    means: dict[tuple[int, str], Tensor] = {}

    def keep(layer: int, which: str, dim: int) -> Any:
        def hook(_module: Any, _args: Any, out: Tensor) -> None:
            # A projection gives [1, T, heads D]; a norm over D comes before or after heads and tokens change places.
            tokens = _token_axis(out, layers[layer], which)
            means[layer, which] = out[0].double().mean(tokens).reshape(-1, dim)

        return hook

    handles = []
    for i, attention in enumerate(layers):
        for which in ("q", "k"):
            module = getattr(attention, f"{which}_norm", None) or getattr(attention, f"{which}_proj")
            handles.append(module.register_forward_hook(keep(i, which, attention.head_dim)))
    try:
        yield means
    finally:
        for handle in handles:
            handle.remove()


def _token_axis(out: Tensor, attention: Any, which: str) -> int:
    """The token axis of ``out[0]``: 0, or 1 where heads come first."""
    if out.dim() == 3:
        return 0
    heads = getattr(attention, f"{which}_proj").out_features // attention.head_dim
    return 1 if out.shape[1] == heads and out.shape[2] != heads else 0
