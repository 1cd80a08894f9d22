"""``rans`` against ``nvcomp_ans`` on one GPU, on the same codes: ratio, speed both ways, and what bounds it.

Run: ``python benchmarks/gpu_rans.py --out benchmarks/results/gpu_rans.json``. Needs triton, nvidia-nvcomp-cu13 and
safetensors. GB/s count codes of one byte, medians of device events behind a busy queue. The first run on a machine
compiles for about a minute, ``--spreads`` for three more. Codes: ``klt`` cells of 256
tokens and 1,792 components with the spectrum measured on SmolLM2-135M (``gpu_cases.SPECTRUM``) in steps of 0.6, tokens
alike or louder and quieter ones; and what ``mixhq`` with 8 and 4 levels behind ``hadamard`` gives on normal values.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_cases import BLOCK, CUDA, DIM, device_gbs, exact_blobs, gaussian, like, mixhq, pipeline, spectrum
from nvcomp_codec import nvcomp_version
from nvcomp_probes import CELL, SPEC, bound

from kvserve_core.artefacts import NONE
from kvserve_core.stages import Codec
from kvserve_core.tensor import Part
from kvserve_plugins.codecs.rans import Rans
from kvserve_plugins.kernels import rans_device

RANK, TOKENS, STEP, LOUD = 1792, 256, 0.6, 0.25
LARGE, STAGED = 585, 146
"""Cells in 256 MiB of codes, and in the 256 MB of a batch as a producer stages it."""
SPREADS = ((4, 0), (2, 96), (1, 64), (1, 48))
"""Lanes a thread, and the most registers of a thread (0: as the compiler likes)."""


def cells(count: int, loud: float) -> list[Part]:
    """Fresh codes of ``count`` cells."""
    sigma = spectrum(BLOCK * 2 * DIM)[:RANK].to(CUDA)[:, None] / STEP
    made = []
    for _ in range(count):
        x = torch.randn(RANK, TOKENS, device=CUDA) * sigma * (loud * torch.randn(TOKENS, device=CUDA)).exp()
        made.append(Part((x.round().clamp(-127, 127) + 127).to(torch.uint8).reshape(-1), 255, RANK))
    return made


def classes(tokens: int) -> list[Part]:
    """Codes of the chain that ``gpu.py`` measures as ``mixhq``."""
    chain = {"transforms": ["hadamard"], "quantizer": mixhq(8, 4), "codec": "raw"}
    made = pipeline(chain, segment_tokens=2048, head_groups=1)
    return [p for d in made.launch(gaussian(made, tokens))._drafts for p in d.parts]


def case(codec: Codec, parts: Sequence[Part]) -> dict[str, Any]:
    """Ratio and speed of a codec, and whether codes come back."""
    nbytes = sum(p.nbytes for p in parts)
    blobs = exact_blobs(codec.encode(parts))
    given = like(parts)
    back = codec.decode(blobs, given)
    good = codec.ok is None or bool(codec.ok.all())
    return {
        "exact": good and all(torch.equal(a, p.codes) for a, p in zip(back, parts, strict=True)),
        "ratio": round(nbytes / sum(b.data.numel() for b in blobs), 4),
        "encode_gbs": device_gbs(nbytes, lambda: codec.encode(parts), 5),
        "decode_gbs": device_gbs(nbytes, lambda: codec.decode(blobs, given), 5),
    }


def rans() -> Rans:
    """The codec, bound as a chain does it."""
    return Rans(Rans.Config()).bind(CELL, SPEC, CUDA, NONE)


def spreads(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Speeds by lanes a thread and registers."""
    usual, found = (rans_device.EACH, rans_device.REGISTERS), []
    for each, registers in SPREADS:
        rans_device.EACH, rans_device.REGISTERS = each, registers
        found.append({"lanes_a_thread": each, "registers": registers, **case(rans(), parts)})
        print(json.dumps(found[-1]), flush=True)
    rans_device.EACH, rans_device.REGISTERS = usual
    return found


