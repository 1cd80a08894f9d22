"""Probes of the nvCOMP codec: speed, exactness, what it waits for, and what damaged blobs do."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from kvserve_core.artefacts import NONE
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Region
from kvserve_core.tensor import Encoded, Part
from kvserve_plugins.codecs.nvcomp import NvcompANS

MiB, CUDA, SLEEP = 2**20, torch.device("cuda"), 100_000_000
SPEC = KVSpec("bench", (LayerGroup(0, tuple(range(32)), (PlaneSpec("k", 8, (PlanePart("k", 128),), DType.BF16),)),))
CELL = Region(0, "k", tuple(range(8)), tuple(range(8)), 0, 256)


def bound(chunk_kib: int = 64) -> NvcompANS:
    """The codec, bound as a chain does it."""
    return NvcompANS(NvcompANS.Config(chunk_bytes=chunk_kib * 1024)).bind(CELL, SPEC, CUDA, NONE)


def codes(segments: int, nbytes: int, alphabet: int) -> list[Part]:
    """Fresh Gaussian codes, clamped to the alphabet: 6 standard deviations span it, as min-max quantizing gives."""
    made = []
    for _ in range(segments):
        x = torch.randn(nbytes, device=CUDA) * (alphabet / 6) + (alphabet - 1) / 2
        made.append(Part(x.round().clamp(0, alphabet - 1).to(torch.uint8), alphabet))
    return made


def cut(encoded: list[Encoded]) -> list[Encoded]:
    """What a receiver has: each blob at its exact size (reads the sizes, so it synchronises)."""
    sizes = torch.stack([e.nbytes for e in encoded]).tolist()
    return [Encoded(e.data[:n].clone(), torch.tensor(n)) for e, n in zip(encoded, sizes, strict=True)]


def equal(codec: NvcompANS, decoded: list[Tensor], parts: list[Part]) -> bool:
    """Whether every code came back and every blob was reported good."""
    return bool(codec.ok.bool().all()) and all(torch.equal(d, p.codes) for d, p in zip(decoded, parts, strict=True))


def entropy(parts: list[Part]) -> float:
    """Order-0 entropy in bits a code over the batch: what an ideal coder with one table would spend."""
    count = sum(torch.bincount(p.codes.long(), minlength=256) for p in parts).double()
    share = count[count > 0] / count.sum()
    return float(-(share * share.log2()).sum())


def device_ms(call: Callable[[int], object], repeats: int = 15) -> tuple[float, float]:
    """Median device milliseconds and host milliseconds of one call, after three warm-up calls."""
    device, host = [], []
    for i in range(repeats + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        t0 = time.perf_counter()
        call(i)
        host.append(1e3 * (time.perf_counter() - t0))
        stop.record()
        torch.cuda.synchronize()
        device.append(start.elapsed_time(stop))
    return statistics.median(device[3:]), statistics.median(host[3:])


def queued_ms(call: Callable[[], object], repeats: int = 9) -> float:
    """Median device milliseconds of ``call`` when the queue hides the host's share: a sleep runs before it."""
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP // 5)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def case(segments: int, kib: int, chunk_kib: int, alphabet: int) -> dict[str, object]:
    """Speed, ratio and exactness of one size. Input sets rotate where one would fit in the cache."""
    codec = bound(chunk_kib)
    sets = [codes(segments, kib * 1024, alphabet) for _ in range(8 if segments * kib <= 65536 else 2)]
    blobs = [cut(codec.encode(parts)) for parts in sets]
    exact = all(equal(codec, codec.decode(b, p), p) for b, p in zip(blobs, sets, strict=True))
    encode, host = device_ms(lambda i: codec.encode(sets[i % len(sets)]))
    decode, decode_host = device_ms(lambda i: codec.decode(blobs[i % len(sets)], sets[i % len(sets)]))
    total = segments * kib * 1024
    coded = sum(b.data.numel() for b in blobs[0])
    busy = [queued_ms(lambda: codec.encode(sets[0])), queued_ms(lambda: codec.decode(blobs[0], sets[0]))]
    return {
        "segments": segments,
        "kib_each": kib,
        "chunk_kib": chunk_kib,
        "alphabet": alphabet,
        "exact": exact,
        "encode_gbs": round(total / encode / 1e6, 1),
        "decode_gbs": round(total / decode / 1e6, 1),
        "encode_queued_gbs": round(total / busy[0] / 1e6, 1),
        "decode_queued_gbs": round(total / busy[1] / 1e6, 1),
        "encode_ms": round(encode, 4),
        "decode_ms": round(decode, 4),
        "encode_host_ms": round(host, 4),
        "decode_host_ms": round(decode_host, 4),
        "ratio": round(total / coded, 4),
        "entropy_ratio": round(8 / entropy(sets[0]), 4),
        "capacity_over_codes": round(sum(codec.bound(p) for p in sets[0]) / total, 3),
    }


