"""Statistics of a cache from the weights that make it, without any text.

The input of a layer's attention is normalised and multiplied by the norm's gain g. Its channels, taken as uncorrelated
with mean squares e that average 1, give keys and values W x the covariance W g e g W^T. Inputs of layers l and m are
taken to correlate by r^|l - m|: the residual stream changes slowly, and with r = 1 a block would have no more
components than the model has channels. A norm of keys or values divides each head by its size and multiplies by its own
gain.

e is 1 unless layers normalise what they add to the residual stream, as Gemma's do: the gains of those norms then say
what each channel gets. A few channels may hold nearly all energy, which makes the others small behind the next norm: on
Gemma-3-270M 5 of 640 channels hold 70 to 97 % of it and values are 100 to 2000 times smaller than e = 1 predicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import COMPOSITE
from kvserve_hf.calibrate.basis import Statistics, equal_parts
from kvserve_hf.calibrate.blocks import Block
from kvserve_hf.engine import Engine

CORRELATION = 0.95
"""r. On SmolLM2-135M 0.8 costs 8 % of the ratio at equal KL, 0.95 and 0.98 are alike."""

ADDED = ("post_attention_layernorm", "post_feedforward_layernorm")
"""Norms of what a layer adds to the residual stream."""


def from_weights(engine: Engine, cut: list[Block]) -> list[Statistics]:
    """Predicted mean and covariance of each block; every part of every layer has the same variance a channel.

    Raises:
        UnsupportedSpecError: attention without separate projections to K and V.
    """
    decoder = engine.model.get_decoder()
    energies = list(_energies(decoder))
    found = []
    for block in cut:
        made = [_layer(decoder.layers[layer], block, energies[layer]) for layer in block.layers]
        rows, mean = torch.cat([w for w, _ in made]), torch.cat([b for _, b in made])
        covariance = rows @ rows.T * _correlation(len(block.layers), len(rows) // len(block.layers))
        found.append(Statistics(block, mean, covariance, equal_parts(block, covariance.diagonal())))
    return found


def _correlation(layers: int, each: int) -> Tensor:
    """``[layers * each, layers * each]``: what the inputs of two layers have in common."""
    index = torch.arange(layers).repeat_interleave(each)
    return torch.full((), CORRELATION, dtype=torch.float64) ** (index[:, None] - index).abs()


def _energies(decoder: Any) -> Iterator[Tensor | float]:
    """Of each layer's input the mean square of its channels ``[inputs]``, which average 1."""
    embedding = decoder.get_input_embeddings()
    total = (embedding.weight.detach().double() * float(getattr(embedding, "embed_scale", 1.0))).square().mean(0)
    for layer in decoder.layers:
        added = [getattr(layer, name, None) for name in ADDED]
        # Without the third norm the first is that of the feed-forward's input, and says nothing of what is added.
        known = all(norm is not None for norm in (*added, getattr(layer, "pre_feedforward_layernorm", None)))
        yield total / total.mean() if known else 1.0
        if known:
            total = total + sum(torch.as_tensor(_gain(norm)).square() for norm in added)


def _layer(layer: Any, block: Block, energy: Tensor | float) -> tuple[Tensor, Tensor]:
    """Rows ``[H * D, inputs]`` in the order head, channel, and their mean ``[H * D]``, both float64."""
    gain = _gain(getattr(layer, "input_layernorm", None)) * energy**0.5
    names = COMPOSITE.get(block.plane.name, (block.plane.name,))
    parts = [_projected(layer.self_attn, name, gain, block) for name in names]
    rows, mean = (torch.cat([part[i] for part in parts], 1) for i in (0, 1))
    return rows.flatten(0, 1), mean.flatten()


def _projected(attention: Any, name: str, gain: Tensor | float, block: Block) -> tuple[Tensor, Tensor]:
    """``[H, D, inputs]`` and ``[H, D]`` of the block's heads."""
    projection = getattr(attention, f"{name}_proj", None)
    if not isinstance(projection, nn.Linear):
        raise UnsupportedSpecError(
            f"{type(attention).__name__} has no linear '{name}_proj'; calibrate on texts instead of --from-weights"
        )
    heads, dim = list(block.heads), projection.out_features // block.plane.num_heads
    rows = (projection.weight.detach().double() * gain).reshape(-1, dim, projection.in_features)[heads]
    mean = torch.zeros(rows.shape[:2], dtype=torch.float64)
    if projection.bias is not None:
        mean = projection.bias.detach().double().view(-1, dim)[heads]
    norm = getattr(attention, f"{name}_norm", None)
    if norm is None:
        return rows, mean
    size = (rows.square().sum(-1) + mean.square()).mean(-1, keepdim=True).sqrt()
    own = _gain(norm)
    return rows * (own / size)[..., None], mean * own / size


def _gain(norm: Any) -> Tensor | float:
    """What a norm multiplies by, found by normalising ones: some store it as an offset from 1."""
    weight = getattr(norm, "weight", None)
    if weight is None:
        return 1.0
    with torch.inference_mode():
        return torch.as_tensor(norm(torch.ones_like(weight))).double().clone()
