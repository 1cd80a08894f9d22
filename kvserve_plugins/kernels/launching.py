"""Launching a Triton kernel again without Triton's look at its arguments, which takes longer than the launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

MAX_KINDS = 1024
MAX_KEPT, MAX_KEPT_BYTES = 8, 2**18
_compiled: dict[Hashable, Any] = {}


def launch(kernel: Any, programs: int, kind: Hashable, given: Mapping[str, Any]) -> None:
    """Run ``kernel`` in ``programs`` programs on the current stream.

    given: its arguments and Triton's options by name. kind: all by which Triton compiles kernels apart, as the caller
    knows it: constants and options, which integers are 1, multiples of 16 or beyond 32 bits, which addresses are no
    multiples of 16.
    """
    key = id(kernel), torch.cuda.current_device() if torch.cuda.is_initialized() else -1, kind
    ready = _compiled.get(key)
    if ready is not None:
        ready[programs, 1, 1](*[given[name] for name in kernel.arg_names])
        return
    made = kernel[(programs,)](**given)
    if made is not None:  # Triton's interpreter compiles nothing
        if len(_compiled) >= MAX_KINDS:
            _compiled.clear()
        _compiled[key] = made


def even(*tensors: torch.Tensor) -> bool:
    """Whether all begin at multiples of 16, as fresh tensors do."""
    return not any(x.data_ptr() % 16 for x in tensors)


class Kept:
    """The last few small tables on the device, by what they were made of. They are read only."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, torch.Tensor] = {}

    def get(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The table of ``key``."""
        found = self._tables.get(key)
        if found is None:
            found = make()
            if found.numel() * found.element_size() <= MAX_KEPT_BYTES:
                if len(self._tables) >= MAX_KEPT:
                    self._tables.clear()
                self._tables[key] = found
        return found
