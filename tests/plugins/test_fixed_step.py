from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvserve_core.component import tunables
from kvserve_core.errors import FrameError, NonFiniteError
from kvserve_core.spec import DType
from kvserve_core.tensor import Part, Quantized
from kvserve_plugins.quantizers.fixed_step import FixedStep
from plugins.stage_checks import bind, model, place, same_bits, values

AT = place(17)


def fixed_step(**config: object) -> FixedStep:
    return bind(FixedStep(FixedStep.Config.model_validate(config)), model(), AT)


def coded(stage: FixedStep, x: Tensor) -> tuple[Quantized, Tensor]:
    q = stage.encode(x, AT)
    return q, stage.decode(q, AT)


def line(*numbers: float) -> Tensor:
    """``[1, 1, tokens, 1]``."""
    return torch.tensor(numbers).reshape(1, 1, -1, 1)


@pytest.mark.parametrize("step", [0.003, 0.1, 0.25])
@pytest.mark.parametrize(("dead_zone", "offset"), [(0.0, 0.0), (0.2, 0.0), (0.1, 0.05), (0.0, -0.1)])
def test_error_bound(step: float, dead_zone: float, offset: float) -> None:
    x = values("normal", DType.F32, 17, 64)
    _, back = coded(fixed_step(step=step, dead_zone=dead_zone, offset=offset), x)
    limit = step * (0.5 + dead_zone + abs(offset)) * (1 + 1e-6) + 2**-22 * x.abs()
    assert ((back - x).abs() <= limit).all()


@given(st.floats(-16000, 16000, width=32), st.floats(2**-20, 2**20, width=32))
@settings(max_examples=300, deadline=None)
def test_error_bound_up_to_the_last_code(steps: float, step: float) -> None:
    x = line(steps) * step
    _, back = coded(fixed_step(step=step), x)
    assert float((back - x).abs()) <= step / 2 + 2**-22 * float(x.abs())


def test_one_stream_is_component_major() -> None:
    x = torch.arange(2 * 3 * 5 * 4, dtype=torch.float32).reshape(2, 3, 5, 4) - 60
    q = fixed_step(step=1.0).encode(x, AT)
    (part,) = q.parts
    assert (part.rows, part.alphabet, part.codes.dtype, q.params) == (24, 255, torch.uint8, {})
    rows = part.codes.view(24, 5).to(torch.float32) - 127
    assert torch.equal(rows, x.permute(0, 1, 3, 2).reshape(24, 5))


@pytest.mark.parametrize(("largest", "alphabet"), [(127, 255), (128, 32767), (16383, 32767)])
@pytest.mark.parametrize("sign", [-1, 1])
def test_alphabet_follows_the_largest_code(largest: int, alphabet: int, sign: int) -> None:
    q, back = coded(fixed_step(step=0.5), line(0.0, sign * largest * 0.5, 3.0))
    assert q.parts[0].alphabet == alphabet
    assert q.parts[0].codes.dtype == (torch.uint8 if alphabet == 255 else torch.int16)
    assert back.flatten().tolist() == [0.0, sign * largest * 0.5, 3.0]


@pytest.mark.parametrize("bad", [16384.0, -16384.0, float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_has_no_code_is_refused(bad: float) -> None:
    with pytest.raises(NonFiniteError, match="larger 'step'"):
        fixed_step(step=1.0).encode(line(0.0, bad), AT)


def test_dead_zone_widens_zero_only() -> None:
    x = line(0.49, 0.59, 0.61, 1.49, -0.59, -0.61, 1.51)
    _, back = coded(fixed_step(step=1.0, dead_zone=0.1), x)
    assert back.flatten().tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, -1.0, 2.0]


def test_offset_moves_outwards_and_leaves_zero() -> None:
    _, back = coded(fixed_step(step=2.0, offset=0.25), line(0.0, 2.0, -4.0))
    assert back.flatten().tolist() == [0.0, 2.5, -4.5]


def test_step_is_rounded_to_f32() -> None:
    config = FixedStep.Config(step=0.1)
    assert config.step == float(torch.tensor(0.1))
    assert FixedStep.Config.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("config", [{"step": 0}, {"step": -1}, {"step": 1e39}, {"step": 1e-45}, {"dead_zone": 0.6}])
def test_configurations_out_of_range(config: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(config))):
        FixedStep.Config.model_validate(config)


def test_the_step_is_searched_on_a_logarithmic_range() -> None:
    assert tunables(FixedStep.Config)["step"].log
    assert set(tunables(FixedStep.Config)) == {"step", "dead_zone", "offset"}


@pytest.mark.parametrize("alphabet", [2, 254, 256])
def test_another_alphabet_is_a_frame_error(alphabet: int) -> None:
    part = Part(torch.zeros(8, dtype=torch.uint8), alphabet, 4)
    with pytest.raises(FrameError, match="255 or 32767"):
        fixed_step().decode(Quantized((part,), {}, (1, 1, 2, 4)), AT)


def test_streams_missing_or_extra_are_a_frame_error() -> None:
    part = Part(torch.zeros(8, dtype=torch.uint8), 255, 4)
    for parts in ((), (part, part)):
        with pytest.raises(FrameError, match="one stream"):
            fixed_step().decode(Quantized(parts, {}, (1, 1, 2, 4)), AT)


def test_layers_and_tokens_do_not_mix() -> None:
    x = values("normal", DType.F32, 17, 64)
    _, whole = coded(fixed_step(), x)
    _, tail = coded(fixed_step(), x[1:, :, 5:])
    assert same_bits(tail, whole[1:, :, 5:])
