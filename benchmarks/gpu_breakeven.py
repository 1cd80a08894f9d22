"""Where compression breaks even on a link of any rate, on one GPU: measured through sessions, and by the latency model.

A producer's process and a consumer's share the GPU and are joined by ``cuda_ipc`` with its token bucket. By profile and
prompt length: transfers without a limit, from which fixed costs and slopes of encoding and decoding are made as a
library holds them; B*, where the model's seconds of raw and of compressed are equal, batches overlapped; and the same
transfers, raw and compressed in turn, at rates around B*. Measured is where the difference of medians changes its sign.

Run: ``python benchmarks/gpu_breakeven.py --out benchmarks/results/gpu_breakeven.json``. Needs what ``gpu.py`` needs,
and pyzmq. ``--cpu`` runs small caches over shared memory, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from breakeven_model import MOST, TOPS, Model, judged
from breakeven_sides import Setup, Sides, sides

from kvserve_core.library import RAW_PROFILE
from kvserve_core.overlap import Form
from kvserve_core.profile import GPU_CUT

BAR = 0.15
BATCH = 112 * 2**20
"""Two segments, so that both sides take as much at a time; of the default, 128 MiB, one takes two, the other three."""
STEPS = 9
SPAN = 2.5
"""Rates reach from the lowest B* over this to the highest times this."""
UNLIMITED = 3
"""Times a round."""
SHORT = 2048


def chains(device: str, layers: int) -> dict[str, dict[str, Any]]:
    """What is measured against raw."""
    ans: Any = {"name": "nvcomp_ans", "configuration": {"chunk_bytes": 2**17, "batch_bytes": 2**27}}
    exact: Any = {
        "name": "nvcomp_ans",
        "configuration": {"chunk_bytes": 2**16, "batch_bytes": 2**28, "data_type": "f16"},
    }
    if device == "cpu":
        ans = exact = "zstd"
    high, low = ({"name": "uniform", "configuration": {"levels": n, "axis": "token_head"}} for n in (8, 4))
    mixed = {"name": "mixhq", "configuration": {"scores": [[3.0, 2.0, 1.0, 0.0]] * layers, "high": high, "low": low}}
    packed = {"name": "uniform", "configuration": {"levels": 16, "axis": "token_head"}}
    return {
        "uniform-bitpack": {"transforms": ["hadamard"], "quantizer": packed, "codec": "bitpack"},
        "mixhq-ans": {"transforms": ["hadamard"], "quantizer": mixed, "codec": ans},
        "lossless-ans": {"quantizer": "identity", "codec": exact},
    }


def setup(cpu: bool, tokens: int) -> Setup:
    """Qwen2.5-7B's geometry, cut as the deployments' exact profiles are on a GPU; or small ones."""
    layers, cut = (4, {"segment_tokens": 256, "layer_block": 4}) if cpu else (28, dict(GPU_CUT))
    cut |= {"head_groups": 1}  # as compressed: raw by head, as ranks that share heads need it, is four times slower
    specs: dict[str, Any] = {"raw": RAW_PROFILE.pipeline.model_copy(update=cut)}
    for name, chain in chains("cpu" if cpu else "cuda", layers).items():
        specs[name] = {"planes": {"*": chain}, "sink_tokens": 0, **cut}
    return Setup("cpu" if cpu else "cuda", layers, 4, 64 if cpu else 128, tokens, specs, 2**20 if cpu else BATCH)


def grid(model: Model, profiles: Iterable[str], tokens: int) -> list[float]:
    """Rates from below the lowest B* to above the highest; where there is none, above what raw does by itself."""
    found = [at for name in profiles if 0 < (at := model.break_even(name, tokens)) < MOST]
    found = found or [model.nbytes(tokens) / model.seconds("raw", tokens)(TOPS)]
    return [float(rate) for rate in np.geomspace(min(found) / SPAN, min(max(found) * SPAN, MOST), STEPS)]


def swept(both: Sides, model: Model, profiles: Sequence[str], tokens: int, rounds: int, until: float) -> dict[str, Any]:
    """Raw and all profiles in turn at every rate and without a limit, in another order every round."""
    rates = grid(model, profiles, tokens)
    names, order, draw = ["raw", *profiles], [*range(STEPS), *[None] * UNLIMITED], random.Random(tokens)
    taken: dict[str, list[list[float]]] = {name: [[] for _ in rates] for name in names}
    for turn in range(rounds):
        if time.monotonic() > until:
            break
        draw.shuffle(order)
        for i in order:
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                stamps = both.transfer(name, tokens, None if i is None else rates[i])
                if i is None:
                    model.learn(name, tokens, stamps)
                else:
                    taken[name][i].append(stamps.total)
    return {"rates": rates, "taken": taken}


def bars(cases: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One for every profile and length."""
    return [
        {
            "name": f"{c['profile']}, {c['tokens']} tokens: measured break-even, off B*",
            "value": c["model"]["off"], "bar": BAR, "ok": c["model"]["off"] <= BAR,
        }
        for c in cases
    ]  # fmt: skip


