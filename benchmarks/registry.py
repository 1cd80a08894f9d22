"""How long a fresh process takes to load ten plugins, and to list every component.

Ten packages with entry points are generated into a temporary folder and put on the path, beside the built-ins and
whatever else is installed. Each figure is the median over fresh processes; the interpreter's own start is not in it,
and the import of what the plugins' modules need (pydantic, pluggy) is reported by itself.
``python benchmarks/registry.py [--json] [--rounds N]``
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import distributions, version
from pathlib import Path
from time import perf_counter

PLUGINS = 10
BAR_MS = 50.0
MODULE = """
from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl


@hookimpl
def kvserve_codecs():
    yield Component("bench.codec{i}", "bench_plugin_{i}.codec:Codec", "A codec.", requires=("zstandard",))
    yield Component("bench.missing{i}", "bench_plugin_{i}.codec:Missing", "A codec.", requires=("bench_nothing.sub",))


@hookimpl
def kvserve_policies():
    yield Component("bench.policy{i}", "bench_plugin_{i}.policy:Policy", "A policy.")
"""
TIMED = """
from time import perf_counter
a = perf_counter()
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
import pluggy, blake3
b = perf_counter()
import kvserve_core.registry
c = perf_counter()
registry = kvserve_core.registry.default_registry()
d = perf_counter()
rows = registry.rows()
e = perf_counter()
import json, sys
assert "torch" not in sys.modules
ours = sum(row.provider.startswith("bench-plugin-") for row in rows)
print(json.dumps({"import_libraries": b - a, "import_registry": c - b, "load": d - c, "rows": e - d, "ours": ours}))
"""
LIST = (sys.executable, "-m", "kvserve_core.cli", "list-components", "--json")


def install(folder: Path) -> None:
    """Ten packages with metadata, as pip would leave them."""
    for i in range(PLUGINS):
        package, info = folder / f"bench_plugin_{i}", folder / f"bench_plugin_{i}-1.0.dist-info"
        package.mkdir()
        info.mkdir()
        (package / "__init__.py").write_text(MODULE.format(i=i), encoding="utf-8")
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: bench-plugin-{i}\nVersion: 1.0\n", encoding="utf-8"
        )
        (info / "entry_points.txt").write_text(f"[kvserve]\nbench{i} = bench_plugin_{i}\n", encoding="utf-8")


def measure(rounds: int) -> dict[str, float]:
    """Medians in milliseconds. The first round warms the file cache and writes byte code; it is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))}
        found: dict[str, list[float]] = {}
        for i in range(rounds + 1):
            parts = json.loads(subprocess.check_output((sys.executable, "-c", TIMED), env=environ))
            if parts.pop("ours") != 3 * PLUGINS:
                raise RuntimeError("the generated plugins were not all found")
            parts["start_of_python"] = _seconds((sys.executable, "-c", "pass"), environ)
            parts["list_components"] = _seconds(LIST, environ)
            for name, seconds in parts.items() if i else ():
                found.setdefault(name, []).append(1000 * seconds)
    return {f"{name}_ms": round(statistics.median(each), 2) for name, each in found.items()}


def _seconds(command: tuple[str, ...], environ: dict[str, str]) -> float:
    start = perf_counter()
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    found = measure(options.rounds)
    bars = [{"name": f"loading {PLUGINS} plugins, ms", "value": found["load_ms"], "bar": BAR_MS}]
    bars = [bar | {"ok": bar["value"] <= bar["bar"]} for bar in bars]
    report = {
        "benchmark": "registry",
        "machine": {"cpu": platform.processor() or platform.machine(), "system": platform.platform()},
        "versions": {"python": platform.python_version()} | {n: version(n) for n in ("pluggy", "pydantic")},
        "distributions": sum(1 for _ in distributions()) + PLUGINS,
        "rounds": options.rounds,
        "timings": found,
        "bars": bars,
        "ok": all(bar["ok"] for bar in bars),
    }
    print(json.dumps(report, indent=2) if options.json else "\n".join(f"{k:24} {v:8.2f}" for k, v in found.items()))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
