"""Calibrated decorrelation of a block of layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import Capabilities, ComponentConfig, Tunable
from kvserve_core.errors import DriftError, UnsupportedSpecError
from kvserve_core.spec import KVSpec, PlanePart, Region
from kvserve_core.stages import Transform
from kvserve_core.tensor import Params, Shape
from kvserve_plugins.kernels import basis as bases
from kvserve_plugins.kernels import rope
from kvserve_plugins.kernels.basis import Basis, BasisFile
from kvserve_plugins.kernels.hadamard import gemm_is_exact


class KLT(Transform):
    """Projects a block of layers onto the calibrated components that carry its variance.

    ``[L, H, T, D]`` to ``[1, 1, T, rank]`` in f32, components by falling sigma. Keys are turned back by their
    positions, the calibrated mean is subtracted, channels are multiplied by the root of a sensitivity metric, and the
    result is projected on the eigenvectors of its covariance (one matrix product), so that one quantizer step serves
    all components: reverse water-filling. With a basis ``per`` head the components of each head stand side by side,
    and any heads can be encoded together; ``all`` covers all heads at once and takes them only together.

    Values whose energy outside the kept components is more than ``drift_limit`` times that of texts of the calibrated
    kind which the basis was not made from (the 95 % quantile of their cells) are not what it is for: DriftError on a
    CPU, ``ok`` false elsewhere. Bases come from ``kvserve calibrate klt``. See
    Cover and Thomas, Elements of Information Theory, section 10.3.3; KVQuant, arXiv 2401.18079, for the Fisher metric.
    """

    class Config(ComponentConfig):
        """basis: blake3 of the file; per: as it was calibrated, so that the cut is known without reading it.

        cutoff: components with a smaller sigma are left out (0.12 of the quantizer's step costs nothing that can be
        measured); rank: keep this many instead. drift_limit: None never escapes. undo_rope: False behind ``derope``.
        """

        basis: str = Field(pattern=r"^[0-9a-f]{64}$")
        per: Literal["head", "all"] = "head"
        cutoff: float = Tunable(0.0, low=1e-4, high=10.0, log=True, ge=0, allow_inf_nan=False)
        rank: int | None = Field(None, ge=1)
        drift_limit: float | None = Field(2.0, gt=0, allow_inf_nan=False)
        undo_rope: bool = True

    config: Config
    caps = Capabilities(
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=frozenset({"k", "v", "kv"}),
        artefacts=True,
    )

    bases: tuple[Basis, ...]
    each: int  # heads a basis
    _parts: tuple[PlanePart, ...]

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.caps = replace(type(self).caps, head_local=config.per == "head")

    @property
    def artefacts(self) -> frozenset[str]:
        """The basis."""
        return frozenset({self.config.basis})

    def bind(self, at: Region, spec: KVSpec, device: torch.device, artefacts: Artefacts) -> Self:
        """Take the bases of these layers and heads from the artefact; they stay on the device with it.

        Raises:
            UnsupportedSpecError: they were calibrated for other layers, heads, sizes or positions.
            ArtefactError: the basis is not here, or not a basis.
        """
        bound = super().bind(at, spec, device, artefacts)
        config = self.config
        file = artefacts.memo(("klt", config.basis), lambda: bases.parse(artefacts.read(config.basis)))
        bound._parts = spec.group(at.group).plane(at.plane).parts
        _check_file(file, config, at, sum(part.dim for part in bound._parts))
        bound.each = 1 if config.per == "head" else len(at.heads)
        # An engine may have allowed products in bf16; components would be off by several steps.
        dtype = torch.float64 if device.type == "cpu" and not gemm_is_exact() else torch.float32
        found = []
        for i in range(0, len(at.heads), bound.each):
            index = file.find(at.layers, at.heads[i : i + bound.each])
            _check_rope(file.blocks[index].rope, bound._parts, config.undo_rope)
            key = ("klt", config.basis, index, config.cutoff, config.rank, device, dtype)
            found.append(artefacts.memo(key, partial(_prepare, file, index, config, device, dtype)))
        bound.bases = tuple(found)
        return bound

    def shape(self, x: Shape) -> Shape:
        """``(1, 1, T, rank)``."""
        return 1, 1, x[2], sum(basis.rank for basis in self.bases)

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        """``[L, H, T, D]`` to ``[1, 1, T, rank]``.

        Raises:
            DriftError: on a CPU, values unlike the calibrated ones.
        """
        plain = rope.undo(x, self._parts, at.start) if self.config.undo_rope else x
        encoded = [basis.encode(_rows(h, basis)) for h, basis in self._heads(plain)]
        self._guard([outside.abs() / basis.drift for (_, outside), basis in zip(encoded, self.bases, strict=True)], at)
        return torch.cat([y.float() for y, _ in encoded], -1)[None, None], {}

    def decode(self, y: Tensor, params: Params, at: Region) -> Tensor:
        """``[1, 1, T, rank]`` to ``[L, H, T, D]`` in f32."""
        pieces = torch.split(y[0, 0], [basis.rank for basis in self.bases], -1)
        plain = torch.cat(
            [
                _block(basis.decode(piece.to(basis.to.dtype)).float(), len(at.layers), self.each)
                for piece, basis in zip(pieces, self.bases, strict=True)
            ],
            1,
        )
        return rope.apply(plain, self._parts, at.start) if self.config.undo_rope else plain

    def _heads(self, x: Tensor) -> list[tuple[Tensor, Basis]]:
        return list(zip(torch.split(x, self.each, 1), self.bases, strict=True))

    def _guard(self, drift: list[Tensor], at: Region) -> None:
        limit = self.config.drift_limit
        if limit is None or at.num_tokens == 0:
            return
        worst = torch.stack(drift).amax()
        if worst.device.type != "cpu":
            self.ok = worst <= limit
        elif not bool(worst <= limit):
            raise DriftError(
                f"{at}: the energy outside the kept components is {float(worst):.3g} times that of held-out texts, the"
                f" limit is {limit:g}; calibrate on such data, raise 'drift_limit', or let this segment go raw"
            )


def _rows(x: Tensor, basis: Basis) -> Tensor:
    """``[L, H, T, D]`` to ``[T, L * H * D]`` in the basis' dtype."""
    return x.permute(2, 0, 1, 3).flatten(1).to(basis.to.dtype)


