"""vLLM's prefill and decode engines on one GPU, Qwen2.5-7B's geometry with made-up weights: kvserve against raw.

Two prefill engines (``tcp``, ``cuda_ipc``) and one decode engine share the GPU. For each link and prompt length the
same request goes raw, as the controller decides, and by one fixed profile, in turn; the controller is never told the
rate of the link. TTFT and JCT are a client's that takes both steps; sessions report seconds on the link, of encoding
and of decoding. Profiles (Hadamard, uniform or MixHQ, nvCOMP rANS) are measured in the same run; quality is not, as
weights are made up.

    python benchmarks/gpu_vllm.py --out benchmarks/results/gpu_vllm.json
    python benchmarks/gpu_vllm.py --cpu       # the same with a tiny model over tcp, to see that it runs
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
from gpu_serving import engines, figures, library, model
from vllm_serving.timed import Timed, named

from vllm_engines import EngineProcess, Setup

GBPS = 1e9
TCP = {"tcp 5G": 5 * GBPS, "tcp 10G": 10 * GBPS}
IPC = {f"ipc {n}G": n * GBPS for n in (25, 100, 400)} | {"ipc unlimited": None, "ipc 50G": 50 * GBPS}
LENGTHS = (1024, 8192, 16384)
TOKENS = 8
"""Answer length."""
FIXED = "hadamard-mixhq"
GPU_ENV = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "4",
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
}  # fmt: skip


@dataclass(frozen=True)
class Heard(Timed):
    """Seconds from when the prefill engine was asked; the rest as the sessions say."""

    ok: bool = False


class Bench:
    """The engines, and requests to them."""

    def __init__(self, decode: EngineProcess, vocab: int) -> None:
        self.decode, self._vocab, self._draw = decode, vocab, random.Random(0)
        self.peer: dict[str, Any] = decode.call(engines.peer)

    def request(self, prefill: EngineProcess, way: str, link: str, length: int) -> Heard:
        """One request by one way; the engines are at rest before and after."""
        prompt = [self._draw.randrange(3, self._vocab) for _ in range(length)]
        prefill.call(engines.force, FIXED if way == "fixed" else None)
        table = {"transfer_id": uuid.uuid4().hex, "peer": named(self.peer, f"{link} {way}", way == "raw")}
        began, offered, params = prefill.call(engines.offer, prompt, table)
        profile = params["kvserve"]["locator"]["profile"] if params else ""
        _, stamps = self.decode.call(engines.take, prompt, params, TOKENS)
        consumed = self.decode.call(engines.outcomes)
        produced = prefill.call(engines.outcomes)
        end = time.monotonic() + 5
        while not produced and time.monotonic() < end:
            produced = prefill.call(engines.outcomes)
        more: dict[str, Any] = {}
        if consumed and produced:
            got = consumed[-1]
            more = {n: got[n] for n in ("raw_bytes", "wire_bytes", "transfer_s", "decode_s", "ok")}
            more |= {"load_s": got["total_s"], "encode_s": produced[-1]["encode_s"]}
        return Heard(way, stamps[0] - began, stamps[-1] - began, offered - began, profile, **more)

    def link(self, prefill: EngineProcess, name: str, rate: float | None, given: argparse.Namespace) -> dict[str, Any]:
        """All lengths over one link."""
        prefill.call(engines.set_bandwidth, rate)
        found = {}
        for length in given.lengths:
            for _ in range(given.learn):
                self.request(prefill, "kvserve", name, length)
            if time.monotonic() > given.until:
                print("no time for", name, length, file=sys.stderr, flush=True)
                return found
            ways = ["kvserve", "raw", *(["fixed"] if name.startswith("ipc") or given.cpu else [])]
            taken: dict[str, list[Heard]] = {way: [] for way in ways}
            for number in range(given.rounds):
                for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                    taken[way].append(self.request(prefill, way, name, length))
            found[str(length)] = figures.summary({way: [asdict(t) for t in ts] for way, ts in taken.items()})
            print(name, length, json.dumps(found[str(length)]["brief"]), file=sys.stderr, flush=True)
        return found


def start(folder: Path, role: str, extra: dict[str, Any], cpu: bool) -> EngineProcess:
    """Engines come up at the same time; the first call waits."""
    llm: dict[str, Any] = {"load_format": "dummy", "max_model_len": 17408 if not cpu else 2048}
    if not cpu:
        llm |= {"dtype": "bfloat16", "block_size": 16, "gpu_memory_utilization": 0.3, "max_num_seqs": 16}
        llm |= {"kv_cache_memory_bytes": 12 * 2**30}
    return EngineProcess(Setup(folder, role, extra, llm=llm, env={} if cpu else GPU_ENV))


def run(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure the library, start the engines, take the rounds."""
    config = model.TINY if given.cpu else model.QWEN
    folder = model.write(config, work / "model")
    device = torch.device("cpu" if given.cpu else "cuda")
    kv = model.spec_of(config, folder)
    common = {"slo": "600s", "lease": "60s", "deadline": "60s", "lossy_prefix_cache": "allow"}
    libraries, prefills = {}, {}
    decode_extra: dict[str, Any] = dict(common)
    for name in ("tcp",) if given.cpu else ("tcp", "cuda_ipc"):
        libraries[name] = library.library(kv, device, name == "cuda_ipc", given.measured)
        libraries[name].save(work / f"{name}.kvlib")
        extra = {**common, "library": str(work / f"{name}.kvlib"), "transport": {"name": name}}
        prefills[name] = start(folder, "kv_producer", extra, given.cpu)
        decode_extra["library"] = extra["library"]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    decode = start(folder, "kv_consumer", decode_extra, given.cpu)
    everyone = [*prefills.values(), decode]
    try:
        for engine in everyone:
            engine.call(engines.watch)
        began = time.monotonic()
        bench = Bench(decode, config["vocab_size"])
        links = {}
        versions = decode.call(engines.versions)
        for name, rate in (given.links or {**TCP, **({} if given.cpu else IPC)}).items():
            found = bench.link(prefills["tcp" if name.startswith("tcp") else "cuda_ipc"], name, rate, given)
            if found:
                links[name] = found
            if given.out:
                given.out.write_text(json.dumps(_result(given, config, links, libraries, versions, began)))
    finally:
        for engine in everyone:
            engine.close()
    return _result(given, config, links, libraries, versions, began)


