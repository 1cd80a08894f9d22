"""Where the tokens of one request lie in SGLang's pools: pages to slots, for both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvserve_core.errors import TransferCancelled
from kvserve_core.spec import KVSpec, Region
from kvserve_sglang.spec import AUX_GROUP

Pages = NDArray[np.int64]


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
        """The next pages."""
        self.pages.append(np.asarray(pages, np.int64))

    @property
    def num_pages(self) -> int:
        """So far."""
        return sum(map(len, self.pages))

    def of(self, kv: KVSpec, at: Region, total: int) -> Tensor:
        """Slots of a region's tokens, one a token, int64.

        Tokens before ``prefix`` were given no page. They share a cell with later ones, so the first of those stands in
        for them; the consumer does not write them.

        Raises:
            TransferCancelled: the request has no place there (any more).
        """
        group = kv.group(at.group)
        if group.unit == "state":
            return torch.tensor([self._cell(at.group)])
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
