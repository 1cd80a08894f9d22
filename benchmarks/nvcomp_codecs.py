"""All seven nvCOMP codecs on one GPU: exact on edges, two launches in flight, no wait in encode; ratio and speed.

Run: ``python benchmarks/nvcomp_codecs.py --out benchmarks/results/nvcomp_codecs.json``. Needs an NVIDIA GPU, triton and
nvidia-nvcomp-cu13. GB/s count u8 codes (half of a bf16 cache), medians of device events behind a busy queue.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from nvcomp_probes import CELL, CUDA, SPEC, MiB, behind_sleep, codes, cut, entropy, equal, guarded, queued_ms, varied

from kvserve_core.artefacts import NONE
from kvserve_core.component import ComponentSpec
from kvserve_core.errors import FrameError
from kvserve_core.spec import DType
from kvserve_core.stages import Quantizer
from kvserve_core.tensor import Encoded, Part
from kvserve_plugins.codecs import nvcomp
from kvserve_plugins.codecs.nvcomp import NvcompCodec
from kvserve_plugins.quantizers.cachegen import CacheGen
from kvserve_plugins.quantizers.fp8 import FP8
from kvserve_plugins.quantizers.kivi import Kivi
from kvserve_plugins.quantizers.mixhq import MixHQ
from kvserve_plugins.quantizers.turboquant import TurboQuant

CODECS = {cls.algorithm: cls for cls in NvcompCodec.__subclasses__()}
WAITS = ("bitcomp", "decode")
"""The one call that waits: nvCOMP reads the blobs on the host to make its handle, as its header says."""
QUANTIZERS: dict[str, Callable[[], Quantizer]] = {
    "kivi": lambda: Kivi(Kivi.Config()),
    "fp8": lambda: FP8(FP8.Config()),
    "turboquant": lambda: TurboQuant(TurboQuant.Config()),
    "cachegen": lambda: CacheGen(CacheGen.Config()),
    "mixhq by token": lambda: MixHQ(MixHQ.Config(granularity="token", low=ComponentSpec(name="fp8"))),
}


def bound(algorithm: str) -> NvcompCodec:
    """A codec as a chain binds it."""
    cls = CODECS[algorithm]
    return cls(cls.Config()).bind(CELL, SPEC, CUDA, NONE)


def exact(codec: NvcompCodec) -> bool:
    """Edges, then two launches in flight, both decoded to the same codes within their bounds."""
    first, second = varied(), codes(16, 300_000, 12)
    launched = [codec.encode(first), codec.encode(second)]
    fits = all(e.data.numel() >= codec.bound(p) for e, p in zip(launched[0], first, strict=True))
    decoded = [(p, codec.decode(cut(e), p)) for e, p in zip(launched, (first, second), strict=True)]
    return fits and all(torch.equal(d, p.codes) for parts, out in decoded for d, p in zip(out, parts, strict=True))


def misaligned(codec: NvcompCodec) -> bool:
    """Codes and blobs at odd addresses."""
    room = codes(1, 100_001, 16)[0].codes
    part = Part(room[1:], 16)
    (e,) = cut(codec.encode([part]))
    odd = torch.empty(e.data.numel() + 1, dtype=torch.uint8, device=CUDA)
    odd[1:] = e.data
    return torch.equal(codec.decode([Encoded(odd[1:], e.nbytes)], [part])[0], part.codes)


def short(codec: NvcompCodec) -> bool:
    """A blob shorter than its table of chunk sizes is refused by the host."""
    part = codes(1, 100_000, 16)[0]
    try:
        codec.decode([Encoded(torch.zeros(4, dtype=torch.uint8, device=CUDA), torch.tensor(4))], [part])
    except FrameError:
        return True
    return False


def measured(algorithm: str) -> dict[str, object]:
    """Everything of one codec."""
    codec = bound(algorithm)
    parts = codes(32, MiB, 16)
    blobs = cut(codec.encode(parts))
    same = equal(codec, codec.decode(blobs, parts), parts)
    total = sum(p.nbytes for p in parts)
    return {
        "exact": same and exact(codec) and misaligned(codec) and short(codec),
        "ratio": round(total / sum(b.data.numel() for b in blobs), 3),
        "entropy_ratio": round(8 / entropy(parts), 3),
        "encode_gbs": round(total / queued_ms(lambda: codec.encode(parts), 5) / 1e6, 1),
        "decode_gbs": round(total / queued_ms(lambda: codec.decode(blobs, parts), 5) / 1e6, 1),
        "encode_waits": behind_sleep(lambda: codec.encode(parts)),
        "decode_waits": behind_sleep(lambda: codec.decode(blobs, parts)),
    }


def same_on_both_devices(name: str) -> bool:
    """A quantizer decodes what a GPU encoded to the same bits on the CPU, within f32 rounding of 2 ulp for sums."""
    x = torch.randn(8, 8, 256, 128, device=CUDA).bfloat16()
    stage = QUANTIZERS[name]()
    q = stage.bind(CELL, SPEC, CUDA, NONE).encode(x, CELL)
    here = stage.bind(CELL, SPEC, CUDA, NONE).decode(q, CELL)
    parts = tuple(Part(p.codes.cpu(), p.alphabet, p.rows, p.table) for p in q.parts)
    moved = type(q)(parts, {n: v.cpu() for n, v in q.params.items()}, q.shape)
    there = stage.bind(CELL, SPEC, torch.device("cpu"), NONE).decode(moved, CELL)
    return torch.allclose(here.cpu(), there, rtol=1e-5, atol=1e-6)


def bar(name: str, value: object, limit: object = True) -> dict[str, object]:
    """One acceptance line of the result."""
    return {"name": name, "value": value, "bar": limit, "ok": value == limit}


def judge(found: dict[str, object], quantizers: dict[str, object]) -> list[dict[str, object]]:
    """The acceptance lines for what was measured; an error stands in place of a value."""
    bars = []
    for name, seen in found.items():
        of = seen if isinstance(seen, dict) else {}
        bars.append(bar(f"nvcomp_{name} is exact", of.get("exact", seen)))
        for way in ("encode", "decode"):
            free = of.get(f"{way}_waits", {}).get("returned_asleep", seen)
            bars.append(bar(f"nvcomp_{name} {way} returns while the GPU sleeps", free, (name, way) != WAITS))
    return bars + [bar(f"{name} decodes alike on GPU and CPU", same) for name, same in quantizers.items()]


def run(seed: int) -> dict[str, object]:
    """Everything, as one JSON object."""
    torch.manual_seed(seed)
    found = {name: guarded(lambda name=name: measured(name)) for name in nvcomp.ALGORITHMS}
    quantizers = {name: guarded(lambda name=name: same_on_both_devices(name)) for name in QUANTIZERS}
    bars = judge(found, quantizers)
    return {
        "ok": all(b["ok"] for b in bars),
        "bars": bars,
        "machine": {"gpu": torch.cuda.get_device_name(), "cpu": platform.machine()},
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "seed": seed,
        "dtype": DType.U8.value,
        "codecs": found,
    }


def main() -> None:
    """Command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path)
    options.add_argument("--seed", type=int, default=int(time.time()))
    args = options.parse_args()
    result = run(args.seed)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    sys.exit(not result["ok"])


if __name__ == "__main__":
    main()
