"""Encode and decode speed of a pipeline on this device, as fixed cost + slope per original byte."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.decoder import Decoder
from kvserve_core.latency import Speed
from kvserve_core.pipeline import Pipeline
from kvserve_core.session.events import gather_region
from kvserve_core.spec import Region
from kvserve_core.wire import Codebook

LENGTHS = (64, 256, 768)
REPEATS = 5


def measure_speed(
    pipeline: Pipeline,
    read: Callable[[Region], Tensor],
    artefacts: Artefacts = NONE,
    lengths: Sequence[int] = LENGTHS,
    repeats: int = REPEATS,
) -> tuple[Speed, Speed]:
    """``(encode, decode)``: medians over ``repeats`` at each length, and a line through them.

    Encode counts gathering and sealing, decode counts verifying, as a producer and a consumer do.
    """
    sizes: list[float] = []
    encode: list[float] = []
    decode: list[float] = []
    for total in lengths:
        header, _ = pipeline.header("speed", total, "measured")
        decoder = Decoder(header, pipeline.kv, artefacts=artefacts)
        times = [_once(pipeline, read, total, decoder) for _ in range(repeats + 1)][1:]
        sizes.append(float(header.raw_bytes))
        encode.append(statistics.median(t[0] for t in times))
        decode.append(statistics.median(t[1] for t in times))
    return fit(sizes, encode), fit(sizes, decode)


def _once(pipeline: Pipeline, read: Callable[[Region], Tensor], total: int, decoder: Decoder) -> tuple[float, float]:
    header, planned = pipeline.header("speed", total, "measured")
    book = Codebook(header)
    began = time.perf_counter()
    data = [(p, gather_region(lambda _, at: read(at), "", p.at)) for p in planned]
    sealed = [book.seal(segment) for segment in pipeline.encode(data)]
    encoded = time.perf_counter()
    decoder.decode([book.unseal(s) for s in sealed])
    return encoded - began, time.perf_counter() - encoded


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Speed:
    """Least squares of ``fixed + slope * size``, neither below 0."""
    slope, fixed = np.polyfit(sizes, seconds, 1)
    if fixed < 0:
        return Speed(0.0, float(np.dot(sizes, seconds) / np.dot(sizes, sizes)))
    return Speed(float(fixed), max(0.0, float(slope)))
