"""Stands in for the CPU build of ``sgl_kernel``, which no registry has, so that the real SGLang serves on a CPU.

Only what a dense model with ``--attention-backend torch_native`` reaches is here; anything else raises when called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__version__ = "0.0.0+test"


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, stops: Tensor, slots: Tensor, width: int
) -> None:
    """Write each request's new slots, which lie one after the other in ``slots``, into its row of ``table``."""
    del width
    taken = 0
    for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
        count = stop - start
        table[row, start:stop] = slots[taken : taken + count].to(table.dtype)
        taken += count


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the test stub of sgl_kernel has no {name!r}")

    return missing
