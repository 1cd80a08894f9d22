"""SGLang prefill/decode pairs over one shaped link: kvserve beside SGLang's own mooncake backend, uncompressed.

Everything runs in a network namespace of its own whose loopback passes 100 Mbps (``tc tbf``), so every backend has the
same link, its control messages and HTTP included; the controller is not told how fast it is. Four ways, in turn, each
round with prompts of its own (about 900 tokens): through the controller and the library, the same with exact profiles
only (the request says so), raw, and mooncake. Bytes are those of the interface, from the request to the first token;
TTFT is the client's, streaming from the decode server. The controller's first requests, from which it learns, are
reported apart.

Needs root, ``tc``, ``unshare`` and two environments: ``make venv-sglang`` and, for mooncake, ``make venv-mooncake``.

    PYTHONPATH=tests/adapters/sglang/stubs .venv-sglang/bin/python benchmarks/sglang_pd.py --json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "adapters" / "sglang"))

import servers
from servers import Server
from sglang_serving import mooncake
from sglang_serving.client import Pair, Timed, ask, prompt, tokens_of

from kvserve_hf.convert import smollm2

WAYS = ("kvserve", "exact", "raw", "mooncake")
FLAGS = ("--disable-overlap-schedule", "--dtype", "bfloat16", "--max-total-tokens", "8192", "--sleep-on-idle")
EXACT = {"min_quality": 1.0}
RAW = '{"name": "static", "configuration": {"profile": "raw"}}'
INSIDE = "KVSERVE_BENCH_INSIDE"
WANTED = (
    ("wire bytes through the controller over mooncake's", "kvserve", "wire_bytes", 0.4),
    ("wire bytes of exact profiles over mooncake's", "exact", "wire_bytes", 0.8),
    ("TTFT through the controller over mooncake's", "kvserve", "ttft_s", 1.0),
)
"""What must hold: its name, the way, the figure and the most that it may be of mooncake's."""


def bars(rounds: Mapping[str, Sequence[Timed]]) -> list[dict[str, Any]]:
    """Those of :data:`WANTED` whose ways were run, by medians over rounds."""
    found = []
    for name, way, field, bar in WANTED:
        if {way, "mooncake"} <= set(rounds):
            value = over(rounds, way, "mooncake", field)
            found.append({"name": name, "value": round(value, 4), "bar": bar, "ok": value <= bar})
    return found


def over(rounds: Mapping[str, Sequence[Timed]], ours: str, theirs: str, field: str) -> float:
    """Median over rounds of one way over another in the same round."""
    pairs = zip(rounds[ours], rounds[theirs], strict=True)
    return statistics.median(getattr(a, field) / getattr(b, field) for a, b in pairs)


@contextmanager
def pairs(ways: Sequence[str], logs: Path) -> Iterator[dict[str, Pair]]:
    """A pair of running servers for each way. kvserve's share the decode server, which reads what it is sent."""
    found: dict[str, Pair] = {}
    model = smollm2()
    with ExitStack() as stack:

        def started(*both: Server) -> None:
            stack.enter_context(servers.running(*both))

        if "mooncake" in ways:  # first: where it cannot be loaded, nothing else has been started
            flags = (*FLAGS, "--disaggregation-transfer-backend", "mooncake")
            environ = mooncake.environ(logs, servers.STUBS)
            pair = Pair(
                servers.start_prefill(model, logs, "mooncake-prefill", *flags, **environ),
                servers.start_decode(model, logs, "mooncake-decode", *flags, **environ),
            )
            started(pair.prefill, pair.decode)
            found["mooncake"] = pair
        if set(ways) & {"kvserve", "exact", "raw"}:
            library = {"KVSERVE_LIBRARY": str(files("kvserve_hf").joinpath("smollm2-135m.kvlib"))}
            decode = servers.start_decode(model, logs, "decode", *FLAGS, **library)
            prefill = servers.start_prefill(model, logs, "prefill", *FLAGS, **library)
            started(decode, prefill)
            found["kvserve"], found["exact"] = Pair(prefill, decode), Pair(prefill, decode, EXACT)
            if "raw" in ways:
                raw = servers.start_prefill(model, logs, "raw-prefill", *FLAGS, KVSERVE_POLICY=RAW)
                started(raw)
                found["raw"] = Pair(raw, decode)
        yield {way: found[way] for way in ways}


