"""The check of a cache's layout, over real blocks with attention layers that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve_core.errors import UnsupportedSpecError
from kvserve_vllm.self_test import check_layers
from vllm_blocks import BLOCKS, TOKENS, caches, placed


class Opaque:
    """A backend that takes no K and V from others."""


class Writes:
    """A backend that keeps what it is given beside each other, K first or V first."""

    def __init__(self, swapped: bool = False) -> None:
        self._swapped = swapped

    def do_kv_cache_update(self, layer: Any, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        halves = (v, k) if self._swapped else (k, v)
        cache[slots // TOKENS, :, slots % TOKENS] = torch.cat(halves, -1)


def check(*backends: Any, num_blocks: int = BLOCKS) -> int:
    found = caches()
    before = [cache.clone() for cache in found]
    modules = {f"l.{i}": SimpleNamespace(impl=impl, kv_cache=found[i]) for i, impl in enumerate(backends)}
    checked = check_layers(placed(found), modules, num_blocks)
    assert all(torch.equal(*pair) for pair in zip(found, before, strict=True))
    return checked


def test_one_layer_of_each_kind_is_checked() -> None:
    assert check(Writes(), Writes(), Writes()) == 1


def test_what_does_not_come_back_is_refused() -> None:
    with pytest.raises(UnsupportedSpecError, match=r"backend Writes does not keep plane 'k' of layer 'l\.0'"):
        check(Writes(swapped=True), Writes(), Writes())


@pytest.mark.parametrize(
    ("backends", "blocks", "kinds"),
    [((Opaque, Opaque, Opaque), BLOCKS, 1), ((Opaque, Writes, Opaque), BLOCKS, 1), ((Opaque, Writes, Writes), 2, 2)],
)
def test_what_cannot_be_checked_is_said_once_a_kind(
    backends: tuple[type, ...], blocks: int, kinds: int, caplog: pytest.LogCaptureFixture
) -> None:
    checked = check(*(backend() for backend in backends), num_blocks=blocks)
    assert checked == len(set(backends)) - kinds
    assert [r.levelname for r in caplog.records] == ["WARNING"] * kinds
    assert all("compare answers with and without a transfer" in r.message for r in caplog.records)
