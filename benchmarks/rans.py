"""``rans`` on codes like those of a KLT: size against its bounds and zstd, speed against deflate and against itself.

Codes: sigmas in a geometric spectrum, 400 to 1900 rows of a 256-token cell, values drawn from a mixture of Gaussian and
Laplace, steps such that bf16 shrinks about 20 times. Size ratios are exact and repeat. Speed ratios are medians of
paired CPU times in one process: one call for 8 segments against 8 calls, and encoding against ``zlib`` level 6.
``python benchmarks/rans.py [--json]``
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvserve_core.tensor import Part
from kvserve_plugins.codecs.rans import Rans
from kvserve_plugins.codecs.zstd import Zstd
from kvserve_plugins.kernels.rans_set import PUBLISHED

TOKENS = 256
ROUNDS = 5
SHAPES = {"400 rows": (400, 5.0, 0.2), "800 rows": (800, 4.0, 0.12), "1900 rows": (1900, 5.0, 0.1)}
OVERHEAD, SAVED, BATCHING, ENCODING = 1.015, 1.08, 1.5, 1.0


def codes(rows: int, top: float, bottom: float, tokens_differ: bool, seed: int) -> NDArray[np.int64]:
    """``[rows, TOKENS]``. tokens_differ: some tokens are louder than others in all components, as in real caches."""
    draw = np.random.default_rng(seed)
    shape = (rows, TOKENS)
    x = np.where(draw.random(shape) < 0.5, draw.normal(size=shape), draw.laplace(0, 0.5**0.5, shape))
    loud = np.exp(0.25 * draw.normal(size=TOKENS)) if tokens_differ else 1.0
    return np.clip(np.rint(x * np.geomspace(top, bottom, rows)[:, None] * loud), -127, 127).astype(np.int64)


def part(q: NDArray[np.int64]) -> Part:
    return Part(torch.from_numpy((q + 127).astype(np.uint8)).reshape(-1), 255, len(q))


def ideal(q: NDArray[np.int64]) -> float:
    """Bytes of the cross-entropy under the best of the 64 tables for each row, naming it at no cost."""
    symbols = np.where(np.abs(q)[..., None] > PUBLISHED.radius[:63], 31, q[..., None] + 15)
    return float(PUBLISHED.bits[np.arange(63), symbols].sum(1).min(1)[q.any(1)].sum()) / 8


def cpu_seconds(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def paired(numerator: Callable[[], Any], denominator: Callable[[], Any]) -> float:
    """The median over ``ROUNDS`` of how many times as long the first takes."""
    numerator(), denominator()
    return statistics.median(cpu_seconds(numerator) / cpu_seconds(denominator) for _ in range(ROUNDS))


def sizes(codec: Rans) -> dict[str, dict[str, float]]:
    found = {}
    for name, (rows, top, bottom) in SHAPES.items():
        for differ in (False, True):
            q = codes(rows, top, bottom, differ, seed=rows)
            made = int(codec.encode([part(q)])[0].nbytes)
            zstd = int(Zstd(Zstd.Config()).encode([part(q)])[0].nbytes)
            label = f"{name}, {'loud and quiet tokens' if differ else 'tokens alike'}"
            found[label] = {"over_cross_entropy": made / ideal(q), "zstd_over_rans": zstd / made}
    return found


def speeds(codec: Rans) -> dict[str, float]:
    parts = [part(codes(*SHAPES["800 rows"], tokens_differ=True, seed=i)) for i in range(8)]
    blobs = codec.encode(parts)

    def singly(call: Callable[[int], Any]) -> Callable[[], Any]:
        return lambda: [call(i) for i in range(len(parts))]

    def deflate(given: Sequence[Part]) -> list[bytes]:
        return [zlib.compress(p.codes.numpy().tobytes(), 6) for p in given]

    return {
        "decode_8_at_once": paired(
            singly(lambda i: codec.decode([blobs[i]], [parts[i]])), lambda: codec.decode(blobs, parts)
        ),
        "encode_8_at_once": paired(singly(lambda i: codec.encode([parts[i]])), lambda: codec.encode(parts)),
        "encode_over_deflate": paired(lambda: deflate(parts), lambda: codec.encode(parts)),
    }


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    codec = Rans(Rans.Config())
    size, speed = sizes(codec), speeds(codec)
    worst = max(row["over_cross_entropy"] for row in size.values())
    saved = min(row["zstd_over_rans"] for row in size.values())
    bars = [
        {"name": "rans_size_over_cross_entropy", "value": round(worst, 4), "bar": OVERHEAD, "ok": worst <= OVERHEAD},
        {"name": "zstd_size_over_rans", "value": round(saved, 3), "bar": SAVED, "ok": saved >= SAVED},
        *(
            {"name": f"rans_{name}", "value": round(speed[name], 2), "bar": bar, "ok": speed[name] >= bar}
            for name, bar in (("decode_8_at_once", BATCHING), ("encode_over_deflate", ENCODING))
        ),
    ]
    return {
        "ok": all(bar["ok"] for bar in bars),
        "bars": bars,
        "sizes": {name: {k: round(v, 4) for k, v in row.items()} for name, row in size.items()},
        "speeds": {name: round(value, 2) for name, value in speed.items()},
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("numpy", "torch", "zstandard")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    result = measure()
    if parser.parse_args().json:
        print(json.dumps(result))
    else:
        for name, row in result["sizes"].items():
            print(f"{name:36} {row['over_cross_entropy']:.4f} of the cross-entropy, zstd {row['zstd_over_rans']:.3f}")
        for bar in result["bars"]:
            print(f"{bar['name']:36} {bar['value']:8} bar {bar['bar']} {'ok' if bar['ok'] else 'MISSED'}")
    sys.exit(not result["ok"])


if __name__ == "__main__":
    main()
