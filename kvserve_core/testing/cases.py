"""The inputs of a transform or quantizer: each axis varied once, not every combination."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from kvserve_core.component import Capabilities
from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import COMPOSITE, SEGMENT_TOKENS, DType, KVSpec, Region
from kvserve_core.stages import Quantizer
from kvserve_core.tensor import TORCH
from kvserve_core.testing.data import DIMS, KINDS, START, TOKENS, filled, model
from kvserve_core.testing.subject import Subject

PLANES = ("k", "v", "kv", "latent", "rope", "mla")


class Case(NamedTuple):
    """One input: a model, a place in it, and its tensor ``[L, H, T, D]``."""

    kind: str
    kv: KVSpec
    at: Region
    x: Tensor

    def __str__(self) -> str:
        return f"{self.kind} values, {str(self.x.dtype).removeprefix('torch.')} {list(self.x.shape)}, {self.at}"


def planes(caps: Capabilities) -> list[str]:
    """The planes to try a stage on: those it names, or the usual ones."""
    return list(PLANES) if "*" in caps.planes else sorted(caps.planes)


def plane(caps: Capabilities) -> str:
    """The plane that most checks use: ``k`` where it is supported."""
    known = planes(caps)
    return "k" if "k" in known else known[0]


def dtypes(subject: Subject) -> list[DType]:
    """Plane dtypes to try, bf16 first."""
    order = [d for d in DType if d in subject.caps.dtypes]
    lossy_only_floats = [d for d in order if d.is_float]
    return order if subject.caps.exact else lossy_only_floats


def seen(subject: Subject, dtype: DType) -> list[DType]:
    """What stands before a stage on such a plane: the plane's own dtype, and f32 if a lossy transform may."""
    after_transform = subject.stage_is(Quantizer) and not subject.caps.exact and DType.F32 in subject.caps.dtypes
    return [dtype, DType.F32] if after_transform and dtype != DType.F32 else [dtype]


def whole_tokens(caps: Capabilities, tokens: int) -> int:
    """``tokens`` cut to the multiple that the stage needs, at least one of it unless 0."""
    each = caps.token_multiple
    return max(tokens // each, min(tokens, 1)) * each


def case(subject: Subject, kind: str = "normal", tokens: int = 17, dtype: DType | None = None, **shape: object) -> Case:
    """An input for ``subject``; ``dim`` and ``plane`` only where no model was given."""
    caps = subject.caps
    chosen = dtype or dtypes(subject)[0]
    name = str(shape.get("plane", plane(caps)))
    kv = subject.model or model(chosen, int(str(shape.get("dim", 64))), name)
    group = kv.groups[0]
    if subject.model is not None:
        name = subject.plane or _plane_of(subject.model, caps)
    found = group.plane(name)
    count = whole_tokens(caps, tokens)
    at = Region(group.id, name, group.layers, tuple(range(found.num_heads)), START, START + count)
    return Case(kind, kv, at, made(subject, kind, kv, at).to(subject.device))


def made(subject: Subject, kind: str, kv: KVSpec, at: Region) -> Tensor:
    """``[L, H, T, D]`` of one kind; normal are, for a calibrated component, those that it is for."""
    if subject.sample and kind == "normal":
        return subject.sample(at, kv)
    found = kv.group(at.group).plane(at.plane)
    return filled(kind, found.dtype, (len(at.layers), len(at.heads), at.num_tokens, found.dim), seed=at.start)


def _plane_of(kv: KVSpec, caps: Capabilities) -> str:
    names = {p.name for p in kv.groups[0].planes}
    joined = [c for c, members in COMPOSITE.items() if names.issuperset(members)]
    for name in (*sorted(names), *joined):
        if "*" in caps.planes or name in caps.planes:
            return name
    raise UnsupportedSpecError(f"the given model has planes {sorted(names)}, none of {sorted(caps.planes)}")


def usual(subject: Subject) -> str:
    """The kind of values that most is learned from: with outliers, unless a component is calibrated on others."""
    return "normal" if subject.sample else "outlier"


def by_value(subject: Subject) -> Iterator[Case]:
    """Every kind of values in every dtype, native and as f32 behind a transform."""
    for dtype in [None] if subject.model else dtypes(subject):
        for kind in KINDS:
            c = case(subject, kind, dtype=dtype)
            own = DType(str(c.x.dtype).removeprefix("torch."))
            yield from (c._replace(x=c.x.to(TORCH[d])) for d in seen(subject, own))


def by_dim(subject: Subject) -> Iterator[Case]:
    """Head dims from 32 to 576; those of a given model only."""
    yield from (case(subject, dim=dim) for dim in ((64,) if subject.model else DIMS))


def by_tokens(subject: Subject) -> Iterator[Case]:
    """No token, one, a part of a cell, and a whole one."""
    counts = sorted({whole_tokens(subject.caps, tokens) for tokens in TOKENS})
    kind = usual(subject)
    yield from (case(subject, kind, tokens) for tokens in counts if tokens <= SEGMENT_TOKENS)


def by_plane(subject: Subject) -> Iterator[Case]:
    """Every plane that the stage says it works on."""
    yield from (case(subject, plane=name) for name in ([""] if subject.model else planes(subject.caps)))
