"""At start-up: a page of known bytes goes into the store and comes back, or the server does not start."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor

from kvserve_core.errors import KVServeError
from kvserve_core.policy import LOSSLESS, Decision, Outcome, ServiceContext
from kvserve_sglang.hicache_store import Ended, PageStore, Placed

PAGE = 0
"""No request has a page yet."""


def check_round_trip(pool: Any, store: PageStore) -> None:
    """Write a page as SGLang does, store it, load it, and read it as SGLang does.

    Raises:
        KVServeError: the store fails, or other bytes come back.
    """
    placed = Placed(f"self-test-{uuid.uuid4().hex}", PAGE)
    with _borrowed(pool) as blank:
        written = _pattern(blank)
        pool.set_from_flat_data_page(PAGE, written)
        context = ServiceContext(nbytes=written.nbytes)
        try:
            _require(placed, store.write([placed], Decision(LOSSLESS, "self-test", context, inf)), "be written")
            pool.set_from_flat_data_page(PAGE, torch.zeros_like(blank))
            _require(placed, store.read([placed]), "be read")
        finally:
            store.store.withdraw(placed.name, "the self-test is over")
        if not torch.equal(_bytes(pool.get_data_page(PAGE)), _bytes(written)):
            raise KVServeError(
                f"{type(pool).__name__} in layout {pool.layout!r}: a page came back from the store with other bytes;"
                " use another --hicache-mem-layout and report the SGLang version"
            )


@contextmanager
def _borrowed(pool: Any) -> Iterator[Tensor]:
    """The page as it is, flat; it is put back afterwards."""
    before = pool.get_data_page(PAGE).clone()
    try:
        yield before
    finally:
        pool.set_from_flat_data_page(PAGE, before)


def _pattern(like: Tensor) -> Tensor:
    seeded = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (like.nbytes,), generator=seeded, dtype=torch.uint8).view(like.dtype)


def _require(placed: Placed, ended: Ended, what: str) -> None:
    outcome = ended[placed.name]
    if not isinstance(outcome, Outcome):
        raise KVServeError(f"the store failed its self-test, a page could not {what}: {outcome}") from outcome


def _bytes(page: Tensor) -> Tensor:
    return page.contiguous().view(torch.uint8)
