"""Who does the work: this process or several of them. Answers come as they are ready."""

from __future__ import annotations

import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from threading import Thread
from types import TracebackType
from typing import Self, TypeVar

from kvserve_core.errors import KVServeError, UnknownNameError, did_you_mean
from kvserve_core.profiling.point import Objective, Point
from kvserve_core.profiling.work import Task

T = TypeVar("T")
DIED = "the process that worked on this candidate died (out of memory?)"
DEATHS = 5
"""Deaths in a row after which it is not the candidates' fault."""


class Executor(ABC):
    """Runs tasks of one objective. A context manager: leaving it ends its workers."""

    workers: int = 1

    @abstractmethod
    def run(self, task: Task[T], points: Sequence[Point]) -> Iterator[tuple[int, T]]:
        """One answer a point with the point's index, in the order in which they are ready."""

    def close(self) -> None:
        """End the workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Serial(Executor):
    """One after the other, here."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def run(self, task: Task[T], points: Sequence[Point]) -> Iterator[tuple[int, T]]:
        """In order."""
        for i, point in enumerate(points):
            yield i, task(self._objective, point)


_adopted: Objective
"""The objective of a worker process."""


def _adopt(objective: Objective) -> None:
    global _adopted
    Thread(target=_follow, daemon=True).start()
    _adopted = objective


def _follow() -> None:
    """End with the process that asked for the work: one that waits for a killed one would hold its model for ever."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _work(task: Task[T], point: Point) -> T:
    return task(_adopted, point)


class Processes(Executor):
    """Worker processes; each gets the objective once. One that dies takes only its candidate with it."""

    def __init__(self, objective: Objective, workers: int) -> None:
        self._objective, self.workers = objective, workers
        self._deaths = 0
        self._pool = self._new(workers)

    def _new(self, workers: int) -> ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")  # forking a process with threads may lock up
        return ProcessPoolExecutor(workers, mp_context=spawn, initializer=_adopt, initargs=(self._objective,))

    def run(self, task: Task[T], points: Sequence[Point]) -> Iterator[tuple[int, T]]:
        """As they are ready. After a death, what is left runs one by one, to find out who it was.

        Raises:
            KVServeError: every process dies.
        """
        waiting: dict[Future[T], int] = {}
        left = dict(enumerate(points))
        try:
            waiting = {self._pool.submit(_work, task, point): i for i, point in left.items()}
            for done in as_completed(waiting):
                found = done.result()
                del left[waiting[done]]
                yield waiting[done], found
        except BrokenProcessPool:
            self._pool = self._new(self.workers)
            for i, point in left.items():
                yield i, self._alone(task, point)

    def _alone(self, task: Task[T], point: Point) -> T:
        try:
            found = self._pool.submit(_work, task, point).result()
        except BrokenProcessPool as error:
            self._pool, self._deaths = self._new(self.workers), self._deaths + 1
            if self._deaths == DEATHS:
                raise KVServeError(f"{DEATHS} times in a row {DIED}; what it printed says more") from error
            return task.fail(point, DIED, 0.0)
        self._deaths = 0
        return found

    def close(self) -> None:
        """End the processes; what they are doing is finished first, what waits is dropped."""
        self._pool.shutdown(cancel_futures=True)


EXECUTORS = ("serial", "process", "ray")


def make_executor(name: str, objective: Objective, workers: int = 0) -> Executor:
    """An executor by name. workers: 0 for one a core.

    Raises:
        UnknownNameError: there is no such executor.
        UnavailableComponentError: ``ray`` is not installed.
    """
    workers = workers or len(os.sched_getaffinity(0))
    if name == "serial":
        return Serial(objective)
    if name == "process":
        return Processes(objective, workers)
    if name == "ray":
        from kvserve_core.profiling.on_ray import OnRay

        return OnRay(objective, workers)
    raise UnknownNameError(did_you_mean(name, EXECUTORS, "executor"))
