"""Sessions beside an engine on one NVIDIA GPU: fences, batches in flight, digests, what decoding costs an engine.

Run: ``python benchmarks/gpu_streams.py --out benchmarks/results/gpu_streams.json``. Needs what ``gpu.py`` needs.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from gpu import ANS, HEAD, LARGE, LOSSLESS
from gpu_cases import CUDA, DIM, HEADS, LAYERS, STAGED, device_gbs, host_ms, mixhq, pipeline, split, uniform
from gpu_interference import BUDGETS, interference
from nvcomp_codec import nvcomp_version
from torch import Tensor

from kvserve_core.bodies import PIECE, host_bytes
from kvserve_core.bodies import piece_hashes as host_hashes
from kvserve_core.pipeline import Pipeline
from kvserve_core.policy import Decision, Outcome, ServiceContext
from kvserve_core.session import Freed, Producer
from kvserve_core.spec import Region
from kvserve_core.wire import Codebook
from kvserve_plugins.kernels.digest import piece_hashes
from kvserve_plugins.transports.memory import Memory

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from paged_engine import Adversary, until

CLASSES = {"transforms": HEAD, "quantizer": mixhq(8, 4), "codec": ANS}
PACKED = {"transforms": HEAD, "quantizer": uniform(16), "codec": "bitpack"}
EXACT = {"quantizer": "identity", "codec": LOSSLESS}


def adversarial(runs: int) -> dict[str, Any]:
    """Transfers that arrived wrong although blocks were overwritten only when they might be; and if they are before."""
    out: dict[str, Any] = {"runs": runs}
    for name, chain in (("packed", PACKED), ("lossless", EXACT)):
        out |= _overwritten(name, chain, 0, runs)
    return out


def with_budget(runs: int) -> dict[str, Any]:
    """The same on 16 multiprocessors."""
    return {"runs": runs, **_overwritten("packed", PACKED, 16, runs)}


def _overwritten(name: str, chain: dict[str, Any], sms: int, runs: int) -> dict[str, Any]:
    made, t0 = Adversary(chain, 2048, 4 * 2**20, sms), time.perf_counter()
    wrong = sum(not made.run(f"r{i}") for i in range(runs))
    seconds = round(time.perf_counter() - t0, 1)
    early = sum(not made.run(f"e{i}", early=True) for i in range(20))
    made.close()
    return {f"{name}: wrong": wrong, f"{name}: seconds": seconds, f"{name}: wrong of 20 overwritten too early": early}


class OnDevice(Memory):
    """As ``memory``, for bodies that stay on the GPU."""

    staging = "device"

    def piece_hashes(self, bodies: Sequence[Tensor]) -> list[bytes]:
        """On the GPU."""
        return piece_hashes(bodies)


class Staged:
    """How many bytes that were read from the cache are there at a time."""

    def __init__(self) -> None:
        self.now, self.most = 0, 0

    def held(self, x: Tensor) -> Tensor:
        """Count ``x`` until it is gone."""
        size = x.numel() * x.element_size()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(x, self._gone, size)
        return x

    def _gone(self, size: int) -> None:
        self.now -= size


def streaming(tokens: int) -> dict[str, Any]:
    """From ``ready`` until segments are available, against one batch after the other on one stream."""
    made = pipeline(CLASSES, **LARGE)
    cache = {p: torch.randn(28, 4, tokens, 128, device=CUDA, dtype=torch.bfloat16) for p in ("k", "v")}
    out: dict[str, Any] = {"original_bytes": 2 * cache["k"].numel() * 2, "batch_bytes": STAGED}
    for name, kind in (("host", Memory), ("device", OnDevice)):
        out[name] = _produced(made, cache, tokens, kind)
    return out


def _produced(made: Pipeline, cache: dict[str, Tensor], tokens: int, kind: type[Memory]) -> dict[str, Any]:
    staged = Staged()

    def gather(_: str, at: Region) -> Tensor:
        return staged.held(cache[at.plane][at.layers[0] : at.layers[-1] + 1, :, at.start : at.stop].contiguous())

    nbytes, found, transport = 2 * cache["k"].numel() * 2, [], kind(kind.Config())
    producer = Producer({"p": made}, transport, gather, batch_bytes=STAGED)
    first = []
    for i in range(5):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        endpoint = producer.open(str(i), tokens, Decision("p", "", ServiceContext(nbytes=0), 1e9))
        source = producer._sources[str(i)]
        t0 = time.perf_counter()
        producer.ready(str(i), range(tokens))
        source.get(0, time.monotonic() + 60)
        first.append(time.perf_counter() - t0)
        until(producer.poll, Freed, pause=5e-4)  # a busy loop would take the interpreter from the encode thread
        found.append(time.perf_counter() - t0)
        peak = torch.cuda.max_memory_allocated() - before
        transport.release(endpoint.address, str(i), (0, 1), None)
        until(producer.poll, Outcome)
    producer.close()
    header, planned = made.header("r", tokens, "p")
    batches, codebook = split(planned, STAGED, lambda p: made.kv.nbytes(p.at)), Codebook(header)

    def one_by_one() -> None:
        for batch in batches:
            for segment in made.encode([(p, gather("", p.at)) for p in batch]):
                codebook.seal(segment)

    plain = None if kind is OnDevice else host_ms(one_by_one, 3)
    return {
        "first_ms": round(1e3 * statistics.median(first), 2), "all_ms": round(1e3 * statistics.median(found), 2),
        "gbs": round(nbytes / statistics.median(found) / 1e9, 1), "one_after_the_other_ms": plain, "peak_bytes": peak,
        "staged_bytes": staged.most,
    }  # fmt: skip


def digests() -> dict[str, Any]:
    """GB/s of bytes digested on the GPU, by itself and with the host's share, and on the host."""
    bodies = [torch.randint(0, 256, (32 * 2**20,), dtype=torch.uint8, device=CUDA) for _ in range(8)]
    data = bodies[0].cpu().numpy().tobytes()
    odd = [torch.randint(0, 256, (n,), dtype=torch.uint8, device=CUDA) for n in (64, 192, 256, PIECE + 64, 5 * PIECE)]
    t0 = time.perf_counter()
    on_host = host_hashes(data)
    host_s = time.perf_counter() - t0
    one = host_ms(lambda: piece_hashes(bodies[:1]))
    return {
        "equal": piece_hashes(bodies)[0] == on_host and all(_same(x) for x in odd),
        "device_gbs": device_gbs(8 * len(data), lambda: _hashes_queued(bodies)),
        "32 MiB, wall_ms": round(one, 3), "256 MiB, wall_ms": round(host_ms(lambda: piece_hashes(bodies)), 3),
        "32 MiB on the host, ms": round(1e3 * host_s, 3), "times faster": round(1e3 * host_s / one, 1),
    }  # fmt: skip


