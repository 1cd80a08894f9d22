"""Calibrated bases as a file, and the part of one that a place needs.

The file is safetensors. Its metadata key ``kvserve.klt`` is JSON: ``version`` 1, ``plane``, ``dim`` (of the plane),
``per`` (``head`` or ``all``), ``provenance``, and ``blocks``, a list of ``{"layers": [...], "heads": [...], "rope":
[...]}`` (``rope``: for each part of the plane, whether it was turned back). Block i has these tensors, n = layers x
heads x dim in this order and r components by falling sigma:

    i.basis  f16 [n, r]   orthonormal columns
    i.mean   f32 [n]      of the values;   i.scale  f32 [n]  what they are multiplied by: the root of their metric
    i.sigma  f32 [r]      standard deviation of each component
    i.tail   f32 [1]      mean energy a token of the components that are not in the file; inf: unknown, no drift guard
    i.held   f32 [r + 1]  energy a token outside the first k components (at index k) of cells of texts that the basis
                          was not made from, a high quantile of them; files from before it was measured lack it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvserve_core.errors import ArtefactError, UnsupportedSpecError
from kvserve_core.json_text import parsed
from kvserve_plugins.kernels.basis_checks import check_about, check_tensors

KEY = "kvserve.klt"
VERSION = 1
IN_SAMPLE = 2.5
"""How much more than on its own texts a basis misses on others of their kind, for files without ``held``: 1.9 to 3.4 in
cells of 16 texts on SmolLM2-135M, after 20 texts."""
NOISE = 1e-4
"""Part of a token's energy that the rounding of a basis to f16 can move in or out of its components, with a margin."""


@dataclass(frozen=True)
class Block:
    """The layers and heads that one basis covers, and which parts of the plane were turned back."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    rope: tuple[bool, ...]


@dataclass(frozen=True)
class BasisFile:
    """A parsed file."""

    plane: str
    dim: int
    per: str
    blocks: tuple[Block, ...]
    tensors: dict[str, Tensor]

    def find(self, layers: tuple[int, ...], heads: tuple[int, ...]) -> int:
        """The block of exactly these layers and heads.

        Raises:
            UnsupportedSpecError: there is none; the message says what the file holds.
        """
        for i, block in enumerate(self.blocks):
            if (block.layers, block.heads) == (layers, heads):
                return i
        raise UnsupportedSpecError(
            f"the basis holds no block of layers {list(layers)} and heads {list(heads)}; it was calibrated per"
            f" {self.per!r} for {self._held()}; choose 'layer_block' and 'head_groups' so that segments are these"
            " blocks, or calibrate again"
        )

    def _held(self) -> str:
        layers = sorted({b.layers for b in self.blocks})
        heads = sorted({b.heads for b in self.blocks})
        return f"layers {' '.join(f'{b[0]}-{b[-1]}' for b in layers)} and heads {' '.join(map(str, heads))}"


@dataclass(frozen=True)
class Basis:
    """One block on a device. ``to`` is [n, k]; ``drift`` is the energy a token outside the k components to expect."""

    to: Tensor
    mean: Tensor
    scale: Tensor
    drift: float

    @property
    def rank(self) -> int:
        """Components kept."""
        return self.to.shape[1]

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values ``[T, n]`` to components ``[T, k]``, and their energy outside these components in one token, 0-d."""
        folded = (x - self.mean) * self.scale
        y = folded @ self.to
        outside = folded.square().sum() - y.square().sum()
        return y, outside / max(len(x), 1)

    def decode(self, y: Tensor) -> Tensor:
        """Components ``[T, k]`` to values ``[T, n]``."""
        return (y @ self.to.T) / self.scale + self.mean


def parse(data: bytes) -> BasisFile:
    """A file's blocks and tensors.

    Raises:
        ArtefactError: it is not such a file, of a version that is not known here, or holds what no calibration writes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        size = int.from_bytes(data[:8], "little")
        about = parsed(parsed(data[8 : 8 + size])["__metadata__"][KEY])
        if about["version"] != VERSION or isinstance(about["version"], bool):
            raise ArtefactError(f"the basis is of version {about['version']}, this kvserve reads {VERSION}; upgrade it")
        check_about(about)
        blocks = tuple(_block(b) for b in about["blocks"])
        file = BasisFile(about["plane"], about["dim"], about["per"], blocks, load(data))
        for i, block in enumerate(blocks):
            check_tensors(i, len(block.layers) * len(block.heads) * file.dim, file.tensors)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ArtefactError(
            f"not a basis of 'kvserve calibrate klt': {type(error).__name__}: {error}; name a file that it wrote"
        ) from error
    return file


def prepare(
    file: BasisFile, index: int, cutoff: float, rank: int | None, device: torch.device, dtype: torch.dtype
) -> Basis:
    """A block's components with sigma >= ``cutoff``, at most ``rank`` and at least one, on a device.

    Raises:
        UnsupportedSpecError: the file was truncated above the cutoff or below the rank.
    """
    t = {name: file.tensors[f"{index}.{name}"] for name in ("basis", "mean", "scale", "sigma", "tail")}
    sigma = t["sigma"].double()
    kept = int((sigma >= cutoff).sum()) if rank is None else rank
    kept = max(kept, 1)
    if kept > len(sigma):
        raise UnsupportedSpecError(
            f"rank {rank} of a basis with {len(sigma)} components; lower 'rank' or calibrate with a higher one"
        )
    to = t["basis"][:, :kept].to(device=device, dtype=dtype)
    return Basis(to, t["mean"].to(device, dtype), t["scale"].to(device, dtype), _expected(file, index, kept))


def _expected(file: BasisFile, index: int, kept: int) -> float:
    """The energy a token outside the first ``kept`` components, at least what rounding can move there."""
    tail, sigma = float(file.tensors[f"{index}.tail"]), file.tensors[f"{index}.sigma"].double()
    held = file.tensors.get(f"{index}.held")
    missed = IN_SAMPLE * (tail + float(sigma[kept:].square().sum())) if held is None else float(held[kept])
    return max(missed, float(sigma[kept - 1]) ** 2, NOISE * (tail + float(sigma.square().sum())))


def _block(raw: dict[str, Any]) -> Block:
    return Block(tuple(raw["layers"]), tuple(raw["heads"]), tuple(raw["rope"]))