def run(given: argparse.Namespace) -> dict[str, Any]:
    """All cases."""
    made, began = setup(given.cpu, max(given.lengths)), time.monotonic()
    profiles = [name for name in made.specs if name != "raw"]
    model, sweeps, errors = Model(Form(made.batch_bytes)), {}, {}
    with sides(made, not given.one_process) as both:
        for name in made.specs:
            errors[name] = both.error(name, min(given.lengths))
        for turn in range(given.learn + 2):
            for tokens, name in product(given.lengths, made.specs):
                stamps = both.transfer(name, tokens, None)
                if turn >= 2:
                    model.learn(name, tokens, stamps)
        print(round(time.monotonic() - began, 1), "s", {n: model.unlimited(n) for n in made.specs}, flush=True)
        for tokens in given.lengths:
            rounds = given.rounds * (2 if tokens <= SHORT else 1)
            sweeps[tokens] = swept(both, model, profiles, tokens, rounds, began + given.seconds)
            print(round(time.monotonic() - began, 1), "s,", tokens, "tokens", flush=True)
            if given.trace:
                given.trace.write_text(json.dumps(sweeps))
    cases = [judged(model, name, tokens, found) for tokens, found in sweeps.items() for name in profiles]
    lines = bars(cases)
    return {
        "benchmark": "gpu_breakeven", "ok": all(b["ok"] for b in lines), "bars": lines, "cases": cases,
        "library": {
            name: {
                "cr": round(model.ratio(name), 3), "error": round(errors[name], 5),
                "unlimited_ms": model.unlimited(name),
                **dict(zip(("encode", "decode"), map(asdict, model.speeds(name)), strict=True)),
            }
            for name in made.specs
        },
        "batch_bytes": made.batch_bytes, "processes": 1 if given.one_process else 2,
        "seconds": round(time.monotonic() - began, 1),
        "machine": {"device": torch.cuda.get_device_name() if made.device == "cuda" else "cpu"},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }  # fmt: skip


def main() -> int:
    """Command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path)
    options.add_argument("--cpu", action="store_true")
    options.add_argument("--one-process", action="store_true", help="the producer in a thread of this process")
    options.add_argument("--rounds", type=int, default=15, help="twice as many of short prompts")
    options.add_argument("--learn", type=int, default=8, help="transfers by profile and length before rates are chosen")
    options.add_argument("--lengths", type=int, nargs="+")
    options.add_argument("--trace", type=Path, help="where to write the seconds of every transfer")
    options.add_argument("--seconds", type=float, default=1e9, help="begin no further round after so long")
    given = options.parse_args()
    given.lengths = given.lengths or ([256, 1024, 2048] if given.cpu else [1024, 8192, 16384, 32768])
    result = run(given)
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    for line in result["bars"]:
        print("ok  " if line["ok"] else "MISS", line["name"], line["value"], "bar", line["bar"])
    return 0 if result["ok"] or given.cpu else 1  # a CPU at work on other things decides nothing


if __name__ == "__main__":
    sys.exit(main())