def behind_sleep(call: Callable[[], object]) -> dict[str, object]:
    """Call with a sleeping kernel ahead on the stream: a host synchronisation would have to wait for it."""
    call()
    torch.cuda.synchronize()
    slept = torch.cuda.Event()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(SLEEP)
    slept.record()
    stop.record()
    torch.cuda.set_sync_debug_mode("error")
    t0 = time.perf_counter()
    try:
        kept = call()  # dropping a result may free memory, which waits: not what is measured
        took, asleep = 1e3 * (time.perf_counter() - t0), not slept.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    del kept
    return {"host_ms": round(took, 3), "sleep_ms": round(start.elapsed_time(stop), 1), "returned_asleep": asleep}


def cuda_calls(call: Callable[[], object]) -> dict[str, dict[str, float]]:
    """What one call asks of CUDA, nvCOMP's share included: API calls by count, kernels by device microseconds."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with record_function("measured"):
            call()
        torch.cuda.synchronize()
    events = trace.events()
    end = next(e for e in events if e.name == "measured").time_range.end
    names = [e.name for e in events if e.name.startswith("cu") and e.time_range.start < end]
    on_device = [e for e in events if e.device_type == DeviceType.CUDA and e.name != "measured"]
    kernels = {e.name[:80]: round(e.time_range.elapsed_us(), 1) for e in on_device}
    return {"api": {n: names.count(n) for n in sorted(set(names))}, "kernels_us": kernels}


def varied() -> list[Part]:
    """Parts that try edges: alphabets 2 to 256, odd lengths, one code, none, one symbol only, i16."""
    sizes = [(2, 300_001), (3, 65_536), (7, 1 << 20), (16, 70_000), (200, 131_072), (256, 5_000_000), (16, 1), (16, 0)]
    parts = [Part(torch.randint(0, a, (n,), device=CUDA, dtype=torch.uint8), a) for a, n in sizes]
    parts.append(Part(torch.zeros(200_000, dtype=torch.uint8, device=CUDA), 16))
    parts.append(Part(torch.randint(0, 400, (90_000,), device=CUDA, dtype=torch.int16), 400))
    return parts


def two_launches(codec: NvcompANS) -> bool:
    """Whether the results of a launch stay intact while the next one runs, edges included."""
    first, second = varied(), codes(64, 512 * 1024, 12)
    launched = [codec.encode(first), codec.encode(second)]
    fits = all(e.data.numel() >= n for e, n in zip(launched[0], [codec.bound(p) for p in first], strict=True))
    return fits and all(
        equal(codec, codec.decode(cut(e), p), p) for e, p in zip(launched, (first, second), strict=True)
    )


def finish_ms(codec: NvcompANS, parts: list[Part]) -> dict[str, float]:
    """After the fence: sizes one by one against all at once, and blobs to pageable against pinned host memory."""
    encoded = codec.encode(parts)
    torch.cuda.synchronize()
    marks = [time.perf_counter()]
    sizes = [int(e.nbytes) for e in encoded]
    marks.append(time.perf_counter())
    sizes = torch.stack([e.nbytes for e in encoded]).tolist()
    marks.append(time.perf_counter())
    _ = [e.data[:n].cpu() for e, n in zip(encoded, sizes, strict=True)]
    marks.append(time.perf_counter())
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
    for piece, e, n in zip(host.split(sizes), encoded, sizes, strict=True):
        piece.copy_(e.data[:n], non_blocking=True)
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
    names = ("sizes_one_by_one", "sizes_stacked", "blobs_pageable", "pinning", "blobs_pinned")
    return {n: round(1e3 * (b - a), 3) for n, a, b in zip(names, marks, marks[1:], strict=False)}


def damage(mode: str, blob: Tensor) -> tuple[Tensor, int]:
    """A damaged copy of a blob, and the place: its table of chunk sizes, its length, or a chunk's own bytes."""
    data, table = blob.clone(), 16  # 200,000 bytes make four chunks, so the table is 16 bytes
    if mode == "truncated":
        at = int(torch.randint(table, data.numel(), (1,)))
        return data[:at].clone(), at
    first = int(data[:4].view(torch.int32))
    at = int(torch.randint(0, table, (1,)) if mode == "table" else table + torch.randint(0, first, (1,)))
    data[at] ^= int(torch.randint(1, 256, (1,)))
    return data, at


