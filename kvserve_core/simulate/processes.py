"""Many runs in several processes, which end with the one that started them, however that one ends."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from signal import SIG_DFL, SIG_IGN, SIGINT, SIGTERM, getsignal, signal
from threading import Thread, current_thread, main_thread
from typing import Any, TypeVar

from kvserve_core.errors import KVServeError

Done = TypeVar("Done")


def in_processes(call: Callable[..., Done], jobs: Sequence[tuple[Any, ...]], workers: int) -> list[Done]:
    """``call(*job)`` of every job. Where this process is interrupted or terminated, the others are ended at once.

    Raises:
        KVServeError: one of the others ended before it was done.
    """
    spawn = multiprocessing.get_context("spawn")  # forking a process with threads may lock up
    others = set(multiprocessing.active_children())
    with ExitStack() as stack:
        if getsignal(SIGTERM) is SIG_DFL:  # else whoever embeds this has an end of its own in mind
            stack.enter_context(_handled(SIGTERM, _leave))
        pool = ProcessPoolExecutor(min(workers, len(jobs)), mp_context=spawn, initializer=_end_with_parent)
        try:
            with _handled(SIGINT, SIG_IGN):  # Ctrl-C reaches every process of a terminal; this one decides for all
                done = pool.map(call, *zip(*jobs, strict=True))  # starts the processes, which inherit this
            return list(done)
        except BrokenProcessPool as error:
            raise KVServeError(
                f"a process of the simulation ended before it was done: {error}; try fewer workers"
            ) from error
        except BaseException:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _leave(number: int, frame: object) -> None:
    """Told to terminate: leave by an exception, so that what was started is ended on the way."""
    del frame
    raise SystemExit(128 + number)


def _end_with_parent() -> None:
    """In a worker: watch for the end of the process that started it, which may have been killed and done nothing."""
    Thread(target=_outlive_nobody, daemon=True).start()


def _outlive_nobody() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _handled(number: int, handler: Any) -> Iterator[None]:
    """A signal is handled so for a while. Signals are the main thread's business: in another nothing changes."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal(number, handler)
    try:
        yield
    finally:
        signal(number, SIG_DFL if before is None else before)
