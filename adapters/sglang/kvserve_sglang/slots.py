"""Where the tokens of one request lie in SGLang's pools: pages to slots, for both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvserve_core.errors import KVServeError, TransferCancelled
from kvserve_core.spec import KVSpec, Region
from kvserve_sglang.spec import AUX_GROUP

Pages = NDArray[np.int64]


def numbered(pages: Any) -> Pages:
    """Page or row numbers as this adapter keeps them.

    Raises:
        KVServeError: they are no whole numbers from 0, which would read and write somewhere else.
    """
    found = np.asarray(pages)
    if found.size and (found.dtype.kind not in "iu" or int(found.min()) < 0):
        raise KVServeError(f"SGLang named {found.dtype} pages from {found.min()}, expected whole numbers from 0")
    return found.astype(np.int64)


@dataclass
class Slots:
    """One request's places.

    prefix: tokens that the decode side holds already; ``pages`` begin there. windows: pages of sliding-window layers,
    which end with the request. cells: the row of each state group and of the auxiliary row.
    """

    page_size: int
    prefix: int = 0
    pages: list[Pages] = field(default_factory=list)
    windows: Pages | None = None
    cells: dict[int, int] = field(default_factory=dict)
    _joined: tuple[int, Pages | None] = (0, None)

    def add(self, pages: Sequence[int] | NDArray[np.integer]) -> None:
        """The next pages; raises KVServeError for what names none."""
        self.pages.append(numbered(pages))

    @property
    def num_pages(self) -> int:
        """So far."""
        return sum(map(len, self.pages))

    def of(self, kv: KVSpec, at: Region, total: int) -> Tensor:
        """Slots of a region's tokens, one a token, int64.

        Tokens before ``prefix`` were given no page, and the consumer does not write them. They share a cell with later
        ones, of which the first stands in for them, or are sent because state and auxiliary row go with the last cell;
        then slot 0 does, which SGLang gives to no request.

        Raises:
            TransferCancelled: the request has no place there (any more).
        """
        group = kv.group(at.group)
        if group.unit == "state":
            return torch.tensor([self._cell(at.group)])
        if at.stop <= self.prefix:
            return torch.zeros(at.num_tokens, dtype=torch.int64)
        tokens = np.maximum(np.arange(at.start, at.stop), self.prefix)
        if group.window is not None:
            return self._slots(tokens - self._window_start(group.window, total), self.windows)
        return self._slots(tokens - self.prefix, self._every())

    def _every(self) -> Pages | None:
        """All pages so far as one array, which is made once a chunk: every region of a request asks for it."""
        count = len(self.pages)  # another thread may add the next ones
        if self._joined[0] != count:
            self._joined = count, np.concatenate(self.pages[:count])
        return self._joined[1]

    def _window_start(self, window: int, total: int) -> int:
        """The first token that SGLang lists a sliding-window page for."""
        return max(self.prefix, total - window) // self.page_size * self.page_size

    def _slots(self, places: Pages, pages: Pages | None) -> Tensor:
        if pages is None or places[-1] // self.page_size >= len(pages):
            raise TransferCancelled("the request has no pages for these tokens")
        return torch.from_numpy(pages[places // self.page_size] * self.page_size + places % self.page_size)

    def _cell(self, group: int) -> int:
        if group not in self.cells:
            what = "auxiliary row" if group == AUX_GROUP else "state"
            raise TransferCancelled(f"the request has no {what}")
        return self.cells[group]
