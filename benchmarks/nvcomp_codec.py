"""Prove the Codec ABC on one GPU with nvCOMP: exact, batched, sizes on the device, no host synchronisation.

Run: ``python benchmarks/nvcomp_codec.py --out benchmarks/results/nvcomp_codec.json``. Needs an NVIDIA GPU, triton and
nvidia-nvcomp-cu13. GB/s count the codec's own input (u8 codes, half of a bf16 cache), medians of device events.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch
import triton
from nvcomp_probes import (
    MiB,
    behind_sleep,
    bound,
    case,
    codes,
    cuda_calls,
    cut,
    damaged,
    finish_ms,
    guarded,
    hostile,
    python_api,
    two_launches,
)

from kvserve_plugins.kernels.nvcomp_api import library

CASES = [(32, 256), (64, 1024), (256, 256), (64, 2048), (1024, 256), (128, 2048)]  # segments, KiB of codes in each


def bar(name: str, value: object, limit: object, ok: bool) -> dict[str, object]:
    """One acceptance line of the result."""
    return {"name": name, "value": value, "bar": limit, "ok": bool(ok)}


def run(seed: int) -> dict[str, object]:
    """Everything, as one JSON object."""
    torch.manual_seed(seed)
    codec = bound()
    intact = two_launches(codec)
    parts = codes(64, 2 * MiB, 16)
    blobs = cut(codec.encode(parts))
    waits = {
        "encode": behind_sleep(lambda: codec.encode(parts)),
        "decode": behind_sleep(lambda: codec.decode(blobs, parts)),
    }
    api = {
        "encode": guarded(lambda: cuda_calls(lambda: codec.encode(parts))),
        "decode": guarded(lambda: cuda_calls(lambda: codec.decode(blobs, parts))),
    }
    hurt = {mode: [damaged(mode, n) for n in range(4)] for mode in ("table", "truncated", "payload")}
    cases = [case(n, kib, chunk, 16) for n, kib in CASES for chunk in (64, 256)]
    cases += [case(64, 2048, 256, alphabet) for alphabet in (4, 7, 12, 256)] + [case(64, 2048, 1024, 16)]
    large = next(c for c in cases if (c["segments"], c["kib_each"], c["chunk_kib"]) == (128, 2048, 64))
    wide = next(c for c in cases if (c["segments"], c["kib_each"], c["chunk_kib"]) == (64, 2048, 256))
    syncs = [k for seen in api.values() if isinstance(seen, dict) for k in seen["api"] if "Synchronize" in k]
    exact = intact and all(c["exact"] for c in cases)
    share = round(float(wide["ratio"]) / float(wide["entropy_ratio"]), 4)
    counted = not syncs and all(isinstance(seen, dict) for seen in api.values())
    bars = [
        bar("exact, two launches in flight, edges", exact, True, exact),
        *(
            bar(f"{way} returns while the GPU sleeps, host ms", ms := w["host_ms"], 5, w["returned_asleep"] and ms < 5)
            for way, w in waits.items()
        ),
        bar("synchronising CUDA calls seen", syncs, [], counted),
        bar("encode GB/s, 128 x 2 MiB, 64 KiB chunks", e := large["encode_queued_gbs"], 460, e >= 460),
        bar("decode GB/s, 128 x 2 MiB, 64 KiB chunks", d := large["decode_queued_gbs"], 780, d >= 780),
        bar("share of the entropy bound, 256 KiB chunks", share, 0.97, share >= 0.97),
        *(
            bar(f"damaged {mode}: crashes", crashed := sum("error" in seen for seen in hurt[mode]), 0, not crashed)
            for mode in ("table", "truncated")
        ),
    ]
    return {
        "ok": all(b["ok"] for b in bars),
        "bars": bars,
        "machine": {"gpu": torch.cuda.get_device_name(), "cpu": platform.machine()},
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version(),
                     "nvcomp": nvcomp_version()},
        "seed": seed, "waits": waits, "cuda_calls": api, "damaged": hurt, "cases": cases,
        "finish_ms_1024_x_256KiB": finish_ms(codec, codes(1024, 256 * 1024, 16)),
        "python_api_64_x_2MiB": guarded(lambda: python_api(parts, 64)),
    }  # fmt: skip


def nvcomp_version() -> str:
    """From the library itself."""
    import ctypes

    properties = (ctypes.c_uint32 * 2)()
    library().nvcompGetProperties(properties)
    return f"{properties[0]} (CUDA runtime {properties[1]})"


def main() -> None:
    """Command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path)
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--hostile", choices=("table", "truncated", "payload"))
    args = options.parse_args()
    if args.hostile:
        return hostile(args.hostile, args.seed)
    result = run(args.seed)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    sys.exit(not result["ok"])


if __name__ == "__main__":
    main()
