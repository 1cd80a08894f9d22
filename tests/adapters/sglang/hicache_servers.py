"""SGLang servers with HiCache and the kvserve storage backend, on the CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import requests
import servers
from servers import Server

PAGE = 16
FLAGS = ["--disable-overlap-schedule", "--page-size", str(PAGE), "--enable-hierarchical-cache", "--hicache-ratio", "2"]
FLAGS += ["--enable-metrics", "--hicache-io-backend", "direct", "--hicache-storage-prefetch-policy", "wait_complete"]
BACKEND = {
    "backend_name": "kvserve",
    "module_path": "kvserve_sglang.hicache",
    "class_name": "KVServeHiCacheStorage",
    "interface_v1": 1,
    "prefetch_threshold": PAGE,
}


def settings(folder: Path) -> dict[str, Any]:
    """Of kvserve: everything is compressed exactly, whatever the disk's speed."""
    policy = {"name": "static", "configuration": {"profile": "lossless"}}
    return {"transport": {"file": {"path": str(folder)}}, "policy": policy}


def start(model: Path, logs: Path, name: str, folder: Path, layout: str = "layer_first", **environ: str) -> Server:
    """A server whose prefixes are kept in ``folder``."""
    extra = json.dumps(BACKEND | {"kvserve": settings(folder)})
    flags = [*FLAGS, "--hicache-mem-layout", layout, "--hicache-storage-backend", "dynamic"]
    flags += ["--hicache-storage-backend-extra-config", extra]
    return servers.start(model, logs, name, servers.free_port(), *flags, HICACHE_ON_CPU="1", **environ)


def generate(server: Server, prompt: str | list[int], tokens: int = 24) -> tuple[servers.Answer, int]:
    """The answer, and how many tokens of the prompt came from the store."""
    given = servers.body("", tokens)
    given |= {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    if not isinstance(prompt, str):
        del given["text"]
    response = requests.post(f"{server.url}/generate", json=given, timeout=120)
    details = response.json()["meta_info"].get("cached_tokens_details") or {}
    return servers.answer(response), int(details.get("storage", 0))


def counted(server: Server, name: str) -> float:
    """A counter of kvserve's in SGLang's own endpoint, over all its labels."""
    lines = requests.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"kvserve:{name}_total"))


def wait_stored(folder: Path, pages: int, seconds: float = 60.0) -> list[Path]:
    """The store's files, once there are so many: SGLang writes behind the answer."""
    until = time.monotonic() + seconds
    while len(found := list(folder.glob("*.kvframe"))) < pages and time.monotonic() < until:
        time.sleep(0.2)
    return found


def wait_counted(server: Server, name: str, least: float, seconds: float = 60.0) -> None:
    """Until a counter has come so far: pages are counted after they are stored, all of a call at once."""
    until = time.monotonic() + seconds
    while counted(server, name) < least and time.monotonic() < until:
        time.sleep(0.2)