def kernels_ms(parts: Sequence[Part]) -> dict[str, float]:
    """Milliseconds of each kernel of one encode and one decode."""
    codec = rans()
    blobs, given = exact_blobs(codec.encode(parts)), like(parts)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        codec.encode(parts), codec.decode(blobs, given)
        torch.cuda.synchronize()
    every = {e.key: e.device_time_total / 1e3 for e in seen.key_averages()}
    return {name: round(ms, 3) for name, ms in every.items() if name.endswith("_kernel")}


def host_gbs(parts: Sequence[Part]) -> dict[str, float]:
    """Codes through the CPU's coder, copies included, as a chain on a GPU had it before there were kernels."""
    codec, nbytes = rans(), sum(p.nbytes for p in parts)
    codec._kernels = None
    codec.encode(parts[:1])
    t0 = time.perf_counter()
    blobs = codec.encode(parts)
    t1 = time.perf_counter()
    codec.decode(blobs, like(parts))
    torch.cuda.synchronize()
    t2 = time.perf_counter()
    return {"encode_gbs": round(nbytes / (t1 - t0) / 1e9, 3), "decode_gbs": round(nbytes / (t2 - t1) / 1e9, 3)}


def bars(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A better ratio than nvCOMP's, at half of its speed or more."""
    out = []
    for name, both in found.items():
        ours, theirs = both["rans"], both["nvcomp_ans"]
        for key, share in (("ratio", 1.0), ("encode_gbs", 0.5), ("decode_gbs", 0.5)):
            over = round(ours[key] / theirs[key], 3)
            out.append({"name": f"{name}: {key} over nvcomp_ans", "value": over, "bar": share, "ok": over >= share})
        out.append({"name": f"{name}: exact", "value": ours["exact"], "bar": True, "ok": ours["exact"]})
    return out


def run(seed: int, spread: bool) -> dict[str, Any]:
    """Everything, as one JSON object."""
    torch.manual_seed(seed)
    inputs = {
        f"klt, {LARGE} cells": lambda: cells(LARGE, 0.0),
        f"klt, {STAGED} cells": lambda: cells(STAGED, 0.0),
        f"klt, {LARGE} cells, loud and quiet tokens": lambda: cells(LARGE, LOUD),
        "mixhq, 8192 tokens": lambda: classes(8192),
    }
    found: dict[str, Any] = {}
    for name, make in inputs.items():
        parts = make()
        print(name, sum(p.nbytes for p in parts), "codes", flush=True)
        found[name] = {"codes": sum(p.nbytes for p in parts), "nvcomp_ans": case(bound(128), parts)}
        found[name]["rans"] = case(rans(), parts)
        print(json.dumps(found[name]), flush=True)
        del parts
        torch.cuda.empty_cache()
    parts = cells(LARGE, 0.0)
    more: dict[str, Any] = {"kernels_ms": kernels_ms(parts), "cpu": host_gbs(parts[:16])}
    if spread:
        more["spreads"] = spreads(parts)
    print(json.dumps(more), flush=True)
    return {
        "bars": bars(found), "found": found, **more, "seed": seed,
        "geometry": {"components": RANK, "tokens": TOKENS, "step": STEP},
        "machine": {"gpu": torch.cuda.get_device_name(), "cpu": platform.machine()},
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version(),
                     "nvcomp": nvcomp_version()},
    }  # fmt: skip


def main() -> None:
    """Command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path)
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--spreads", action="store_true", help="also other numbers of lanes a thread")
    args = options.parse_args()
    result = run(args.seed, args.spreads)
    result = {"ok": all(b["ok"] for b in result["bars"]), **result}
    for line in result["bars"]:
        print("ok  " if line["ok"] else "MISS", line["name"], line["value"], "bar", line["bar"])
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(not result["ok"])


if __name__ == "__main__":
    main()
