"""Caches, chains and timers for ``gpu.py``: Qwen2.5-7B's geometry, and a KLT basis with a measured spectrum."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.pipeline import Pipeline
from kvserve_core.plan import Planned
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, RopeSpec, whole
from kvserve_core.tensor import Encoded, Part
from kvserve_plugins.kernels import rope

CUDA = torch.device("cuda")
LAYERS, HEADS, DIM, BLOCK = 28, 4, 128, 14
ROPE = RopeSpec(tuple(1e6 ** (-2 * i / DIM) for i in range(DIM // 2)), DIM, "neox")
QWEN = KVSpec(
    "qwen2.5-7b",
    (
        LayerGroup(
            0,
            tuple(range(LAYERS)),
            (
                PlaneSpec("k", HEADS, (PlanePart("k", DIM, ROPE),), DType.BF16),
                PlaneSpec("v", HEADS, (PlanePart("v", DIM),), DType.BF16),
            ),
        ),
    ),
)
STAGED = 256 * 10**6
"""Original bytes of a batch, as a producer stages them."""
Batch = list[tuple[Planned, Tensor]]


def uniform(levels: int, axis: str = "token_head") -> dict[str, Any]:
    """A ``uniform`` quantizer."""
    return {"name": "uniform", "configuration": {"levels": levels, "axis": axis}}


def mixhq(high: int, low: int, *, by_layer: bool = False) -> dict[str, Any]:
    """Half of the heads in ``high`` levels, half in ``low``: the same ones in all layers, or others in each layer."""
    draw = torch.Generator().manual_seed(1)
    scores = torch.rand(LAYERS if by_layer else 1, HEADS, generator=draw).expand(LAYERS, HEADS)
    if not by_layer:  # ranked over all layers and heads, so equal rows must differ between classes only
        scores = scores.argsort(1).argsort(1).float()
    both = {"high": uniform(high), "low": uniform(low)}
    return {"name": "mixhq", "configuration": {"scores": scores.tolist(), **both}}


def pipeline(chain: dict[str, Any], plane: str = "*", artefacts: Artefacts = NONE, **cut: Any) -> Pipeline:
    """A pipeline of one chain, 14 layers a segment unless ``cut`` says otherwise."""
    spec = {"planes": {plane: chain}, "layer_block": BLOCK, "sink_tokens": 0, **cut}
    return Pipeline.build(spec, QWEN, whole(QWEN), CUDA, artefacts=artefacts)


def gaussian(made: Pipeline, tokens: int) -> Batch:
    """A request's segments of fresh normal values."""
    _, planned = made.header("r", tokens, "p")
    dim = made.kv.group(0).plane(planned[0].at.plane).dim
    return [
        (p, torch.randn(len(p.at.layers), len(p.at.heads), p.at.num_tokens, dim, device=CUDA, dtype=torch.bfloat16))
        for p in planned
    ]


def size_of(batch: Batch) -> int:
    """Original bytes."""
    return sum(x.numel() * 2 for _, x in batch)


def split(
    items: Iterable[Any], limit: int, size: Callable[[Any], int] = lambda item: item[1].nbytes
) -> list[list[Any]]:
    """Batches of at most ``limit`` original bytes, as a producer makes them."""
    out: list[list[Any]] = [[]]
    room = limit
    for item in items:
        if out[-1] and size(item) > room:
            out.append([])
            room = limit
        out[-1].append(item)
        room -= size(item)
    return out


def gbs(nbytes: int, ms: float) -> float:
    """GB/s."""
    return round(nbytes / ms / 1e6, 1)


def device_gbs(nbytes: int, call: Callable[[], object], repeats: int = 7) -> float:
    """Original GB/s of the device's share: a sleep longer than the host's share runs before it."""
    cycles = int(host_ms(call, 2) * 2.5e6) + 10_000_000
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(cycles)
        start.record()
        kept = call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
        del kept
    return gbs(nbytes, statistics.median(times))


