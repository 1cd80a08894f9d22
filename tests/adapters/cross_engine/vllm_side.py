"""vLLM as a process that this environment can talk to without importing it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PYTHON = Path(os.environ.get("KVSERVE_TEST_VLLM_PYTHON", Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"))
START_S = 400.0


@dataclass(frozen=True)
class Offered:
    """A prompt that vLLM prefilled: its own continuation, the transfer params, and what its blocks hold.

    cache: rows ``[T, D]`` by plane, layer, head and first token.
    """

    prompt: list[int]
    tokens: list[int]
    params: dict[str, Any]
    cache: dict[str, Tensor]


@contextmanager
def offering(model: Path, prompts: list[list[int]], folder: Path) -> Iterator[list[Offered]]:
    """Offers of a vLLM that serves them until the end of the block."""
    given, log = folder / "prompts.json", folder / "vllm.log"
    given.write_text(json.dumps(prompts), encoding="utf-8")
    command = [str(PYTHON), str(Path(__file__).with_name("vllm_producer.py")), str(model), str(given), str(folder)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG", "KVSERVE", "PYTHONPATH", "PYTEST"))}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=clean, start_new_session=True
        )
    try:
        yield _offers(process, prompts, folder, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _offers(process: subprocess.Popen[bytes], prompts: list[list[int]], folder: Path, log: Path) -> list[Offered]:
    until = time.monotonic() + START_S
    while not (folder / "offers.json").exists():
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"vLLM offered nothing:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.2)
    told = json.loads((folder / "offers.json").read_text(encoding="utf-8"))
    caches = [torch.load(folder / f"cache-{i}.pt") for i in range(len(prompts))]
    return [Offered(*each) for each in zip(prompts, told["tokens"], told["params"], caches, strict=True)]
