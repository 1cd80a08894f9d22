"""Small bases in the format of the ``klt`` transform, written here independently of ``kvserve calibrate``."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from safetensors.torch import save
from torch import Tensor

from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Region, RopeSpec
from kvserve_core.tensor import TORCH
from kvserve_plugins.kernels import rope

DIM, HEADS, LAYERS = 16, 3, 4
ROPE = RopeSpec(tuple(10000.0 ** (-2 * i / DIM) for i in range(DIM // 2)), DIM, "neox")
MEAN = 3.0


def model(rope_spec: RopeSpec | None = ROPE, dtype: DType = DType.BF16) -> KVSpec:
    """Four layers of planes ``k``, with positions, and ``v``."""
    k = PlaneSpec("k", HEADS, (PlanePart("k", DIM, rope_spec),), dtype)
    v = PlaneSpec("v", HEADS, (PlanePart("v", DIM),), dtype)
    return KVSpec("klt", (LayerGroup(0, tuple(range(LAYERS)), (k, v)),))


def place(
    tokens: int, layers: tuple[int, ...] = (0, 1), heads: tuple[int, ...] = (0, 1, 2), start: int = 512
) -> Region:
    return Region(0, "kv", layers, heads, start, start + tokens)


@dataclass(frozen=True)
class Source:
    """Values that live in ``rank`` directions of each block and head, with a mean and a little noise."""

    rank: int = 6
    noise: float = 1e-3

    def directions(self, layers: tuple[int, ...], head: int) -> Tensor:
        """``[n, rank]`` orthonormal."""
        draw = torch.Generator().manual_seed(1000 * layers[0] + head)
        size = len(layers) * 2 * DIM
        return torch.linalg.qr(torch.randn(size, self.rank, generator=draw, dtype=torch.float64))[0]

    def values(self, at: Region, spec: KVSpec, seed: int = 0) -> Tensor:
        """``[L, H, T, 2 DIM]`` as a cache holds them: with positions, in the plane's dtype."""
        draw = torch.Generator().manual_seed(seed)
        heads = []
        for head in at.heads:
            weights = torch.randn(at.num_tokens, self.rank, generator=draw) * self.sigma()
            rows = weights @ self.directions(at.layers, head).float().T + MEAN
            rows = rows + self.noise * torch.randn(rows.shape, generator=draw)
            heads.append(rows.unflatten(1, (len(at.layers), 2 * DIM)).transpose(0, 1))
        plane = spec.group(0).plane(at.plane)
        return rope.apply(torch.stack(heads, 1), plane.parts, at.start).to(TORCH[plane.dtype])

    def sigma(self) -> Tensor:
        """``[rank]``, falling."""
        return 4.0 * 0.5 ** torch.arange(self.rank)

    def file(
        self,
        blocks: list[tuple[tuple[int, ...], tuple[int, ...]]],
        scale: float = 1.0,
        turned: bool = True,
        tail: float | None = None,
        held: float | None = None,
    ) -> bytes:
        """A file with a basis for each (layers, heads). held: the energy outside all of them, on other texts."""
        tensors: dict[str, Tensor] = {}
        for i, (layers, heads) in enumerate(blocks):
            columns, sigma = self._joined(layers, heads)
            n = columns.shape[0]
            tensors[f"{i}.basis"] = columns.half().contiguous()
            tensors[f"{i}.mean"] = torch.full((n,), MEAN)
            tensors[f"{i}.scale"] = torch.full((n,), scale)
            tensors[f"{i}.sigma"] = sigma * scale
            tensors[f"{i}.tail"] = torch.tensor([n * (self.noise * scale) ** 2 if tail is None else tail])
            if held is not None:
                beyond = (sigma * scale).square().flip(0).cumsum(0).flip(0)
                tensors[f"{i}.held"] = torch.cat((beyond, torch.zeros(1))) + held
        about = {
            "version": 1,
            "plane": "kv",
            "dim": 2 * DIM,
            "per": "head" if all(len(heads) == 1 for _, heads in blocks) else "all",
            "blocks": [{"layers": ls, "heads": hs, "rope": [turned, False]} for ls, hs in blocks],
        }
        return save(tensors, {"kvserve.klt": json.dumps(about)})

    def _joined(self, layers: tuple[int, ...], heads: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Directions of several heads in the order layer, head, channel, by falling sigma."""
        wide = torch.zeros(len(layers), len(heads), 2 * DIM, len(heads), self.rank)
        for j, head in enumerate(heads):
            own = self.directions(layers, head).float().unflatten(0, (len(layers), 2 * DIM))
            wide[:, j, :, j] = own
        sigma = self.sigma().repeat(len(heads))
        order = sigma.argsort(descending=True, stable=True)
        return wide.flatten(3).flatten(0, 2)[:, order], sigma[order]


BLOCKS = ((0, 1), (2, 3))
PER_HEAD = [(layers, (head,)) for layers in BLOCKS for head in range(HEADS)]
OVER_ALL = [(layers, tuple(range(HEADS))) for layers in BLOCKS]
