"""Encode and decode speed of a pipeline on this device, as fixed cost + slope per original byte."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.decoder import Decoder
from kvserve_core.latency import Speed
from kvserve_core.overlap import Form
from kvserve_core.pipeline import Pipeline
from kvserve_core.session.events import gather_region
from kvserve_core.spec import Region
from kvserve_core.wire import Codebook

LENGTHS = (64, 256, 768)
REPEATS = 5
Clock = Callable[[], float]
"""Seconds since some moment."""


@dataclass(frozen=True)
class Timing:
    """Seconds to encode and to decode one request of ``raw_bytes`` original bytes."""

    raw_bytes: int
    encode_s: float
    decode_s: float


def measure_speed(
    pipeline: Pipeline,
    read: Callable[[Region], Tensor],
    artefacts: Artefacts = NONE,
    lengths: Sequence[int] = LENGTHS,
    repeats: int = REPEATS,
    clock: Clock = time.perf_counter,
) -> tuple[Speed, Speed]:
    """``(encode, decode)``: medians over ``repeats`` at each length, and a line through them.

    Encode counts gathering and sealing, decode counts verifying, as a producer and a consumer do.
    """
    return fitted(timings(pipeline, read, artefacts, lengths, repeats, clock))


def timings(
    pipeline: Pipeline,
    read: Callable[[Region], Tensor],
    artefacts: Artefacts = NONE,
    lengths: Sequence[int] = LENGTHS,
    repeats: int = REPEATS,
    clock: Clock = time.perf_counter,
) -> list[Timing]:
    """``repeats`` of each length, after one that warms up.

    clock: ``time.process_time`` leaves out what other processes take; only for one thread that waits for nothing.
    """
    found = []
    for total in lengths:
        header, _ = pipeline.header("speed", total, "measured")
        decoder = Decoder(header, pipeline.kv, artefacts=artefacts)
        found += [_once(pipeline, read, total, decoder, clock) for _ in range(repeats + 1)][1:]
    return found


def fitted(measured: Iterable[Timing]) -> tuple[Speed, Speed]:
    """``(encode, decode)``: a line through the medians of equal sizes."""
    by_size: dict[int, list[Timing]] = {}
    for timing in measured:
        by_size.setdefault(timing.raw_bytes, []).append(timing)
    encode = [statistics.median(t.encode_s for t in same) for same in by_size.values()]
    decode = [statistics.median(t.decode_s for t in same) for same in by_size.values()]
    return fit(list(by_size), encode), fit(list(by_size), decode)


def _once(pipeline: Pipeline, read: Callable[[Region], Tensor], total: int, decoder: Decoder, clock: Clock) -> Timing:
    header, planned = pipeline.header("speed", total, "measured")
    book = Codebook(header)
    began = clock()
    data = [(p, gather_region(lambda _, at: read(at), "", p.at)) for p in planned]
    sealed = [book.seal(segment) for segment in pipeline.encode(data)]
    encoded = clock()
    decoder.decode([book.unseal(s) for s in sealed])
    return Timing(header.raw_bytes, encoded - began, clock() - encoded)


def together(raw_bytes: int, total_s: float, encode_s: float, form: Form) -> Timing:
    """Of a request that went through two sessions over no link to speak of: what decoding took by ``form``.

    encode_s: until the last segment was encoded. Sides that share a GPU or a host's cores hold each other up, which
    pipelines measured one after another do not show.
    """
    chunks = form.chunks(raw_bytes)
    if chunks == 1:
        return Timing(raw_bytes, encode_s, max(total_s - encode_s, 0.0))
    slowest = total_s - encode_s / chunks  # if that is decoding
    return Timing(raw_bytes, encode_s, slowest if slowest >= encode_s else chunks * max(total_s - encode_s, 0.0))


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Speed:
    """Least squares of ``fixed + slope * size``; of a line through 0 where that gives a part below 0.

    Errors count by the time they are of: in seconds, small requests would be what large ones leave over.
    A time that falls with the size is noise, and a slope of 0 would promise any number of bytes in that time.
    """
    least = max(max(seconds) * 1e-3, 1e-12)  # a clock may have seen nothing
    slope, fixed = np.polyfit(sizes, seconds, 1, w=1 / np.maximum(seconds, least))
    if fixed < 0 or slope <= 0:
        return Speed(0.0, float(np.dot(sizes, seconds) / np.dot(sizes, sizes)))
    return Speed(float(fixed), float(slope))
