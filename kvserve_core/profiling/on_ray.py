"""Work spread over a Ray cluster: for searches that outgrow one machine."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvserve_core.errors import UnavailableComponentError
from kvserve_core.profiling.executor import DIED, Executor
from kvserve_core.profiling.point import Objective, Point
from kvserve_core.profiling.work import Task

T = TypeVar("T")


class _Worker:
    """The actor: holds the objective, answers one point at a time."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def answer(self, task: Task[T], point: Point) -> T:
        return task(self._objective, point)


class OnRay(Executor):
    """Ray actors, one CPU each. Joins the cluster of ``RAY_ADDRESS``, else begins a local one and ends it with itself.

    An actor that dies is replaced and its candidate tried once more: machines come and go. The second death is the
    candidate's. Every machine needs kvserve and the same plugins.
    """

    def __init__(self, objective: Objective, workers: int) -> None:
        self._ray, self.workers = _ray(), workers
        self._own = not self._ray.is_initialized()
        if self._own:
            with _same_path():
                self._ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
        kind = self._ray.remote(num_cpus=1)(_Worker)
        self._make: Callable[[], Any] = lambda: kind.remote(objective)
        self._idle = [self._make() for _ in range(workers)]

    def run(self, task: Task[T], points: Sequence[Point]) -> Iterator[tuple[int, T]]:
        """As they are ready; an actor gets its next point when it has answered."""
        waiting = deque(range(len(points)))
        running: dict[Any, tuple[int, Any]] = {}
        again: set[int] = set()
        while waiting or running:
            while waiting and self._idle:
                i, actor = waiting.popleft(), self._idle.pop()
                running[actor.answer.remote(task, points[i])] = (i, actor)
            (done, *_), _ = self._ray.wait(list(running))
            i, actor = running.pop(done)
            found, death = self._collect(done, actor)
            if death and i not in again:
                again.add(i)
                waiting.append(i)
            else:
                yield i, task.fail(points[i], death, 0.0) if death else found

    def _collect(self, done: Any, actor: Any) -> tuple[Any, str]:
        """The answer, or how the actor died; either way an actor is idle again."""
        try:
            found = self._ray.get(done)
        except self._ray.exceptions.RayActorError as error:
            self._idle.append(self._make())
            return None, f"{DIED}: {error}"
        self._idle.append(actor)
        return found, ""

    def close(self) -> None:
        """End the actors, and the cluster if it was begun here."""
        for actor in self._idle:
            self._ray.kill(actor)
        if self._own:
            self._ray.shutdown()


@contextmanager
def _same_path() -> Iterator[None]:
    """A local cluster's processes import from where this one does; they inherit the environment when they begin."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        hint = "the executor 'ray' needs 'ray', which is not installed; pip install 'kvserve[ray]'"
        raise UnavailableComponentError(hint) from error
    return ray