def _block(rows: Tensor, layers: int, heads: int) -> Tensor:
    """The inverse of :func:`_rows`."""
    tokens, n = rows.shape
    return rows.reshape(tokens, layers, heads, n // (layers * heads)).permute(1, 2, 0, 3)


def _prepare(file: BasisFile, index: int, config: KLT.Config, device: torch.device, dtype: torch.dtype) -> Basis:
    return bases.prepare(file, index, config.cutoff, config.rank, device, dtype)


def _check_file(file: BasisFile, config: KLT.Config, at: Region, dim: int) -> None:
    if file.per != config.per:
        raise UnsupportedSpecError(f"the basis was calibrated per {file.per!r}, not per {config.per!r}; set 'per'")
    if (file.plane, file.dim) != (at.plane, dim):
        raise UnsupportedSpecError(
            f"the basis is for plane {file.plane!r} of {file.dim} channels, not for {at.plane!r} of {dim}; name that"
            " plane in the pipeline, or calibrate again"
        )


def _check_rope(turned: tuple[bool, ...], parts: tuple[PlanePart, ...], undo: bool) -> None:
    here = tuple(part.rope is not None for part in parts)
    if undo and turned != here:
        raise UnsupportedSpecError(
            f"the basis was calibrated with positions undone in parts {turned}, this model's embeddings are known in"
            f" parts {here}; calibrate again on this model"
        )
