"""How much each channel of the cache matters: the diagonal of the Fisher information of its values.

A continuation is fed through the cache of a prompt, labels are drawn from the model's own predictions, and the negative
log likelihood of these labels is differentiated by the cached values without positions. The mean square of that
gradient is what a squared error of 1 in that channel of one cached token costs in each later token, times 2, in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvserve_core.spec import LayerGroup, Region
from kvserve_hf.buffers import first_needed
from kvserve_hf.cache import KVCache, continued
from kvserve_hf.calibrate.blocks import derope
from kvserve_hf.engine import Engine

FLOOR = 0.05
"""Added to every channel, as a part of the mean of its head: no channel is free."""
Sums = dict[tuple[int, str], Tensor]
"""By layer and plane (``k`` or ``v``): ``[H, D]`` float64."""


@dataclass
class Sensitivity:
    """Mean squared gradients, added up over texts."""

    sums: Sums = field(default_factory=dict)
    texts: int = 0

    def add(self, values: Sums) -> None:
        """One text's :func:`squared_gradients`."""
        self.merge(Sensitivity(values, 1))

    def merge(self, other: Sensitivity) -> None:
        """Add what ``other`` has added up."""
        for key, value in other.sums.items():
            self.sums[key] = self.sums[key] + value if key in self.sums else value
        self.texts += other.texts

    def metric(self, layer: int, plane: str) -> Tensor:
        """``[H, D]`` float64, above 0."""
        mean = self.sums[layer, plane] / max(self.texts, 1)
        return mean + FLOOR * mean.mean(-1, keepdim=True) + torch.finfo(torch.float32).tiny


def squared_gradients(
    engine: Engine, transfer_id: str, num_tokens: int, ids: Sequence[int], sink_tokens: int, seed: int
) -> Sums:
    """Mean over cached tokens, without sinks, of the squared gradient, per fed token of ``ids``.

    ``num_tokens`` tokens are held under ``transfer_id``. Of a windowed layer only the tokens that the first fed one
    sees count.
    """
    leaves: dict[tuple[int, str], tuple[Tensor, int]] = {}

    def layer(index: int) -> tuple[Tensor, Tensor, int]:
        group = next(g for g in engine.spec.groups if index in g.layers)
        start = first_needed(group, num_tokens)
        k, v = (_leaf(engine, transfer_id, group, (index, name), start, num_tokens, leaves) for name in ("k", "v"))
        return k, v, start

    with torch.enable_grad():
        cache = continued(engine.model.config, engine.kv_dtype, layer, num_tokens)
        loss = _sampled_loss(engine, cache, ids, seed)
        gradients = torch.autograd.grad(loss, [leaf for leaf, _ in leaves.values()])
    found = {}
    for (key, (_, start)), gradient in zip(leaves.items(), gradients, strict=True):
        tokens = gradient[0, :, max(sink_tokens - start, 0) :].double()
        found[key] = tokens.square().mean(1) / len(ids)
    return found


def _leaf(
    engine: Engine,
    transfer_id: str,
    group: LayerGroup,
    key: tuple[int, str],
    start: int,
    stop: int,
    leaves: dict[tuple[int, str], tuple[Tensor, int]],
) -> Tensor:
    """Held values ``[H, t, D]`` as a function of a new leaf, which lacks their positions."""
    plane = group.plane(key[1])
    at = Region(group.id, plane.name, (key[0],), tuple(range(plane.num_heads)), start, stop)
    x, stage = engine.gather(transfer_id, at).float(), derope(engine.spec, at)
    leaf = (x if stage is None else stage.encode(x, at)[0]).requires_grad_()
    leaves[key] = leaf, start
    turned = leaf if stage is None else stage.decode(leaf, {}, at)
    return turned[0].to(engine.model.dtype)


def _sampled_loss(engine: Engine, cache: KVCache, ids: Sequence[int], seed: int) -> Tensor:
    out = engine.model(
        torch.tensor([list(ids)]), use_cache=True, logits_to_keep=len(ids), **{engine.cache_argument: cache}
    )
    log_probabilities = torch.log_softmax(out.logits[0].float(), -1)
    draw = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(log_probabilities.detach().exp(), 1, generator=draw)
    return -log_probabilities.gather(1, labels).sum()