def run(given: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Learn, then every way in turn, in an order that changes by round."""
    source = (prompt(seed, given.sentences) for seed in itertools.count())
    learning: dict[str, list[Timed]] = {}
    rounds: dict[str, list[Timed]] = {way: [] for way in given.ways}
    with pairs(given.ways, logs) as found:
        for way, pair in found.items():
            learning[way] = [ask(pair, next(source)) for _ in range(given.learn)]
        for number in range(given.rounds):
            for i in range(len(given.ways)):
                way = given.ways[(number + i) % len(given.ways)]
                rounds[way].append(ask(found[way], next(source)))
                print(number, way, asdict(rounds[way][-1]), file=sys.stderr)
    return report(given, learning, rounds)


def report(
    given: argparse.Namespace, learning: Mapping[str, list[Timed]], rounds: Mapping[str, list[Timed]]
) -> dict[str, Any]:
    """Medians, and the ratios that must hold."""
    found = bars(rounds)
    others = [way for way in rounds if way != "mooncake"] if "mooncake" in rounds else []
    return {
        "benchmark": "sglang_pd",
        "bars": found,
        "not_judged": [name for name, *_ in WANTED if name not in {bar["name"] for bar in found}],
        "ok": all(bar["ok"] for bar in found),
        "what": (
            f"SmolLM2-135M bf16, {tokens_of(rounds)} tokens, loopback shaped to {given.mbps:g} Mbps,"
            f" medians of {given.rounds} rounds"
        ),
        "medians": {way: _medians(each) for way, each in rounds.items()},
        "over_mooncake": {
            way: {field: round(over(rounds, way, "mooncake", field), 4) for field in ("ttft_s", "wire_bytes")}
            for way in others
        },
        "learning": {way: [asdict(each) for each in taken] for way, taken in learning.items()},
        "requests": {way: [asdict(each) for each in taken] for way, taken in rounds.items()},
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "load": os.getloadavg()},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in ("sglang", "torch")},
    }


def _medians(each: Sequence[Timed]) -> dict[str, float]:
    return {
        "ttft_s": round(statistics.median(t.ttft_s for t in each), 4),
        "wire_bytes": statistics.median(t.wire_bytes for t in each),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def enter_namespace() -> None:
    """Start again in a network of our own, once.

    Raises:
        SystemExit: this needs root and two programs.
    """
    if os.environ.get(INSIDE):
        return
    lacking = [name for name in ("unshare", "tc", "ip") if shutil.which(name) is None]
    if os.geteuid() or lacking:
        raise SystemExit(f"run this as root, with 'unshare', 'tc' and 'ip' installed (missing here: {lacking})")
    os.environ[INSIDE] = "1"
    os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv])


def shape(mbps: float) -> None:
    """Loopback of this namespace at a rate; its packets hold up to 64 KiB."""
    for command in (
        "ip link set lo up",
        f"tc qdisc add dev lo root tbf rate {mbps}mbit burst 256kb latency 2s",
    ):
        subprocess.run(command.split(), check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--mbps", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--learn", type=int, default=3, help="requests of each way before the rounds")
    parser.add_argument("--sentences", type=int, default=45, help="about 20 tokens each")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    given = parser.parse_args()
    enter_namespace()
    shape(given.mbps)
    with tempfile.TemporaryDirectory(prefix="kvserve-sglang-pd") as folder:
        try:
            result = run(given, Path(folder))
        except mooncake.MooncakeMissing as error:
            raise SystemExit(str(error)) from error
    for bar in result["bars"] if not given.json else ():
        print(f"{bar['name']}: {bar['value']} (bar {bar['bar']})")
    for name in result["not_judged"] if not given.json else ():
        print(f"{name}: not judged, one of the two was not run")
    if given.json:
        print(json.dumps(result, indent=2))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
