"""A real vLLM that prefills prompts and offers their KV; runs in vLLM's environment, as a process of its own.

``vllm_producer.py MODEL PROMPTS OUT``: it writes ``OUT/offers.json`` (vLLM's own tokens, and the transfer params a
router would get) and ``OUT/cache-<i>.pt`` (what vLLM's blocks hold), and goes on serving until its input ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvserve_core.spec import Region
from kvserve_vllm.placement import Placement
from vllm_engines import EngineProcess, Setup, generate

NEW_TOKENS = 24
EXTRA = {"policy": {"name": "static", "configuration": {"profile": "lossless"}}, "lease": "600s"}


def record(llm: Any) -> None:
    """From now on, keep a copy of every region that is read out of vLLM's blocks."""
    del llm
    read = Placement.gather

    def recording(self: Placement, blocks: Any, at: Region) -> Tensor:
        x = read(self, blocks, at)
        READ.append((at, x.clone()))
        return x

    Placement.gather = recording


def taken(llm: Any, path: str) -> int:
    """Write what was read since the last call, planes ``[L, H, T, D]``; how many values."""
    from vllm_engines import settle

    settle(llm)
    planes: dict[str, Tensor] = {}
    for at, x in READ:
        for i, layer in enumerate(at.layers):
            for j, head in enumerate(at.heads):
                planes[f"{at.plane}/{layer}/{head}/{at.start}"] = x[i, j].clone()
    torch.save(planes, path)
    READ.clear()
    return sum(x.numel() for x in planes.values())


READ: list[tuple[Region, Tensor]] = []


def main(model: Path, prompts: list[list[int]], out: Path) -> None:
    with EngineProcess(Setup(model, "kv_producer", EXTRA)) as engine:
        alone = [answer.tokens for answer in engine.call(generate, prompts, NEW_TOKENS)]
        engine.call(record)
        params = []
        for i, prompt in enumerate(prompts):
            (offered,) = engine.call(generate, [prompt], 1, [{"do_remote_decode": True}])
            params.append(offered.params)
            engine.call(taken, str(out / f"cache-{i}.pt"))
        told = {"tokens": alone, "params": params}
        (out / "offers.tmp").write_text(json.dumps(told), encoding="utf-8")
        (out / "offers.tmp").rename(out / "offers.json")
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")), Path(sys.argv[3]))
