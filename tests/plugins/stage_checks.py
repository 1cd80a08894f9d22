"""The conformance kit's checks for stages made by a test itself, with bounds that only that test knows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.component import Kind
from kvserve_core.spec import KVSpec, Region
from kvserve_core.stages import Codec, Quantizer, Stage, Transform
from kvserve_core.tensor import Quantized
from kvserve_core.testing import Subject
from kvserve_core.testing.cases import Case, by_dim, by_tokens, by_value
from kvserve_core.testing.catalogue import checks_for
from kvserve_core.testing.data import FLOATS, HEADS, LAYERS, any_bits, codes, model, place, same_bits, shell, values

__all__ = [
    "FLOATS", "HEADS", "LAYERS", "any_bits", "bind", "check_codec", "check_config", "check_deterministic",
    "check_exact_bits", "check_head_slices", "check_quantizer", "check_transform", "codes", "model", "place",
    "same_bits", "shell", "values",
]  # fmt: skip

CPU = torch.device("cpu")
StageT = TypeVar("StageT", bound=Stage)
Bound = Callable[[Tensor, Quantized, Tensor], Tensor]


def bind(stage: StageT, spec: KVSpec, at: Region, artefacts: Artefacts = NONE) -> StageT:
    return stage.bind(at, spec, CPU, artefacts)


def subject(make: Callable[[], Any], artefacts: Artefacts = NONE) -> Subject:
    """A stage that no registry knows."""
    stage = make()
    kinds: dict[type[Stage], Kind] = {Transform: "transform", Quantizer: "quantizer", Codec: "codec"}
    kind = next(k for base, k in kinds.items() if isinstance(stage, base))
    return Subject(kind, type(stage).__name__, make, artefacts=artefacts)


def run(on: Subject, *names: str) -> None:
    """The named checks, or all that apply."""
    chosen = [c for c in checks_for(on) if not names or c.name in names]
    assert {c.name for c in chosen} >= set(names), f"{names} do not all apply"
    for each in chosen:
        each(on)


def check_transform(make: Callable[[], Transform], tolerance: float = 2e-6) -> None:
    """All checks of a transform, with an error of at most ``tolerance`` times the norm of a row."""

    def limit(x: Tensor, _: object) -> Tensor:
        return tolerance * x.norm(dim=-1, keepdim=True)

    run(replace(subject(make), max_error=limit))


def check_quantizer(make: Callable[[], Quantizer], bound: Bound | None = None) -> None:
    """All checks of a quantizer, and ``|x - x'| <= bound(x, q, x')`` if given."""
    made = subject(make)
    run(made if bound is None else replace(made, max_error=lambda *_: torch.inf))
    if bound is not None:
        for cases in (by_value, by_dim, by_tokens):
            for c in cases(made):
                _within(made, c, bound)


def _within(made: Subject, c: Case, bound: Bound) -> None:
    stage = made.bound(c.kv, c.at)
    q = stage.encode(c.x, c.at)
    back = stage.decode(q, c.at)
    assert ((back - c.x.float()).abs() <= bound(c.x.float(), q, back.float())).all(), str(c)


def check_exact_bits(make: Callable[[], Quantizer]) -> None:
    run(subject(make), "every_bit_pattern")


def check_head_slices(make: Callable[[], Transform | Quantizer], artefacts: Artefacts = NONE) -> None:
    run(subject(make, artefacts), "head_slices", "layer_slices")


def check_deterministic(make: Callable[[], Transform | Quantizer]) -> None:
    run(subject(make), "deterministic")


def check_config(stage: Stage) -> None:
    run(subject(lambda: copy.copy(stage)), "configuration", "format_versions")
    with pytest.raises(ValueError, match="frozen"):
        stage.config.no_such_field = 1


def check_codec(codec: Codec) -> None:
    run(subject(lambda: copy.copy(codec)))
