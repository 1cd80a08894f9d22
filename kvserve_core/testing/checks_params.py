"""Demands on what a transform or quantizer does with a peer's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kvserve_core.errors import FrameError
from kvserve_core.stages import Transform
from kvserve_core.tensor import Params, Quantized
from kvserve_core.testing.cases import Case, case, usual
from kvserve_core.testing.check import VALUES, check
from kvserve_core.testing.subject import Subject, require

MANY = 16
"""Length of an axis that would multiply what is decoded, were it let through."""


def misshapen(x: Tensor) -> Iterator[Tensor]:
    """Its numbers in other shapes: an axis cut to 1, longer by one or in front, all in a row; and one of them often."""
    for axis, count in enumerate(x.shape):
        first = x.narrow(axis, 0, min(count, 1))
        if count > 1:
            yield first
        if count:
            yield torch.cat((x, first), axis)
    yield x[None]
    if x.dim() > 1:
        yield x.flatten()
    if x.numel():
        yield from repeated(x)


def repeated(x: Tensor) -> Iterator[Tensor]:
    """One number of ``x`` along a single axis of ``MANY``: each of its own, and one in front of them."""
    one = x.flatten()[:1]
    for axis in range(x.dim() + 1):
        shape = [1] * (x.dim() + 1)
        shape[axis] = MANY
        for target in (shape, shape[1:]) if axis else (shape,):
            if target != list(x.shape):
                yield one.repeat(MANY).reshape(target)


def refused(subject: Subject, c: Case, made: tuple[Tensor | Quantized, Params], params: Params) -> bool:
    """Whether a fresh instance answers these parameters with a FrameError."""
    stage, value = subject.bound(c.kv, c.at), made[0]
    try:
        if isinstance(value, Quantized):
            stage.decode(replace(value, params=params), c.at)
        else:
            stage.decode(value, params, c.at)
    except FrameError:
        return True
    return False


def swapped(params: Params) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """``params`` with one of them misshapen, and in words which and how."""
    for name, x in params.items():
        for other in misshapen(x):
            yield f"{name!r} {list(other.shape)} instead of {list(x.shape)}", {**params, name: other}


@check(*VALUES)
def parameter_shapes(subject: Subject) -> None:
    """Parameters of another shape, which might broadcast, are refused with a FrameError while decoding."""
    for tokens in (17, 256):
        c = case(subject, usual(subject), tokens)
        stage = subject.bound(c.kv, c.at)
        made = stage.encode(c.x, c.at)
        pair = made if isinstance(stage, Transform) else (made, made.params)
        for what, params in swapped(pair[1]):
            require(refused(subject, c, pair, params), f"parameter {what} was decoded; raise FrameError")
