"""Real SGLang servers on the CPU, and the part of a router that a test needs."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

PROMPTS = [f"request {i}: " + "the quick brown fox jumps over the lazy dog. " * (1 + 4 * i) for i in range(4)]
"""56 to 596 tokens: less than a page, and cells that are full, ragged and straddled by chunks."""
STUBS = Path(__file__).parent / "stubs"
START_S = 600.0
FLAGS: dict[str, str] = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--host": "127.0.0.1",
    "--mem-fraction-static": "0.7",  # of memory that others use too; --max-total-tokens is what limits the pool
    "--max-total-tokens": "4096",
    "--max-running-requests": "8",
    "--dtype": "float32",
}


Answer = tuple[list[int], list[float]]
"""Tokens and their logprobs."""


def free_port() -> int:
    """A port that nobody listens on now, and the next one neither."""
    while True:
        with socket.socket() as probe, socket.socket() as following:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            with contextlib.suppress(OSError):
                following.bind(("127.0.0.1", port + 1))
                return port


@dataclass
class Server:
    """One SGLang server in a process group of its own; its output goes to ``log``."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    bootstrap_port: int = 0
    up: str = "/v1/models"
    """What it answers when it is up."""

    @property
    def url(self) -> str:
        """Of its HTTP API."""
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> Server:
        """Until it answers."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.tail()}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(self.url + self.up, timeout=2).ok:
                    return self
            time.sleep(0.5)
        raise RuntimeError(f"the server was not up within {START_S} s:\n{self.tail()}")

    def healthy(self) -> bool:
        """Whether it runs and answers."""
        return self.process.poll() is None and requests.get(f"{self.url}/health", timeout=10).ok

    def tail(self, lines: int = 40) -> str:
        """The end of its log."""
        return "\n".join(line[:300] for line in self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """End it and all of its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(
    model: Path, logs: Path, name: str, port: int, *flags: str, bootstrap_port: int = 0, **environ: str
) -> Server:
    """Start a server; :meth:`Server.wait` until it answers."""
    env = os.environ | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "SGLANG_HOST_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join([str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **environ,
    }
    log = logs / f"{name}.log"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    command += ["--skip-server-warmup", *(part for flag in FLAGS.items() for part in flag)]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, *flags], env=env, stdout=out, stderr=out, start_new_session=True)
    return Server(port, process, log, bootstrap_port)


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Wait until all are up, and end them afterwards."""
    try:
        for server in servers:
            server.wait()
        yield
    finally:
        for server in servers:
            server.kill()


def start_prefill(model: Path, logs: Path, name: str, *flags: str, tp: int = 1, **environ: str) -> Server:
    """A prefill server; its bootstrap port is the next one."""
    port = free_port()
    mode = _pd("prefill", tp, port + 1)
    return start(model, logs, name, port, *mode, *flags, bootstrap_port=port + 1, **_bound(tp), **environ)


def start_decode(model: Path, logs: Path, name: str, *flags: str, tp: int = 1, **environ: str) -> Server:
    """A decode server."""
    port = free_port()
    mode = [*_pd("decode", tp, port + 1), "--disaggregation-decode-retraction-backup", "none"]
    return start(model, logs, name, port, *mode, *flags, **_bound(tp), **environ)


def _pd(mode: str, tp: int, bootstrap_port: int) -> list[str]:
    backend = ["--disaggregation-transfer-backend", "kvserve", "--disaggregation-mode", mode]
    return [*backend, "--disaggregation-bootstrap-port", str(bootstrap_port), "--tp-size", str(tp)]


def _bound(tp: int) -> dict[str, str]:
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0", "1"] * tp)[: 2 * tp - 1]} if tp > 1 else {}


def start_router(prefill: Server, decode: Server, logs: Path, *flags: str) -> Server:
    """SGLang's own router in front of a pair; it answers once it knows both."""
    port, log = free_port(), logs / "router.log"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1"]
    command += ["--prefill", prefill.url, str(prefill.bootstrap_port), "--decode", decode.url]
    command += ["--port", str(port), "--prometheus-port", str(free_port()), "--policy", "round_robin"]
    # A server on few cores may answer a health check late: it is busy, not gone.
    command += ["--health-check-timeout-secs", "60", "--health-failure-threshold", "20", "--disable-circuit-breaker"]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, *flags], stdout=out, stderr=out, start_new_session=True)
    return Server(port, process, log, up="/readiness")  # which tells of both servers, where its models are of one


def body(text: str, tokens: int = 24, **sampling: Any) -> dict[str, Any]:
    """A greedy request with logprobs."""
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **sampling}
    return {"text": text, "return_logprob": True, "sampling_params": params}


def generate(server: Server, text: str, tokens: int = 24) -> Answer:
    """Tokens and logprobs of an aggregated server."""
    return answer(requests.post(f"{server.url}/generate", json=body(text, tokens), timeout=120))


def generate_pd(prefill: Server, decode: Server, text: str, tokens: int = 24, **sampling: Any) -> Answer:
    """The same over a pair: what a router does."""
    return answer(pd(prefill, decode, body(text, tokens, **sampling))[1])


def pd(
    prefill: Server, decode: Server, given: dict[str, Any], timeout_s: float = 120.0
) -> tuple[requests.Response, requests.Response]:
    """The answers of both servers to a request. A client that waits no longer than ``timeout_s`` goes away."""
    first, second = pd_ended(prefill, decode, given, timeout_s)
    return first.result(), second.result()


def pd_ended(
    prefill: Server, decode: Server, given: dict[str, Any], timeout_s: float = 120.0
) -> list[Future[requests.Response]]:
    """How a request ended on each of both servers."""
    room = random.getrandbits(62)
    full = given | {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": room}
    with ThreadPoolExecutor(2) as pool:
        return [
            pool.submit(requests.post, f"{server.url}/generate", json=full, timeout=timeout_s)
            for server in (prefill, decode)
        ]


def answer(response: requests.Response) -> Answer:
    """Tokens and logprobs of an answer."""
    if not response.ok:
        raise RuntimeError(f"{response.status_code}: {response.text}")
    given = response.json()
    return given["output_ids"], [entry[0] for entry in given["meta_info"]["output_token_logprobs"]]


def check_same(prefill: Server, decode: Server, expected: list[Answer]) -> None:
    """Every prompt's tokens and logprobs over a pair are exactly those of the aggregated server."""
    for text, wanted in zip(PROMPTS, expected, strict=True):
        assert generate_pd(prefill, decode, text) == wanted


def check_close(prefill: Server, decode: Server, expected: list[Answer]) -> None:
    """The same tokens. Logprobs may differ in their last bits: the forward pass adds in another order when it is cut
    into chunks, continues a cached prefix or runs on several ranks."""
    for text, wanted in zip(PROMPTS, expected, strict=True):
        assert_close(generate_pd(prefill, decode, text), wanted)


def assert_close(got: Answer, wanted: Answer) -> None:
    """One answer of :func:`check_close`."""
    assert got[0] == wanted[0]
    assert max(abs(a - b) for a, b in zip(got[1], wanted[1], strict=True)) < 1e-4
