"""Interleaved rANS under published integer tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ANY, Capabilities, ComponentConfig
from kvserve_core.errors import FrameError
from kvserve_core.spec import KVSpec, Region
from kvserve_core.stages import Codec
from kvserve_core.tensor import Encoded, Part
from kvserve_plugins.kernels import rans_file, rans_fit
from kvserve_plugins.kernels.blobs import blob_of, payload
from kvserve_plugins.kernels.fused_rotation import available
from kvserve_plugins.kernels.rans_device import Kernels
from kvserve_plugins.kernels.rans_native import native
from kvserve_plugins.kernels.rans_pack import pack
from kvserve_plugins.kernels.rans_set import PUBLISHED, TableSet
from kvserve_plugins.kernels.rans_unpack import Reader

AT_ONCE = 1 << 22
"""Codes in one run over all lanes; it bounds the working memory (about 16 bytes a code)."""
MAX_PARTS = 4096


class Rans(Codec):
    """Entropy coder for centred codes: interleaved rANS under 64 tables, published or own.

    A part is a matrix ``[rows, columns]`` of codes centred at ``(alphabet - 1) // 2``. Each row gets a rung of a ladder
    of scales, each column an offset on it, each rung a shape (Laplace, logistic, Gaussian); rows of zeros cost next to
    nothing, wide rows send low bits as they are. Meant for ``klt`` + ``fixed_step``: all metadata counted, it is within
    1.5 % of the tables' cross-entropy. Integers only: every decoder gives the same codes. To the bit:
    ``docs/rans-format.md``. The parts of a batch are coded together, several times as fast as one by one. On a GPU with
    Triton kernels code them, which take more lanes: a part for a program, so that batches want many parts.
    A model's own tables (``kvserve calibrate tables``) may stand in for the published ones.
    """

    class Config(ComponentConfig):
        """tables: blake3 of a file of tables; the published ones without it."""

        tables: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")

    config: Config
    caps = Capabilities(
        exact=True,
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        head_local=True,
        layer_local=True,
        max_alphabet=2**15,
    )
    _tables: TableSet = PUBLISHED
    _device: torch.device = torch.device("cpu")
    _kernels: Kernels | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.caps = replace(type(self).caps, artefacts=config.tables is not None)

    @property
    def artefacts(self) -> frozenset[str]:
        """The tables, if they are a model's own."""
        return frozenset([self.config.tables] if self.config.tables else [])

    @classmethod
    def warm_up(cls) -> None:
        """Compile the loops."""
        native()

    def bind(self, at: Region, spec: KVSpec, device: torch.device, artefacts: Artefacts) -> Self:
        """Read the tables.

        Raises:
            ArtefactError: they are not here, or are not tables. UnavailableComponentError: safetensors is missing.
        """
        bound = super().bind(at, spec, device, artefacts)
        if (digest := self.config.tables) is not None:
            bound._tables = artefacts.memo(("rans", digest), lambda: rans_file.parse(artefacts.read(digest)))
        bound._device = device
        bound._kernels = Kernels(bound._tables, device) if available(device) else None
        return bound

    def _here(self, x: Tensor) -> bool:
        """A chain may be bound to ``cuda``, its tensors lie on ``cuda:0``."""
        return x.device.type == self._device.type

    @staticmethod
    def fitted(
        parts: Callable[[], Iterable[Part]], provenance: Mapping[str, Any], progress: Callable[[int, int], None]
    ) -> bytes:
        """A file of tables under which the codes of ``parts()``, asked for several times, are small."""

        def centred() -> Iterator[NDArray[np.int32]]:
            return (_centred(part) for part in parts() if part.codes.numel())

        return rans_file.write(rans_fit.fitted(centred, progress), provenance)

    def bound(self, part: Part) -> int:
        """8 bytes a code, row and column; a code takes at most 12 + 12 + 15 + 12 bits."""
        rows = min(part.rows, part.codes.numel())
        return 64 + 8 * (part.codes.numel() + rows + part.codes.numel() // max(rows, 1)) if rows else 0

    def encode(self, parts: Sequence[Part]) -> Sequence[Encoded]:
        """One blob a part; none for a part without codes. On a GPU sizes stay there."""
        if self._kernels is not None and all(self._here(p.codes) for p in parts):
            return self._kernels.encode(parts, [_shape(p) for p in parts])
        parts = [replace(p, codes=p.codes.cpu()) for p in parts]
        blobs = [b""] * len(parts)
        for group in _groups(parts):
            for i, data in zip(group, pack([_centred(parts[i]) for i in group], self._tables), strict=True):
                blobs[i] = data
        return [blob_of(b) for b in blobs]

    def decode(self, blobs: Sequence[Encoded], like: Sequence[Part]) -> Sequence[Tensor]:
        """The codes again.

        Raises:
            FrameError: a blob that does not decode to exactly that part, or holds more. On a GPU: bytes for a part
                without codes, and all else is left in ``ok``, 1 or 0 a blob.
        """
        given = [payload(b) for b in blobs]
        if any(d.numel() and not p.codes.numel() for d, p in zip(given, like, strict=True)):
            raise FrameError("codec 'rans' got bytes for a part without codes")
        if self._kernels is not None and all(self._here(d) for d in given):
            codes, self.ok = self._kernels.decode(given, like, [_shape(p) for p in like])
            return codes
        self.ok = None
        data = [d.cpu().contiguous().numpy() for d in given]
        out = [torch.empty(p.codes.numel(), dtype=p.codes.dtype) for p in like]
        for group in _groups(like):
            reader = Reader([data[i] for i in group], [_shape(like[i]) for i in group], self._tables)
            for i, q in zip(group, reader.parts(), strict=True):
                out[i] = _codes(q, like[i])
        return [codes.to(self._device) for codes in out]


def _groups(parts: Sequence[Part]) -> Iterator[list[int]]:
    """Indices of parts with codes, in runs of bounded size."""
    group: list[int] = []
    total = 0
    for i, part in enumerate(parts):
        size = part.codes.numel()
        if group and (total + size > AT_ONCE or len(group) == MAX_PARTS):
            yield group
            group, total = [], 0
        if size:
            group.append(i)
            total += size
    if group:
        yield group


def _shape(part: Part) -> tuple[int, int]:
    """``(rows, columns)``; what cannot be cut into equal rows is one row."""
    count = part.codes.numel()
    return (part.rows, count // part.rows) if count % part.rows == 0 else (1, count)


def _centred(part: Part) -> NDArray[np.int32]:
    return part.codes.numpy().astype(np.int32).reshape(_shape(part)) - (part.alphabet - 1) // 2


def _codes(q: NDArray[np.int32], like: Part) -> Tensor:
    q += (like.alphabet - 1) // 2
    if q.min() < 0 or q.max() >= like.alphabet:
        raise FrameError(f"codec 'rans' got codes outside an alphabet of {like.alphabet}")
    return torch.from_numpy(q.reshape(-1).astype(np.uint8 if like.codes.dtype is torch.uint8 else np.int16))
