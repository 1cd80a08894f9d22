"""A store that does not answer: calls end at their deadline, nothing is written late, and the next ones do not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hicache_pools import fill, host_pool, info, keys_of, slots, storage, storage_config
from inprocess import wait

from kvserve_plugins.transports.file import File
from kvserve_sglang import hicache_store
from kvserve_sglang.hicache import KVServeHiCacheStorage
from kvserve_sglang.hicache_bounded import Bounded

WRITTEN, READ = [5, 3], [20, 40]
KEYS = keys_of(2)


class Gate:
    """Holds every call of a method of the store until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.opened, self.waiting = threading.Event(), threading.Event()
        real = getattr(File, method)

        def held(store: File, *args: Any) -> Any:
            self.waiting.set()
            self.opened.wait()
            return real(store, *args)

        monkeypatch.setattr(File, method, held)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *error: object) -> None:
        self.opened.set()  # a session that is held does not end


@contextmanager
def filled(folder: Path, **settings: Any) -> Iterator[tuple[KVServeHiCacheStorage, list[torch.Tensor]]]:
    """A rank's storage, and what its pool holds in the pages ``WRITTEN``."""
    pool = host_pool("mha", "layer_first")
    with storage("mha", pool, storage_config("mha", folder, **settings)) as made:
        yield made, fill(pool, WRITTEN)


def answers(until: Callable[[], bool]) -> None:
    """Wait for a store that goes on."""
    wait(until, "an answer of the store", 30.0)


def test_reads_end_at_their_deadline_and_write_nothing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(tmp_path, deadline="1s") as (made, written):
        pool = made.mem_pool_host
        assert made.batch_set_v1(KEYS, slots(WRITTEN)) == [True, True]
        with monkeypatch.context() as patch:
            gate = Gate(patch, "_open")
            assert made.batch_get_v1(KEYS, slots(READ)) == [False, False]
            assert gate.waiting.is_set()
            assert made.batch_get_v1(KEYS, slots(READ)) == [False, False], "at once, while the store hangs"
            gate.opened.set()
        store = made._cache.store
        answers(lambda: made.batch_get_v1(KEYS[:1], slots(READ[:1])) == [True])
        assert not store._stuck
        assert not pool.get_data_page(READ[1] * 16).any(), "what hung wrote nothing"
        assert made.batch_get_v1(KEYS, slots(READ)) == [True, True]
        found = [pool.get_data_page(page * 16) for page in READ]
        assert all(torch.equal(a, b) for a, b in zip(found, written, strict=True))


def test_a_lookup_that_hangs_finds_nothing_and_the_next_one_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(tmp_path, deadline="500ms") as (made, _):
        assert made.batch_set_v1(KEYS, slots(WRITTEN)) == [True, True]
        with monkeypatch.context() as patch:
            gate = Gate(patch, "_has")
            assert made.batch_exists(KEYS) == 0
            gate.waiting.clear()
            assert made.batch_exists(KEYS) == 0
            assert not gate.waiting.is_set(), "it was not asked"
            gate.opened.set()
        answers(lambda: made.batch_exists(KEYS) == 2)


def test_a_store_that_does_not_take_pages_is_given_no_more_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(tmp_path, deadline="500ms") as (made, _):
        offered = spied(made._cache.store._producer, "open", monkeypatch)
        with monkeypatch.context() as patch, Gate(patch, "publish") as gate:
            patch.setattr(hicache_store, "WRITTEN_AT_ONCE", 1)
            assert made.batch_set_v1(KEYS, slots(WRITTEN)) == [False, False]
            assert gate.waiting.is_set()
            assert len(offered) == 1, "the second page does not wait too"
            patch.setattr(made._cache.store, "_unwritable_until_s", float("inf"))
            assert made.batch_set_v1(KEYS, slots(WRITTEN)) == [False, False]
            assert len(offered) == 1
        answers(lambda: made.batch_set_v1(KEYS, slots(WRITTEN)) == [True, True])
        assert made.batch_get_v1(KEYS, slots(READ)) == [True, True]


def spied(owner: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The first arguments of all calls of a method, which goes on as it is."""
    seen: list[Any] = []
    real = getattr(owner, method)

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[0])
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, method, noted)
    return seen


def test_a_call_asks_the_store_in_one_go_however_many_pages_and_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each goes on a thread of its own, and each may take until the deadline."""
    with filled(tmp_path, lossy_prefix_cache="allow", min_quality=0.9) as (made, _):
        looked = spied(made._cache.store._lookup, "call", monkeypatch)
        assert made.batch_set_v1(KEYS, slots(WRITTEN), info()) == [True, True]
        assert len(looked) == 1
        assert made.batch_exists([*KEYS, *keys_of(1, first=7)], info()) == 2
        assert len(looked) == 2


def test_pages_of_a_store_that_does_not_say_what_it_has_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(tmp_path, deadline="500ms") as (made, _):
        with monkeypatch.context() as patch, Gate(patch, "_has"):
            assert made.batch_set_v1(KEYS, slots(WRITTEN)) == [False, False]
        answers(lambda: made.batch_set_v1(KEYS, slots(WRITTEN)) == [True, True])


def test_a_pool_that_is_registered_again_leaves_no_threads(tmp_path: Path) -> None:
    with filled(tmp_path) as (made, _):
        before = threading.active_count()
        made.register_mem_pool_host(made.mem_pool_host)
        assert threading.active_count() <= before


def test_what_a_bounded_call_raises_is_raised() -> None:
    bounded = Bounded(30.0)
    assert bounded.call(0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        bounded.call(0, lambda: 1 // 0)
    bounded.close()
    assert bounded.call(0, lambda: 3) == 0