def _hashes_queued(bodies: Sequence[Tensor]) -> Tensor:
    from kvserve_plugins.kernels.digest import _pieces, _queued

    return _queued(_pieces(bodies)[0], CUDA)


def _same(x: Tensor) -> bool:
    return piece_hashes([x])[0] == host_hashes(host_bytes(x))


def bars(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What must hold, for what was measured."""
    rows: list[tuple[str, float, float, bool]] = []
    for case in ("adversarial", "with_budget"):
        for key, value in found.get(case, {}).items():
            if key.endswith(": wrong"):
                rows.append((f"{case}, {key}", value, 0, value <= 0))
            elif key.endswith("too early"):
                rows.append((f"{case}, {key} (the control)", value, 1, value >= 1))
    for where in ("host", "device"):
        if (most := found.get("streaming", {}).get(where, {}).get("staged_bytes")) is not None:
            name = f"streaming to the {where}: bytes of the cache staged at a time, two batches"
            rows.append((name, most, 2 * STAGED, most <= 2 * STAGED))
    if "equal" in found.get("digests", {}):
        equal = found["digests"]["equal"]
        rows.append(("digests equal to the host's", int(equal), 1, bool(equal)))
    slower = [v["slower"] for v in found.get("budgets", {}).values() if isinstance(v, dict) and "slower" in v]
    if slower:
        rows.append(
            ("a decode step beside decompression with a budget, times alone", min(slower), 1.1, min(slower) <= 1.1)
        )
    return [{"name": n, "value": v, "bar": b, "ok": ok} for n, v, b, ok in rows]


def written(found: dict[str, Any], out: Path | None) -> bool:
    """Write what there is so far; whether all of it holds."""
    lines = bars(found)
    ok = bool(lines) and all(b["ok"] for b in lines) and not any("failed" in v for v in found.values())
    result = {
        "ok": ok, "bars": lines, "found": found,
        "geometry": {"layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM},
        "machine": {"gpu": torch.cuda.get_device_name(), "cpu": platform.machine()},
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version(),
                     "nvcomp": nvcomp_version()},
    }  # fmt: skip
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    return ok


def main() -> None:
    """Command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path)
    options.add_argument("--tokens", type=int, default=32768)
    options.add_argument("--runs", type=int, default=200)
    options.add_argument("--case-seconds", type=int, default=150, help="a case that takes longer ends the program")
    args = options.parse_args()
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "digests": digests, "streaming": partial(streaming, args.tokens),
        "interference": partial(interference, CLASSES, 8192, 200, (0,)),
        "adversarial": partial(adversarial, args.runs),
        "budgets": partial(interference, CLASSES, 8192, 200, BUDGETS), "with_budget": partial(with_budget, args.runs),
    }  # fmt: skip
    found: dict[str, Any] = {}
    ok = False
    for name, case in cases.items():
        t0 = time.perf_counter()
        faulthandler.dump_traceback_later(args.case_seconds, exit=True)
        try:
            found[name] = case()
        except Exception as error:  # noqa: BLE001  # a case that fails must not lose the others' figures
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:400]}
        faulthandler.cancel_dump_traceback_later()
        torch.cuda.empty_cache()
        print(name, round(time.perf_counter() - t0, 1), "s", json.dumps(found[name]), flush=True)
        ok = written(found, args.out)
    for line in bars(found):
        print("ok  " if line["ok"] else "MISS", line["name"], line["value"], "bar", line["bar"])
    sys.exit(not ok)


if __name__ == "__main__":
    main()
