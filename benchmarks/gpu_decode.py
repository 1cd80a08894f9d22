"""Decoding as a device transport leaves it: coded bytes and parameters lie on the GPU already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_cases import STAGED, Batch, device_gbs, exact_blobs, gbs, host_ms, like, size_of, split

from kvserve_core.pipeline import Pipeline
from kvserve_plugins.kernels.fused_launch import Pages


def decode_gbs(made: Pipeline, batch: Batch) -> float:
    """The whole decode, from coded bytes on the device to tensors, batch by batch."""
    steps: list[Callable[[], object]] = [_decode_step(made, p) for p in split(batch, STAGED)]
    return device_gbs(size_of(batch), lambda: [step() for step in steps])


def _decode_step(made: Pipeline, batch: Batch) -> Callable[[], object]:
    chain, at = batch[0][0].chain, batch[0][0].at
    bound, codec = made._chains.bound(chain, at), made._chains.codec(chain)
    drafts = made.launch(batch)._drafts
    parts = [like(d.parts) for d in drafts]
    blobs = exact_blobs([e for d in drafts for e in d.encoded])
    flat = [p for each in parts for p in each]
    fusion = bound.fusion
    if fusion is None:  # lossless: bytes are values
        return lambda: [c.view(torch.bfloat16) for c in codec.decode(blobs, flat)]
    params = [[{k: v.cpu() for k, v in stage.items()} for stage in d.stages] for d in drafts]
    counts = [len(d.parts) for d in drafts]
    staged = Staged(fusion)

    def step() -> object:
        codes = iter(codec.decode(blobs, flat))
        given = [
            (d.planned.at, s, [next(codes) for _ in range(n)]) for d, s, n in zip(drafts, params, counts, strict=True)
        ]
        return staged.decode(given)

    return step


def walls(made: Pipeline, batch: Batch, ratio: float) -> dict[str, float]:
    """From an idle device to an idle device, with the host's share; and what that makes of s_p and B*."""
    parts = split(batch, STAGED)
    encode = gbs(size_of(batch), host_ms(lambda: [made.launch(p) for p in parts], 5))
    steps = [_decode_step(made, p) for p in parts]
    decode = gbs(size_of(batch), host_ms(lambda: [step() for step in steps], 5))
    s_p = 1 / (1 / encode + 1 / decode)
    return {
        "wall_encode_gbs": encode, "wall_decode_gbs": decode, "wall_s_p_gbs": round(s_p, 1),
        "wall_break_even_gbps": round(8 * (1 - 1 / ratio) * s_p, 1),
    }  # fmt: skip


class Staged:
    """A fusion whose parameters, and coded bytes, lie on the device already, as a device transport leaves them."""

    def __init__(self, fusion: Any) -> None:
        self._fusion = fusion
        self._kept: dict[str, Any] = {}

    def decode(self, given: list[Any]) -> object:
        """``Fusion.decode``."""
        return self._run(lambda: self._fusion.decode(given))

    def decode_pages(self, given: list[Any], heads: list[list[int]], pages: Pages) -> object:
        """``Rotation.decode_pages``."""
        return self._run(lambda: self._fusion.decode_pages(given, heads, pages))

    def _run(self, call: Callable[[], object]) -> object:
        """Copies to the device are made in the first call only."""
        names = [n for n in ("_staged_grids", "_staged_codes") if hasattr(self._fusion, n)]
        for name in names:
            setattr(self._fusion, name, self._once(name, getattr(self._fusion, name)))
        try:
            return call()
        finally:
            for name in names:
                delattr(self._fusion, name)

    def _once(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def kept(*arguments: Any) -> Any:
            if name not in self._kept:
                self._kept[name] = inner(*arguments)
            return self._kept[name]

        return kept
