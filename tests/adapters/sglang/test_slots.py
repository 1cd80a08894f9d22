"""From pages to slots: chunks, prefixes, windows, and the rows of states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import small_models

from kvserve_core.errors import KVServeError, TransferCancelled
from kvserve_core.spec import KVSpec, Region
from kvserve_sglang.slots import Slots
from kvserve_sglang.spec import AUX_GROUP, STATE_GROUPS

TOTAL = 100


def cells(start: int, stop: int, group: int = 0) -> Region:
    return Region(group, "k", (0,), (0,), start, stop)


def test_slots_follow_every_chunk() -> None:
    slots, kv = Slots(4), small_models.model()
    with pytest.raises(TransferCancelled):
        slots.of(kv, cells(0, 5), TOTAL)
    slots.add([3])
    slots.add([7])
    assert slots.num_pages == 2
    assert slots.of(kv, cells(0, 5), TOTAL).tolist() == [12, 13, 14, 15, 28]
    joined = slots._every()
    assert slots._every() is joined
    slots.add(np.array([1], np.int32))
    assert slots.of(kv, cells(7, 9), TOTAL).tolist() == [31, 4]


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_token_lies_in_its_page_at_its_place(page_size: int) -> None:
    slots, pages = Slots(page_size), np.random.default_rng(0).permutation(64)
    slots.add(pages)
    for token in (0, page_size, 3 * page_size - 1, 63):
        found = slots.of(small_models.model(), cells(token, token + 1), TOTAL)
        assert found.tolist() == [pages[token // page_size] * page_size + token % page_size]


def test_tokens_without_a_page_are_refused() -> None:
    slots = Slots(4)
    slots.add([3])
    with pytest.raises(TransferCancelled, match="no pages"):
        slots.of(small_models.model(), cells(3, 5), TOTAL)


def test_pages_begin_at_the_prefix_and_its_next_token_stands_in_for_what_is_before() -> None:
    slots = Slots(4, prefix=8)
    slots.add([5, 6])
    assert slots.of(small_models.model(), cells(6, 13), TOTAL).tolist() == [20, 20, 20, 21, 22, 23, 24]


@pytest.mark.parametrize("kv", [small_models.model(), small_models.windowed(6)], ids=["all", "windowed"])
def test_of_a_prompt_that_is_there_already_nothing_is_read_but_the_slot_that_no_request_has(kv: KVSpec) -> None:
    assert Slots(4, prefix=12).of(kv, cells(8, 12), 12).tolist() == [0] * 4


def test_pages_of_a_window_are_its_last_ones() -> None:
    """A window of 6 over 14 tokens begins at token 8, the first of a page; SGLang lists pages from there."""
    kv, slots = small_models.windowed(6), Slots(4)
    slots.add([9, 9, 9, 9])
    with pytest.raises(TransferCancelled, match="no pages"):
        slots.of(kv, cells(8, 14), 14)
    slots.windows = np.array([2, 1])
    assert slots.of(kv, cells(8, 14), 14).tolist() == [8, 9, 10, 11, 4, 5]
    within = Slots(4, prefix=12, windows=np.array([2]))
    assert within.of(kv, cells(12, 14), 14).tolist() == [8, 9]


@pytest.mark.parametrize("pages", [[3, -1], np.array([1.5]), np.array([True])])
def test_what_is_no_page_number_is_refused(pages: Any) -> None:
    with pytest.raises(KVServeError, match="expected whole numbers from 0"):
        Slots(4).add(pages)
    Slots(4).add([])


def test_a_state_and_the_row_have_one_cell_each() -> None:
    kv, slots = small_models.transferred(), Slots(4)
    with pytest.raises(TransferCancelled, match="no state"):
        slots.of(kv, Region(STATE_GROUPS, "opaque", (1,), (0,), 0, 1), TOTAL)
    with pytest.raises(TransferCancelled, match="no auxiliary row"):
        slots.of(kv, Region(AUX_GROUP, "opaque", (2,), (0,), 0, 1), TOTAL)
    slots.cells = {STATE_GROUPS: 3, AUX_GROUP: 5}
    assert slots.of(kv, Region(STATE_GROUPS, "opaque", (1,), (0,), 0, 1), TOTAL).tolist() == [3]
    assert slots.of(kv, Region(AUX_GROUP, "opaque", (2,), (0,), 0, 1), TOTAL).tolist() == [5]
