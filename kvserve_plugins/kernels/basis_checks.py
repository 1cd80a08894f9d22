"""What must hold of a file of calibrated bases before values are projected on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 0.02
"""Of a squared length: what rounding orthonormal columns to f16 can change it by, with a margin."""
PROBES = 4


def check_about(about: Mapping[str, Any]) -> None:
    """The file's own description: names, sizes and the places of its blocks.

    Raises:
        ValueError: a field is of another type or value. KeyError: one is missing.
    """
    plane, dim, per = about["plane"], about["dim"], about["per"]
    if not isinstance(plane, str) or type(dim) is not int or dim < 1:
        raise ValueError(f"'plane' is {plane!r} and 'dim' {dim!r}, expected a name and a number above 0")
    if per not in ("head", "all"):
        raise ValueError(f"'per' is {per!r}, expected 'head' or 'all'")
    if not isinstance(about["blocks"], list) or not about["blocks"]:
        raise ValueError("'blocks' must be a list of at least one block")
    for block in about["blocks"]:
        for key, kind in (("layers", int), ("heads", int), ("rope", bool)):
            if not isinstance(block[key], list) or not block[key] or any(type(x) is not kind for x in block[key]):
                raise ValueError(f"{key!r} of a block is {block[key]!r}, expected a list of {kind.__name__}")


def check_tensors(i: int, n: int, tensors: Mapping[str, Tensor]) -> None:
    """The tensors of block ``i`` over ``n`` channels.

    Raises:
        ValueError: a shape, dtype or value that no calibration writes. KeyError: a tensor is missing.
    """
    basis, sigma = tensors[f"{i}.basis"], tensors[f"{i}.sigma"]
    r = len(sigma) if sigma.dim() == 1 else 0
    if not 1 <= r <= n:
        raise ValueError(f"tensor '{i}.sigma' is {list(sigma.shape)}, expected one axis of 1 to {n} components")
    shapes: dict[str, Sequence[int]] = {"basis": (n, r), "mean": (n,), "scale": (n,), "sigma": (r,), "tail": (1,)}
    if f"{i}.held" in tensors:
        shapes["held"] = (r + 1,)
    for name, shape in shapes.items():
        _check_tensor(f"{i}.{name}", tensors[f"{i}.{name}"], shape, name in ("tail", "held"))
    if bool((tensors[f"{i}.scale"] < torch.finfo(torch.float32).tiny).any()):
        raise ValueError(f"tensor '{i}.scale' holds values that are not above 0")
    if bool((sigma < 0).any()) or bool((sigma[1:] > sigma[:-1]).any()):
        raise ValueError(f"tensor '{i}.sigma' must fall and stay at or above 0")
    if not orthonormal(basis):
        raise ValueError(f"the columns of tensor '{i}.basis' are not orthonormal")


def _check_tensor(name: str, x: Tensor, shape: Sequence[int], energy: bool) -> None:
    """energy: at or above 0, and infinite where it is unknown; all others are finite."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"tensor {name!r} has another shape than {tuple(shape)}")
    if not x.is_floating_point():
        raise ValueError(f"tensor {name!r} is {x.dtype}, expected floating point")
    if not bool((x >= 0).all() if energy else x.isfinite().all()):
        raise ValueError(f"tensor {name!r} holds values that are {'no energies' if energy else 'not finite'}")


def orthonormal(columns: Tensor) -> bool:
    """Whether columns ``[n, r]`` have length 1, and a few fixed combinations of them the length of their factors.

    The second costs ``n r`` operations where all products of two columns cost ``n r^2``, seconds for a large file.
    """
    x = columns.float()
    r = x.shape[1]
    factors = torch.randn((r, PROBES), generator=torch.Generator().manual_seed(r))
    off = torch.cat((x.square().sum(0) - 1, (x @ factors).square().sum(0) / factors.square().sum(0) - 1))
    return bool((off.abs() <= TOLERANCE).all())
