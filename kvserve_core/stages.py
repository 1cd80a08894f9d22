"""What a transform, a quantizer and a codec implement. ``BS = C(Q(T(X)))``, tensors are ``[L, H, T, D]``.

Bind once, then run: ``bind`` checks, loads, allocates and compiles; ``encode`` and ``decode`` assume valid input,
work on the current stream and never synchronise. They must not change their input.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvserve_core.component import Capabilities, ComponentConfig
from kvserve_core.payload import PartMeta
from kvserve_core.spec import KVSpec, Region
from kvserve_core.tensor import Encoded, Params, Part, Quantized, Shape

if TYPE_CHECKING:
    from typing import Self

    from kvserve_core.artefacts import Artefacts


class Stage(ABC):
    """Common part of T, Q and C. ``Config`` is nested in the class; ``reads`` lists the format versions it decodes."""

    Config: ClassVar[type[ComponentConfig]] = ComponentConfig
    caps: Capabilities = Capabilities()  # of the class; an instance may narrow it to what its configuration can do
    format_version: ClassVar[int] = 1
    reads: ClassVar[frozenset[int]] = frozenset({1})

    config: ComponentConfig
    """Annotate it with the nested class in a subclass: ``config: Config``."""
    input_shape: Shape
    """Set before ``bind``: ``[L, H, T, D]`` of a whole cell as this stage will see it, after the transforms before it.
    For a codec, what the quantizer sees."""
    version: int
    """The format version to decode: that of the frame, one of ``reads``; ``format_version`` on the encoding side."""

    def __init__(self, config: ComponentConfig) -> None:
        self.config = config
        self.version = self.format_version

    @classmethod
    def warm_up(cls) -> None:
        """What takes long once in a process: compiling, loading a library. Called when a session starts."""

    def bind(self, at: Region, spec: KVSpec, device: torch.device, artefacts: Artefacts) -> Self:
        """A copy ready for one (plane, layer block, head group); safe on one stream.

        ``at`` spans one whole token cell. Override to check, load, allocate and compile, and call this first.

        Raises:
            UnsupportedSpecError: the stage cannot work there.
            ArtefactError: a calibrated file it needs is missing.
        """
        del at, spec, device, artefacts
        return copy.copy(self)

    @property
    def artefacts(self) -> frozenset[str]:
        """Hashes of the artefacts this configuration reads."""
        return frozenset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"


class Transform(Stage):
    """T: maps values to values that quantize better. Native dtype or f32 in; f32 out (native if exact).

    ``encode`` raises :class:`~kvserve_core.errors.EscapeSegment` for values that it cannot carry well. ``ok``: on a
    device, where that would take a synchronisation, a 0-d bool tensor instead, of the last ``encode``; False escapes.
    """

    ok: Tensor | None = None

    @abstractmethod
    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        """``[L, H, T, D]`` to the transformed tensor and its side tensors. May change H and D."""

    @abstractmethod
    def decode(self, y: Tensor, params: Params, at: Region) -> Tensor:
        """The inverse: ``[L, H, T, D]`` in f32 (native if exact)."""

    def shape(self, x: Shape) -> Shape:
        """Shape of ``encode``'s output for an input of shape ``x``; override when it differs."""
        return x


class Quantizer(Stage):
    """Q: values to small integer codes and side tensors."""

    @abstractmethod
    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` to streams of codes. Codes of a head lie together; parameters are rounded first."""

    @abstractmethod
    def decode(self, q: Quantized, at: Region) -> Tensor:
        """A tensor of ``q.shape``, in f32 (native if exact)."""

    def fuse(self, transforms: Sequence[Transform], codec: Codec, spec: KVSpec, device: torch.device) -> Fusion | None:
        """This chain as one pass over many segments, where there is a kernel for it; see :class:`Fusion`."""
        del transforms, codec, spec, device
        return None


class Codec(Stage):
    """C: streams of codes to fewer bytes. Batched: one call serves the parts of many segments.

    Outputs belong to the caller: a second ``encode`` may come before the sizes of the first are read, so buffers are
    fresh from the allocator and only scratch is kept. ``ok``: for codecs on a device, which cannot raise without a
    synchronisation, a u8 or bool tensor with one flag per blob of the last ``decode``, read after the fence.
    """

    ok: Tensor | None = None

    @abstractmethod
    def bound(self, part: Part) -> int:
        """The most bytes ``encode`` can give for this part."""

    @abstractmethod
    def encode(self, parts: Sequence[Part]) -> Sequence[Encoded]:
        """One result a part, in order. ``data`` has room for at least ``nbytes``."""

    @abstractmethod
    def decode(self, blobs: Sequence[Encoded], like: Sequence[Part]) -> Sequence[Tensor]:
        """Codes again. ``like`` gives alphabet, rows, dtype and length of each (its codes are not read).

        Raises:
            FrameError: a blob does not decode to exactly that length (on a device: its flag in ``ok`` is 0).
        """


@runtime_checkable
class FitsTables(Protocol):
    """A codec class that can fit tables of its own to codes, for ``kvserve calibrate tables``."""

    @staticmethod
    def fitted(
        parts: Callable[[], Iterable[Part]], provenance: Mapping[str, Any], progress: Callable[[int, int], None]
    ) -> bytes:
        """A file of tables, an artefact that the codec's configuration then names, under which ``parts()`` are small.

        parts: asked for several times. provenance: JSON to keep in the file. progress: ``(rounds done, of)``.
        """
        ...


@dataclass(frozen=True)
class Fused:
    """One segment that a fusion encoded: parameters of each stage, streams, and their coded bytes.

    encoded: for a fusion with the codec in it, else None. ok: 0-d bool on the device; False sends the segment through
    the stages one by one. None: nothing can be wrong.
    """

    stages: Sequence[Params]
    quantized: Quantized
    encoded: Sequence[Encoded] | None = None
    ok: Tensor | None = None


class Fusion(ABC):
    """A chain's stages in one pass, over all segments of a batch; what :meth:`Quantizer.fuse` gives.

    No component, and no format of its own: either side may do without it. Codes may differ from those of the stages by
    one level in 1 % of places; decoded values as :mod:`kvserve_core.testing` allows. It works on the current stream
    and never synchronises.
    """

    with_codec: bool = False
    """Whether coded bytes go in and come out, instead of codes."""

    @abstractmethod
    def bind(self, at: Region, transforms: Sequence[Transform], quantizer: Quantizer) -> bool:
        """Prepare a place, with its bound stages; False leaves it to them."""

    @abstractmethod
    def takes(self, x: Tensor, at: Region) -> bool:
        """Whether it can encode this tensor ``[L, H, T, D]``."""

    @abstractmethod
    def encode(self, batch: Sequence[tuple[Region, Tensor]]) -> Sequence[Fused]:
        """What the stages would give for each segment."""

    @abstractmethod
    def reads(self, stages: Sequence[Params], parts: Sequence[PartMeta], at: Region) -> bool:
        """Whether it can decode a segment with these parameters and streams: a peer's, so all of it is checked here."""

    @abstractmethod
    def decode(
        self, batch: Sequence[tuple[Region, Sequence[Params], Sequence[Tensor]]]
    ) -> tuple[Sequence[Tensor], Tensor]:
        """``[L, H, T, D]`` in the plane's dtype, and a bool per segment on the device, as ``Fused.ok``.

        Given are parameters and streams: codes on the device, or with the codec coded bytes. Parameters and coded bytes
        lie where the transport left them, on the host or on the device.
        """
