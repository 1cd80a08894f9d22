from __future__ import annotations

import pytest
import torch

from kvserve_core.component import Capabilities, ComponentConfig
from kvserve_core.spec import DType
from kvserve_core.stages import Transform
from kvserve_plugins.kernels import hadamard as kernel
from kvserve_plugins.transforms.hadamard import Hadamard
from kvserve_plugins.transforms.identity import Identity
from plugins.stage_checks import (
    bind,
    check_config,
    check_deterministic,
    check_head_slices,
    check_transform,
    model,
    place,
    values,
)


def identity() -> Identity:
    return Identity(Identity.Config())


def hadamard(seed: int = 0x3333) -> Hadamard:
    return Hadamard(Hadamard.Config(seed=seed))


MAKERS = [identity, hadamard]


@pytest.mark.parametrize("make", MAKERS)
def test_round_trip(make: type[Transform]) -> None:
    check_transform(make)


@pytest.mark.parametrize("make", MAKERS)
def test_slices_and_repeats(make: type[Transform]) -> None:
    check_head_slices(make)
    check_deterministic(make)
    check_config(make())


def test_rotation_keeps_lengths_and_spreads_an_outlier() -> None:
    x, at = torch.zeros(3, 4, 17, 128), place(17)
    x[..., 5] = 128.0
    y, params = bind(hadamard(), model(DType.F32, 128), at).encode(x, at)
    assert params == {}
    torch.testing.assert_close(y.abs(), torch.full_like(y, 128 / 128**0.5))


def test_pieces_do_not_mix() -> None:
    x, at = torch.zeros(3, 4, 17, 96), place(17)
    x[..., 70] = 1.0
    y, _ = bind(hadamard(), model(DType.F32, 96), at).encode(x, at)
    assert y[..., :64].count_nonzero() == 0
    torch.testing.assert_close(y[..., 64:].abs(), torch.full((3, 4, 17, 32), 32**-0.5))


def test_the_seed_and_the_global_indices_choose_the_signs() -> None:
    x, at = values("normal", DType.BF16, 17, 64), place(17)
    y = bind(hadamard(), model(), at).encode(x, at)[0]
    assert not torch.equal(bind(hadamard(1), model(), at).encode(x, at)[0], y)
    moved = place(17, layers=(2, 1, 0))
    assert not torch.equal(bind(hadamard(), model(), moved).encode(x, moved)[0], y)


def test_large_values_stay_finite_up_to_the_documented_limit() -> None:
    x, at = torch.full((3, 4, 17, 64), 5.3e36), place(17)
    stage = bind(hadamard(), model(DType.F32), at)
    y, _ = stage.encode(x, at)
    assert y.isfinite().all()
    torch.testing.assert_close(stage.decode(y, {}, at), x)


def test_falls_back_to_butterflies_where_products_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    x, at = values("normal", DType.BF16, 256, 128), place(256)
    fast = bind(hadamard(), model(dim=128), at)
    monkeypatch.setattr("kvserve_plugins.transforms.hadamard.gemm_is_exact", lambda: False)
    slow = bind(hadamard(), model(dim=128), at)
    expected = kernel.butterflies(x * slow._signs)
    assert torch.equal(slow.encode(x, at)[0], expected)
    torch.testing.assert_close(fast.encode(x, at)[0], expected)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        Hadamard.Config(seed=-1)


def test_instances_keep_the_class_capabilities() -> None:
    assert hadamard().caps is Hadamard.caps
    assert Capabilities().exact is False
    assert isinstance(hadamard().config, ComponentConfig)
