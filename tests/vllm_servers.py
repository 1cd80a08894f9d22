"""Real OpenAI servers of vLLM and the real proxy, each in processes of its own, on ports of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

START_S = 600.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
MODEL = "m"


@dataclass
class Process:
    """A server in a process group of its own; ``log`` holds what it prints."""

    url: str
    log: Path
    popen: subprocess.Popen[bytes] = field(repr=False)

    def wait(self) -> Self:
        """Until it is healthy."""
        until = time.monotonic() + START_S
        while not self.healthy:
            if self.popen.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self.url} did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.2)
        return self

    @property
    def healthy(self) -> bool:
        """Whether it answers."""
        try:
            return httpx.get(f"{self.url}/health", timeout=2, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """As a crash: nothing is closed."""
        self._signal(signal.SIGKILL)
        self.popen.wait()

    def close(self) -> None:
        """End it and what it started."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(20)
        self.kill()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics: ``name{labels}`` -> value."""
        return samples(self._exported())

    def _exported(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=20, trust_env=False).text

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of one metric that carry these labels."""
        text = self._exported()
        family = name.removesuffix("_sum").removesuffix("_count")
        if f"# TYPE {family} " not in text:
            raise KeyError(f"{self.url} exports no metric {name!r}")
        return total(samples(text), name, **labels)

    def held(self) -> dict[str, int]:
        """Threads, and open files and sockets, of its engine: all processes but the first, which speaks HTTP."""
        pids = processes(self.popen.pid)[1:]
        return {kind: sum(len(os.listdir(f"/proc/{pid}/{kind}")) for pid in pids) for kind in ("task", "fd")}


def samples(text: str) -> dict[str, float]:
    """What an exporter says: ``name{labels}`` -> value."""
    rows = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


def sampled(metrics: Mapping[str, float], name: str) -> float:
    """Sum of the samples of a metric that must have some."""
    if not any(sample.partition("{")[0] == name for sample in metrics):
        raise KeyError(f"there is no sample of {name!r}")
    return total(metrics, name)


def total(metrics: Mapping[str, float], name: str, **labels: str) -> float:
    """Sum of the samples of one metric that carry these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for sample, value in metrics.items()
        if sample.partition("{")[0] == name and all(label in sample for label in wanted)
    )


def processes(pid: int) -> list[int]:
    """A process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(p for child in children for p in processes(int(child)))]


def engine(
    model: Path,
    folder: Path,
    role: str | None,
    settings: Mapping[str, Any] | None = None,
    *,
    policy: str = "recompute",
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Process:
    """An OpenAI server with the connector (without one for ``role`` None); settings go into its extra config."""
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", MODEL]
    command += ["--max-model-len", "2048", "--block-size", "32", "--enforce-eager", "--host", "127.0.0.1"]
    if role is not None:
        transfer = {
            "kv_connector": "KVServeConnector",
            "kv_connector_module_path": "kvserve_vllm.connector",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": dict(settings or {}),
        }
        command += ["--kv-transfer-config", json.dumps(transfer)]
    return start(command + list(arguments), folder / f"{role}-{free_port()}.log", env)


def proxy(prefill: Sequence[Process], decode: Sequence[Process], folder: Path, *arguments: str) -> Process:
    """``kvserve vllm-proxy`` in front of servers."""
    command = ["-m", "kvserve_core.cli", "vllm-proxy", "--health-interval", "500ms", *arguments]
    for role, servers in (("--prefill", prefill), ("--decode", decode)):
        command += [part for server in servers for part in (role, server.url)]
    return start(command, folder / f"proxy-{free_port()}.log")


def start(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Process:
    """Run a Python module that serves HTTP and takes ``--port``."""
    port = free_port()
    with log.open("wb") as out:
        popen = subprocess.Popen(
            [sys.executable, *command, "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **(env or {})},
            start_new_session=True,
        )
    return Process(f"http://127.0.0.1:{port}", log, popen)


def free_port() -> int:
    """A port that nobody uses right now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_until(done: Callable[[], bool], say: Callable[[], object] = str, timeout_s: float = 60.0) -> None:
    """Poll; an error, with what ``say`` says then, when it does not come."""
    until = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > until:
            raise TimeoutError(f"what was waited for did not come within {timeout_s:g} s: {say()}")
        time.sleep(0.1)
