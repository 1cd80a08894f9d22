"""From means, covariances and a metric to a file of bases.

The file's format is that of the ``klt`` transform (``kvserve_plugins/kernels/basis.py`` describes it).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from kvserve_hf.calibrate.blocks import Block
from kvserve_hf.calibrate.work import require_finite, write_whole

KEY = "kvserve.klt"
VERSION = 1

OPEN = (".tail", ".held")
"""Energies that weights alone do not tell."""


@dataclass(frozen=True)
class Statistics:
    """Of one block: mean ``[n]``, covariance ``[n, n]``, and the metric's diagonal ``[n]``, all float64."""

    block: Block
    mean: Tensor
    covariance: Tensor
    metric: Tensor


@dataclass(frozen=True)
class Components:
    """One block's basis before it is rounded: scale ``[n]``, columns ``[n, r]``, sigma ``[r]``, energy not in it.

    held: ``[r + 1]``, energy outside the first k components on texts that were left out, where there were any.
    """

    block: Block
    mean: Tensor
    scale: Tensor
    columns: Tensor
    sigma: Tensor
    tail: float
    held: Tensor | None = None


def unit(statistics: Sequence[Statistics]) -> float:
    """What the metric is divided by so that a channel has variance 1 on average, over all blocks.

    A step then means the same on every model: a part of a typical standard deviation.
    """
    total = sum(float((s.metric * s.covariance.diagonal()).sum()) for s in statistics)
    return total / sum(s.block.size for s in statistics)


def equal_parts(block: Block, variances: Tensor) -> Tensor:
    """A metric ``[n]`` under which each part of each layer has the same variance a channel.

    For use where nothing is known of how much they matter.
    """
    shape = (len(block.layers), len(block.heads), block.plane.dim)
    pieces = torch.split(variances.reshape(shape), [part.dim for part in block.plane.parts], -1)
    tiny = torch.finfo(torch.float32).tiny
    return torch.cat([(1 / (p.mean((1, 2), keepdim=True) + tiny)).expand_as(p) for p in pieces], -1).flatten()


def components(s: Statistics, unit_: float, cutoff: float, rank: int | None) -> Components:
    """Eigenvectors of the covariance in folded coordinates, those with sigma >= ``cutoff``, at most ``rank``."""
    scale = (s.metric / unit_).sqrt()
    energies, columns = torch.linalg.eigh(scale[:, None] * s.covariance * scale)
    energies, columns = energies.flip(0).clamp_min(0), columns.flip(1)
    sigma = energies.sqrt()
    kept = min(max(int((sigma >= cutoff).sum()), 1), rank or len(sigma))
    tail = float(energies[kept:].sum())
    return Components(s.block, s.mean, scale, columns[:, :kept], sigma[:kept], tail)


def write(path: Path, plane: str, per: str, found: Sequence[Components], about: Mapping[str, Any]) -> int:
    """Write the file, whole or not at all; returns its bytes. ``about``: provenance.

    Raises:
        ArtefactError: a figure is not finite.
    """
    tensors: dict[str, Tensor] = {}
    for i, c in enumerate(found):
        tensors[f"{i}.basis"] = c.columns.to(torch.float16).contiguous()
        tensors[f"{i}.tail"] = torch.tensor([c.tail], dtype=torch.float32)
        for name, x in (("mean", c.mean), ("scale", c.scale), ("sigma", c.sigma), ("held", c.held)):
            if x is not None:
                tensors[f"{i}.{name}"] = x.float().contiguous()
    require_finite({name: x for name, x in tensors.items() if not name.endswith(OPEN)})
    blocks = [{"layers": c.block.layers, "heads": c.block.heads, "rope": c.block.rope} for c in found]
    head = {"version": VERSION, "plane": plane, "dim": found[0].block.plane.dim, "per": per, "blocks": blocks}
    # One key only: safetensors writes several in an order of its own, and equal runs would give other hashes.
    metadata = {KEY: json.dumps(head | {"provenance": about})}
    data = save(tensors, metadata)
    write_whole(path, data)
    return len(data)
