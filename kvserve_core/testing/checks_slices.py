"""Demands on stages that say they work head by head or layer by layer: a slice gives the bits of the whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from kvserve_core.stages import Transform
from kvserve_core.testing.cases import Case, case, usual
from kvserve_core.testing.check import VALUES, check
from kvserve_core.testing.data import same_bits
from kvserve_core.testing.subject import Subject, require, through

COUNTS = (1, 2, 4)


def head_local(subject: Subject) -> bool:
    """Whether slicing heads commutes with encoding."""
    return subject.caps.head_local


def layer_local(subject: Subject) -> bool:
    """Whether slicing layers commutes with encoding."""
    return subject.caps.layer_local


def cut(c: Case, layers: Iterable[int], heads: Iterable[int]) -> Case:
    """The input of a few layers and heads, by position."""
    rows, columns = list(layers), list(heads)
    at = replace(c.at, layers=tuple(c.at.layers[i] for i in rows), heads=tuple(c.at.heads[i] for i in columns))
    return c._replace(at=at, x=c.x[rows][:, columns])


def results(subject: Subject, c: Case) -> tuple[Tensor, Tensor | None]:
    """The values decoded again and, of a transform that keeps layers and heads, what it encodes to."""
    stage = subject.bound(c.kv, c.at)
    back = through(stage, c.x, c.at)
    y = stage.encode(c.x, c.at)[0] if isinstance(stage, Transform) else None
    return back, y if y is not None and y.shape[:3] == c.x.shape[:3] else None


def same_when_cut(subject: Subject, c: Case, cuts: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Each cut of ``c`` gives the bits that it has in the whole.

    Raises:
        CheckFailed: one does not. UnsupportedSpecError: the stage refuses the whole block, or one cut of it.
    """
    whole = results(subject, c)
    for layers, heads in cuts:
        part = cut(c, layers, heads)
        for name, full, got in zip(("decoded", "encoded"), whole, results(subject, part), strict=True):
            if full is not None and got is not None:
                due = full[list(layers)][:, list(heads)]
                require(same_bits(got, due), f"layers {layers} heads {heads} alone {name} to other bits ({part})")


def groups(count: int, pieces: int) -> list[tuple[int, ...]]:
    """``range(count)`` in ``pieces`` equal runs."""
    each = count // pieces
    return [tuple(range(i * each, (i + 1) * each)) for i in range(pieces)]


@check(*VALUES, when=head_local)
def head_slices(subject: Subject) -> None:
    """1, 2 or 4 head groups, and heads in any order, give the same bits (caps.head_local)."""
    for tokens in (1, 17, 256):
        c = case(subject, usual(subject), tokens)
        layers, heads = tuple(range(len(c.at.layers))), len(c.at.heads)
        cuts = [(layers, g) for n in COUNTS if heads % n == 0 for g in groups(heads, n)]
        cuts.append((layers, tuple(reversed(range(heads)))))
        same_when_cut(subject, c, cuts)


@check(*VALUES, when=layer_local)
def layer_slices(subject: Subject) -> None:
    """Any layers of a block give the bits that they have in the block (caps.layer_local)."""
    for tokens in (1, 17, 256):
        c = case(subject, usual(subject), tokens)
        count, heads = len(c.at.layers), tuple(range(len(c.at.heads)))
        chosen = [*((i,) for i in range(count)), tuple(range(0, count, 2))]
        cuts = [(layers, heads) for layers in chosen]
        same_when_cut(subject, c, cuts)
