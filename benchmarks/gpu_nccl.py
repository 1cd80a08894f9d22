"""Transport ``nccl``: bytes, goodput, a peer that dies while NCCL waits for it, fetches given up.

Run: ``python benchmarks/gpu_nccl.py --out benchmarks/results/gpu_nccl.json``. With two GPUs each side has one, and
goodput is judged. With one GPU NCCL refuses two ranks unless it takes them for two hosts (``NCCL_HOSTID``) joined
by sockets: then everything but goodput is judged, as that says nothing of a link between GPUs. ``--cpu`` takes Gloo and
the host's memory, to see that it runs.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nccl_cases as cases
import torch
from nccl_sides import BEAT_S, Bodies, made, producer, settings

from kvserve_plugins.transports import _nccl_library as library

GOODPUT_BAR = 50.0
"""GB/s of whole fetches, a link of 400 Gbps; a copy between the GPUs is shown beside it."""


def bars(found: dict[str, Any], gpus: int) -> list[dict[str, Any]]:
    """Name, value, bar, ok; ok is None where this machine cannot say."""
    soon_s = 10 * BEAT_S

    def of(case: str, field: str) -> Any:
        return found.get(case, {}).get(field)

    def quick(value: Any) -> bool:
        return isinstance(value, float) and value < soon_s

    lines: list[tuple[str, Any, Any, bool | None]] = [
        ("40 segments of 8 MB, equal to the byte", of("fetches", "equal"), True, of("fetches", "equal") is True),
        ("pairs made for all fetches", of("fetches", "pairs"), 1, of("fetches", "pairs") == 1),
    ]
    kept = (of("given_up", "same_pair"), of("given_up", "closed"), of("given_up", "equal"))
    lines.append(
        ("fetches given up leave their pair: same, closed, equal", kept, (True, 3, True), kept == (True, 3, True))
    )
    lost_s = of("killed_in_a_fetch", "lost_after_s")
    lines.append(("producer killed in a fetch: lost after s", lost_s, soon_s, quick(lost_s)))
    lost_s, ended = of("killed_in_the_library", "lost_after_s"), of("killed_in_the_library", "thread_ended") is True
    lines.append(("producer killed while the library waits: lost after s", lost_s, soon_s, quick(lost_s) and ended))
    after = (of("after", "equal"), of("after", "usable"))
    lines.append(("after all that: equal, usable", after, (True, True), after == (True, True)))
    if gpus:
        lines += gpu_bars(of, quick, gpus)
    return [dict(zip(("name", "value", "bar", "ok"), line, strict=True)) for line in lines]


def gpu_bars(of: Callable[[str, str], Any], quick: Callable[[Any], bool], gpus: int) -> list[tuple[Any, ...]]:
    """What only GPUs show."""
    alone = [of("nobody_comes", "timed_out_after_s"), of("nobody_comes", "closed_after_s")]
    goodput = of("fetches", "gbs")
    lines: list[tuple[Any, ...]] = [
        ("a rank alone: timed out, closed after s", alone, (2.0, 0.5), all(map(quick, alone))),
        ("a rank to itself: equal", of("loopback", "equal"), True, of("loopback", "equal") is True),
        ("goodput of fetches, GB/s", goodput, GOODPUT_BAR, None if gpus < 2 else (goodput or 0.0) >= GOODPUT_BAR),
        ("a device copy, GB/s", of("device_copy", "gbs"), None, None),
    ]
    if gpus == 1:
        lines.append(
            ("one GPU for both is refused", of("one_gpu", "said"), "use 'cuda_ipc'", of("one_gpu", "ok") is True)
        )
    return lines


def run(cpu: bool, show: Callable[[str, dict[str, Any]], None]) -> None:
    """All cases, told one by one."""
    device = settings(1, cpu)

    def case(name: str, call: Callable[[], dict[str, Any]]) -> None:
        faulthandler.dump_traceback_later(60, exit=True)
        t0 = time.perf_counter()
        try:
            result = call()
        except Exception as error:  # noqa: BLE001  # a case that fails must not lose the others' figures
            result = {"failed": f"{type(error).__name__}: {error}"[:600]}
        faulthandler.cancel_dump_traceback_later()
        show(name, result | {"case_s": round(time.perf_counter() - t0, 2)})

    if not cpu:
        case("loopback", lambda: cases.loopback(device))
        case("device_copy", lambda: {"gbs": round(cases.device_copy(), 1)})
        case("nobody_comes", lambda: cases.nobody_comes(device))
        if torch.cuda.device_count() == 1:
            case("one_gpu", lambda: cases.one_gpu_for_both(device))
    source, transport = Bodies(device), made(cpu)
    with producer(cpu) as there:
        case("fetches", lambda: cases.fetches(transport, there, source))
        case("given_up", lambda: cases.given_up(transport, there, source))
        case("killed_in_a_fetch", lambda: cases.killed_in_a_fetch(transport, there, source))
    with producer(cpu) as there:
        case("killed_in_the_library", lambda: cases.killed_in_the_library(transport, there, source))
    with producer(cpu) as there:
        case("after", lambda: cases.after(transport, there, source, device))
    transport.close()


def main() -> None:
    """Command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path)
    options.add_argument("--cpu", action="store_true", help="Gloo, without a GPU")
    args = options.parse_args()
    gpus = 0 if args.cpu else torch.cuda.device_count()
    found: dict[str, Any] = {}

    def show(name: str, result: dict[str, Any]) -> None:
        found[name] = result
        print(name, json.dumps(result), flush=True)
        if args.out:
            args.out.write_text(json.dumps(report(found, gpus), indent=1) + "\n")

    run(args.cpu, show)
    lines = bars(found, gpus)
    for line in lines:
        print({True: "ok  ", False: "MISS", None: "n/a "}[line["ok"]], line["name"], line["value"], "bar", line["bar"])
    if gpus == 1:  # what a copy within one GPU and sockets make says nothing of two
        print("One GPU: two ranks as two hosts over sockets. Goodput between two GPUs was not measured.")
    sys.exit(any(line["ok"] is False for line in lines))


def report(found: dict[str, Any], gpus: int) -> dict[str, Any]:
    lines = bars(found, gpus)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    machine: dict[str, Any] = {"gpus": gpus, "cpu": platform.machine()}
    if gpus:
        versions["nccl"] = str(library.version(library.library()))
        machine["gpu"] = torch.cuda.get_device_name()
    return {
        "ok": all(line["ok"] is not False for line in lines), "bars": lines, "cases": found,
        "not shown": [line["name"] for line in lines if line["ok"] is None and line["bar"]],
        "machine": machine, "versions": versions,
    }  # fmt: skip


if __name__ == "__main__":
    main()