def _result(
    given: argparse.Namespace,
    config: dict[str, Any],
    links: dict[str, Any],
    libraries: dict[str, Any],
    versions: dict[str, str],
    began: float,
) -> dict[str, Any]:
    rows = {name: [_plain(p) for p in lib.profiles] for name, lib in libraries.items()}
    table = {row["name"]: row for row in rows.get("cuda_ipc") or rows["tcp"]}
    crossings = figures.break_even(links, table, FIXED)
    bars = figures.bars(links, crossings)
    return {
        "benchmark": "gpu_vllm",
        "bars": bars,
        "ok": all(bar["ok"] for bar in bars),
        "what": f"{config['num_hidden_layers']} layers of {config['num_key_value_heads']} KV heads, prompts of"
        f" {given.lengths} + {TOKENS} tokens, medians of {given.rounds} rounds; quality not measured (made-up weights)",
        "links": links,
        "break_even": crossings,
        "library": rows,
        "rounds_s": round(time.monotonic() - began, 1),
        "versions": versions | {"python": platform.python_version()},
    }


def _plain(profile: Any) -> dict[str, Any]:
    return {"name": profile.name, "cr": profile.cr, "encode": asdict(profile.encode), "decode": asdict(profile.decode)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cpu", action="store_true", help="a tiny model, tcp only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--learn", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--link", action="append", choices=[*TCP, *IPC])
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further prompt length after so long")
    given = parser.parse_args()
    given.until = time.monotonic() + given.seconds
    given.lengths = given.lengths or ([300, 900] if given.cpu else list(LENGTHS))
    given.measured = given.lengths if len(given.lengths) > 1 else [1024, *given.lengths]
    given.links = {name: {**TCP, **IPC}[name] for name in given.link} if given.link else None
    with tempfile.TemporaryDirectory(prefix="kvserve-gpu-vllm") as work:
        result = run(given, Path(work))
    text = json.dumps(result, indent=1)
    if given.out:
        given.out.write_text(text + "\n")
    for bar in result["bars"]:
        print(f"{bar['name']}: {bar['value']} (bar {bar['bar']}) {'ok' if bar['ok'] else 'MISSED'}")
    return 0 if result["ok"] or given.cpu else 1  # a tiny model on a CPU gains nothing


if __name__ == "__main__":
    sys.exit(main())