def host_ms(call: Callable[[], object], repeats: int = 15) -> float:
    """Median host milliseconds from an idle device to an idle device."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        kept = call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - t0))
        del kept
    return statistics.median(times[1:])


def exact_blobs(encoded: Sequence[Encoded]) -> list[Encoded]:
    """Blobs at their exact sizes, on the device."""
    sizes = torch.stack([e.nbytes for e in encoded]).tolist()
    return [Encoded(e.data[:n], torch.tensor(n)) for e, n in zip(encoded, sizes, strict=True)]


def like(parts: Sequence[Part]) -> list[Part]:
    """What a decoder knows of streams."""
    return [Part(torch.empty(p.codes.numel(), dtype=p.codes.dtype, device="meta"), p.alphabet, p.rows) for p in parts]


SPECTRUM = (
    (0.0, 16.19), (0.00052, 12.23), (0.00104, 10.19), (0.00156, 8.675), (0.00208, 7.928), (0.00313, 6.716),
    (0.00417, 5.716), (0.00625, 4.806), (0.00833, 4.205), (0.0125, 3.259), (0.01667, 2.584), (0.025, 1.903),
    (0.03333, 1.531), (0.05625, 1.061), (0.07917, 0.8012), (0.1026, 0.638), (0.12552, 0.5239), (0.14844, 0.4397),
    (0.17188, 0.3733), (0.19479, 0.3219), (0.21771, 0.28), (0.24115, 0.2446), (0.26406, 0.2163), (0.2875, 0.1917),
    (0.31042, 0.1717), (0.33333, 0.154), (0.35677, 0.1385), (0.37969, 0.1253), (0.4026, 0.1137), (0.42604, 0.1032),
    (0.44896, 0.0942), (0.4724, 0.0859), (0.49531, 0.0787), (0.51823, 0.0722), (0.54167, 0.0662), (0.56458, 0.0608),
    (0.5875, 0.0559), (0.61094, 0.0513), (0.63385, 0.0472), (0.65729, 0.0433), (1.0, 0.012),
)  # fmt: skip
"""Share of the components and standard deviation there: the mean of SmolLM2-135M's six blocks of K and V of a head over
15 layers, in units of the metric. The last point continues the curve."""


def spectrum(n: int) -> Tensor:
    """``[n]`` standard deviations, falling: the measured curve, logarithms interpolated."""
    at, sigma = np.array(SPECTRUM).T
    return torch.from_numpy(np.exp(np.interp(np.arange(n) / n, at, np.log(sigma)))).float()


def basis_file(seed: int, rank: int) -> tuple[bytes, dict[tuple[int, int], Tensor]]:
    """A random orthonormal basis per head and block of layers with this spectrum, and what to draw values from."""
    n = BLOCK * 2 * DIM
    sigma = spectrum(n)
    draw = torch.Generator(CUDA).manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    mixing, blocks = {}, []
    for block in range(LAYERS // BLOCK):
        for head in range(HEADS):
            basis = torch.linalg.qr(torch.randn(n, n, generator=draw, device=CUDA))[0]
            i, layers = len(blocks), list(range(block * BLOCK, (block + 1) * BLOCK))
            tensors[f"{i}.basis"] = basis[:, :rank].half().cpu().contiguous()
            tensors[f"{i}.mean"], tensors[f"{i}.scale"] = torch.zeros(n), torch.ones(n)
            tensors[f"{i}.sigma"] = sigma[:rank].clone()
            tensors[f"{i}.tail"] = sigma[rank:].square().sum().reshape(1)
            mixing[block, head] = (basis * sigma.to(CUDA)).T.contiguous()
            blocks.append({"layers": layers, "heads": [head], "rope": [True, False]})
    about = {"version": 1, "plane": "kv", "dim": 2 * DIM, "per": "head", "provenance": {}, "blocks": blocks}
    return save(tensors, {"kvserve.klt": json.dumps(about)}), mixing


def correlated(made: Pipeline, tokens: int, mixing: dict[tuple[int, int], Tensor]) -> Batch:
    """A request whose blocks have the basis' covariance."""
    _, planned = made.header("r", tokens, "p")
    out = []
    for p in planned:
        rows = (
            torch.randn(p.at.num_tokens, BLOCK * 2 * DIM, device=CUDA) @ mixing[p.at.layers[0] // BLOCK, p.at.heads[0]]
        )
        x = rows.view(p.at.num_tokens, BLOCK, 1, 2 * DIM).permute(1, 2, 0, 3)
        parts = made.kv.group(0).plane(p.at.plane).parts
        out.append((p, rope.apply(x, parts, p.at.start).contiguous().bfloat16()))
    return out