def hostile(mode: str, seed: int, tries: int = 200) -> None:
    """In a process of its own: decode damaged blobs beside good ones. Prints each place, then a JSON line."""
    torch.manual_seed(seed)
    codec, parts = bound(), codes(8, 200_000, 16)
    good = cut(codec.encode(parts))
    count = {"tried": tries, "flagged": 0, "wrong_but_not_flagged": 0}
    for i in range(tries):
        j = i % 8
        data, at = damage(mode, good[j].data)
        print(at, flush=True)
        decoded = codec.decode([*good[:j], Encoded(data, good[j].nbytes), *good[j + 1 :]], parts)
        same = [torch.equal(d, p.codes) for d, p in zip(decoded, parts, strict=True)]
        ok = codec.ok.bool().tolist()
        if not all(same[:j] + same[j + 1 :] + ok[:j] + ok[j + 1 :]):
            sys.exit("damage in one blob touched another")
        count["flagged"] += not ok[j]
        count["wrong_but_not_flagged"] += ok[j] and not same[j]
    print(json.dumps(count))


def damaged(mode: str, seed: int) -> dict[str, object]:
    """Run :func:`hostile` in a child: what nvCOMP makes of such bytes may cost the process its GPU."""
    child = [sys.executable, sys.argv[0], "--hostile", mode, "--seed", str(seed)]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode == 0:
        return json.loads(lines[-1])
    error = [line for line in done.stderr.splitlines() if "rror" in line or "touched" in line]
    return {"crashed_at_try": len(lines), "damaged_byte": lines[-1:], "error": error[:1]}


def python_api(parts: list[Part], chunk_kib: int) -> dict[str, object]:
    """The same batch through nvCOMP's own Python API: what it gives and where it waits."""
    from nvidia import nvcomp

    total, n = sum(p.nbytes for p in parts), len(parts)
    stream = torch.cuda.current_stream().cuda_stream
    api = nvcomp.Codec(algorithm="ANS", data_type="|u1", uncomp_chunk_size=chunk_kib * 1024, cuda_stream=stream)
    source = nvcomp.as_arrays([p.codes for p in parts])
    config = api.compression_config([p.nbytes for p in parts])
    cap = 2 * parts[0].nbytes + MiB
    room = nvcomp.as_arrays(
        torch.empty(n * cap, dtype=torch.uint8, device=CUDA), [i * cap for i in range(n)], [cap] * n
    )
    encoded = api.encode(source, out=room, compression_config=config)
    sizes = list(encoded.buffer_sizes)
    back = nvcomp.as_arrays([torch.empty_like(p.codes) for p in parts])
    plan = api.decompression_config(config)
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: api.encode(source, out=room, compression_config=config),
        "encode_allocating": lambda: api.encode(source),
        "encode_then_sizes": lambda: api.encode(source, out=room, compression_config=config).buffer_sizes,
        "decode": lambda: api.decode(encoded, out=back, decompression_config=plan),
        "decode_without_config": lambda: api.decode(encoded, out=back),
    }
    result: dict[str, object] = {"ratio": round(total / sum(sizes), 4)}
    for name, call in calls.items():
        device, host = device_ms(lambda _, call=call: call(), 7)
        result[name] = {"gbs": round(total / device / 1e6, 1), "host_ms": round(host, 3), **behind_sleep(call)}
    return result


def guarded(call: Callable[[], object]) -> object:
    """The call's result, or its error as text: side figures must not lose the main ones."""
    try:
        return call()
    except (RuntimeError, ValueError, TypeError, AttributeError, StopIteration) as error:
        return f"{type(error).__name__}: {error}"
