"""What spares a launch its preparation: kept tables, kernels called again, signs as bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvserve_plugins.kernels import launching
from kvserve_plugins.kernels.fused_launch import sign_bits
from kvserve_plugins.kernels.launching import MAX_KEPT, MAX_KEPT_BYTES, Kept, even, launch


def test_a_table_is_made_once_for_a_key() -> None:
    kept, made = Kept(), []

    def make() -> torch.Tensor:
        made.append(torch.zeros(4))
        return made[-1]

    assert kept.get("a", make) is kept.get("a", make)
    assert kept.get("b", make) is not made[0]
    assert len(made) == 2


def test_few_and_small_tables_are_kept() -> None:
    kept, made = Kept(), []

    def make() -> torch.Tensor:
        made.append(torch.zeros(MAX_KEPT_BYTES + 1, dtype=torch.uint8))
        return made[-1]

    assert kept.get("large", make) is not kept.get("large", make)
    first = kept.get(0, lambda: torch.zeros(1))
    for key in range(1, MAX_KEPT + 1):
        kept.get(key, lambda: torch.zeros(1))
    assert kept.get(0, lambda: torch.ones(1)) is not first


def test_a_kernel_is_looked_at_once_for_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *given: calls.append((grid, given))

    class Kernel:
        arg_names = ("a", "b")

        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda **given: calls.append((grid, given)) or Compiled()

    monkeypatch.setattr(launching, "_compiled", {})
    kernel = Kernel()
    for kind in ("x", "x", "y"):
        launch(kernel, 3, kind, {"b": 2, "a": 1, "num_warps": 4})
    whole = {"b": 2, "a": 1, "num_warps": 4}
    assert calls == [((3,), whole), ((3, 1, 1), (1, 2)), ((3,), whole)]


def test_even_addresses() -> None:
    x = torch.zeros(64, dtype=torch.uint8)
    start = -x.data_ptr() % 16
    assert even(x[start:], x[start + 16 :])
    assert not even(x[start:], x[start + 8 :])


@pytest.mark.parametrize("dim", [64, 128])
def test_signs_as_bits_are_where_the_kernels_look(dim: int) -> None:
    signs = torch.where(torch.rand(5, dim, generator=torch.Generator().manual_seed(0)) < 0.5, -1.0, 1.0)
    words = sign_bits(signs)
    for channel in range(dim):
        half, c = divmod(channel, dim // 2)
        j, q, upper = c // 8 + 8 * half, c % 8 // 2, c % 2
        bit = (words[:, q] >> ((31 if upper else 15) - j)) & 1
        assert torch.equal(bit == 1, signs[:, channel] < 0)
