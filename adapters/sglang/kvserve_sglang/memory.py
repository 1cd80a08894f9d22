"""Tensors over memory that SGLang names by address only."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvserve_core.errors import UnsupportedSpecError


class _Bytes:
    """What ``torch.as_tensor`` reads GPU memory through."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def rows(address: int, nbytes: int, item_bytes: int, device: torch.device) -> Tensor:
    """``[rows, 1, item_bytes]`` uint8 over ``nbytes`` at ``address``. The owner must outlive it.

    Raises:
        UnsupportedSpecError: memory of another kind of device.
    """
    if device.type == "cpu":
        flat = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    elif device.type == "cuda":
        flat = torch.as_tensor(_Bytes(address, nbytes), device=device)
    else:
        raise UnsupportedSpecError(f"memory of device {device.type!r} cannot be read by address; use cpu or cuda")
    return flat[: nbytes // item_bytes * item_bytes].view(-1, 1, item_bytes)
