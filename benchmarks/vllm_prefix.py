"""Stored prefixes in the vLLM adapter: a cold process loads them over a slow link, or computes the prompt.

Two engines write the same prompts (1500 tokens each) into a ``file`` store each: one as the controller decides, one
uncompressed. The first learns what the link can do by loading two other prompts; it is never told. Both end. Then two
cold engines, whose stores read at no more than the link's speed, are asked for the first token of each prompt: loaded
compressed, loaded uncompressed, and, with a prompt that no store holds, computed. The ways take turns.

    python benchmarks/vllm_prefix.py --json      # with the Python of an environment that has vllm; see docs/vllm.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions, version
from importlib.resources import files
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kvserve_core.spec import SEGMENT_TOKENS
from kvserve_hf.convert import smollm2
from vllm_engines import EngineProcess, Setup, external_tokens, forget, generate, metrics

PROMPT_TOKENS, LEARN = 1500, 2
LLM = {"dtype": "bfloat16", "max_model_len": 2048}
RAW = {"policy": {"name": "static", "configuration": {"profile": "raw"}}, "min_quality": 1.0}
STORE_S = 300.0
STORED = "kvserve:transfers{ok=true,side=store}"
WAYS = ("kvserve", "uncompressed", "recompute")


@dataclass(frozen=True)
class Timed:
    """Seconds to the first token of one prompt; tokens and bytes that came from the store for it."""

    way: str
    ttft_s: float
    loaded_tokens: int
    wire_bytes: float


def setup(model: Path, role: str, store: Path, link: str | None, more: Mapping[str, Any]) -> Setup:
    """An engine over a store that reads at ``link``."""
    table = {"path": str(store)} | ({"max_bandwidth": link} if link else {})
    extra = {"prefix_store": "file", "deadline": "600s", "transport": {"file": table}, **more}
    return Setup(model, role, extra, llm=LLM)


def prompts(model: Path) -> Iterator[list[int]]:
    """Passages of installed documentation, each with a first word of its own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    texts = sorted(str(each.metadata.get_payload()) for each in distributions())
    tokens = tokenizer("\n".join(text for text in texts if len(text) > 3000)[:2_000_000])["input_ids"]
    source = random.Random(0)
    for number in itertools.count():
        at = source.randrange(len(tokens) - PROMPT_TOKENS)
        head = tokenizer(f"{number} ")["input_ids"]
        yield [*head, *tokens[at : at + PROMPT_TOKENS - len(head)]]


def write(writer: EngineProcess, learn: Sequence[list[int]], kept: Sequence[list[int]]) -> dict[str, float]:
    """Load a few prompts, so that the link is known, then store the others; what was stored, in bytes."""
    for _ in range(2):
        for prompt in learn:
            writer.call(generate, [prompt], 1)
        writer.call(forget)
    before = now = writer.call(metrics)
    for prompt in kept:
        writer.call(generate, [prompt], 1)
    until = time.monotonic() + STORE_S
    while _more(before, now, STORED) < len(kept) * (PROMPT_TOKENS // SEGMENT_TOKENS):
        if time.monotonic() > until:
            raise TimeoutError(f"the prompts were not stored within {STORE_S:g} s")
        time.sleep(0.2)
        writer.call(generate, [learn[0][:8]], 1)  # metrics move with steps
        now = writer.call(metrics)
    found = {name: _more(before, now, f"kvserve:{name}{{}}") for name in ("raw_bytes", "wire_bytes")}
    chosen = {name: _more(before, now, name) for name in now if name.startswith("kvserve:decisions")}
    return found | {name: count for name, count in chosen.items() if count}


def timed(llm: Any, way: str, prompt: list[int]) -> Timed:
    """One prompt, with nothing in the local cache."""
    forget(llm)
    before, loaded = metrics(llm), external_tokens(llm)
    started = time.perf_counter()
    generate(llm, [prompt], 1)
    ttft_s = time.perf_counter() - started
    generate(llm, [prompt[:8]], 1)
    now = metrics(llm)
    wire_bytes = _more(before, now, "kvserve:wire_bytes{}")
    return Timed(way, ttft_s, external_tokens(llm) - loaded, wire_bytes)


def _more(before: Mapping[str, float], now: Mapping[str, float], name: str) -> float:
    return now.get(name, 0.0) - before.get(name, 0.0)


def run(rounds: int, link: str, folder: Path) -> dict[str, Any]:
    """Write, then read in cold processes."""
    model, library = smollm2(), Path(str(files("kvserve_hf").joinpath("smollm2-135m.kvlib")))
    source = prompts(model)
    learn, kept, fresh = (list(itertools.islice(source, n)) for n in (LEARN, rounds, rounds + 1))
    ours = {"library": str(library), "peers": {"accept": "any"}}
    written = {}
    for way, limit, more in (("kvserve", link, ours), ("uncompressed", None, RAW)):
        with EngineProcess(setup(model, "kv_both", folder / way, limit, more)) as writer:
            written[way] = write(writer, learn, kept)
    with (
        EngineProcess(setup(model, "kv_consumer", folder / "kvserve", link, ours)) as ours_reader,
        EngineProcess(setup(model, "kv_consumer", folder / "uncompressed", link, RAW)) as raw_reader,
    ):
        readers = {"kvserve": ours_reader, "uncompressed": raw_reader, "recompute": ours_reader}
        for reader in (ours_reader, raw_reader):
            reader.call(generate, [fresh[-1][:64]], 1)
        taken: dict[str, list[Timed]] = {way: [] for way in WAYS}
        for number in range(rounds):
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                prompt = fresh[number] if way == "recompute" else kept[number]
                taken[way].append(readers[way].call(timed, way, prompt))
    return report(link, rounds, written, taken)


def report(link: str, rounds: int, written: Any, taken: Mapping[str, list[Timed]]) -> dict[str, Any]:
    """Medians, and the ratios that must hold."""
    over = {way: _ratio(taken, way) for way in WAYS[1:]}
    bars = [
        {"name": f"TTFT of the compressed store over {way}", "value": round(value, 4), "bar": 1.0, "ok": value < 1}
        for way, value in over.items()
    ]
    return {
        "benchmark": "vllm_prefix",
        "bars": bars,
        "ok": all(bar["ok"] for bar in bars),
        "what": f"SmolLM2-135M bf16, {PROMPT_TOKENS} tokens, cold processes, {link}, medians of {rounds} rounds",
        "medians": {
            way: {name: statistics.median(asdict(t)[name] for t in each) for name in asdict(each[0]) if name != "way"}
            for way, each in taken.items()
        },
        "written": written,
        "requests": [asdict(each) for each in itertools.chain(*taken.values())],
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "load": os.getloadavg()},
        "versions": {"python": platform.python_version(), "torch": version("torch")},
    }


def _ratio(taken: Mapping[str, list[Timed]], other: str) -> float:
    """Median over rounds of ours over the other way in the same round."""
    pairs = zip(taken["kvserve"], taken[other], strict=True)
    return statistics.median(ours.ttft_s / theirs.ttft_s for ours, theirs in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", default="100Mbps")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvserve-vllm-prefix") as folder:
        result = run(given.rounds, given.link, Path(folder))
    for bar in result["bars"] if not given.json else ():
        print(f"{bar['name']}: {bar['value']} (bar {bar['bar']})")
    if given.json:
        print(json.dumps(result, indent=2))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
