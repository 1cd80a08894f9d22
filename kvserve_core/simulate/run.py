"""Playing seeds: a fresh controller and policy for each, the same worlds for every policy, several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIG_DFL, SIG_IGN, SIGINT, signal
from threading import current_thread, main_thread
from time import perf_counter, process_time
from typing import Any

from numpy.random import Generator, SeedSequence, default_rng

from kvserve_core.component import ComponentSpec
from kvserve_core.controller import Controller
from kvserve_core.errors import ConfigError, KVServeError
from kvserve_core.feasible import Filter
from kvserve_core.library import ProfileLibrary
from kvserve_core.policy import Policy
from kvserve_core.registry import default_registry
from kvserve_core.simulate.arrivals import draw
from kvserve_core.simulate.engine import Clock, Run, blank, play, traces_of
from kvserve_core.simulate.hindsight import Hindsight, look_back
from kvserve_core.simulate.scenario import Scenario
from kvserve_core.simulate.summary import summarise
from kvserve_core.simulate.trace import Trace, read_traces
from kvserve_core.simulate.truth import Truth


@dataclass(frozen=True)
class World:
    """A scenario with its files read. ``library``: None for raw and lossless only."""

    scenario: Scenario
    library: ProfileLibrary | None
    traces: tuple[Trace, ...]


def world(scenario: Scenario, library: ProfileLibrary | None) -> World:
    """Read the traces that a scenario names.

    Raises:
        ConfigError: a file cannot be used, or does not hold a link.
    """
    files = {str(link.trace): _traces(link.trace) for link in scenario.links if link.trace is not None}
    for link in scenario.links:
        if link.trace is not None and link.name not in files[str(link.trace)]:
            raise ConfigError(f"holds no link {link.name!r}, only {sorted(files[str(link.trace)])}", str(link.trace))
    return World(scenario, library, tuple(traces_of(scenario, files)))


def _traces(path: Path) -> dict[str, Trace]:
    try:
        return read_traces(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", str(path)) from error


def build(given: World, policy: Policy, clock: Clock, kind: type[Controller] = Controller) -> Controller:
    """The controller of a run, on the simulation's clock; its policy writes nothing."""
    chosen = given.scenario
    policy.rehearsal = True
    return kind(
        given.library, policy, min_quality=chosen.min_quality, prior_bandwidth=chosen.prior_bandwidth, clock=clock
    )


def play_seed(given: World, policy: Policy, seed: int, kind: type[Controller] = Controller) -> tuple[Run, Hindsight]:
    """One seed from beginning to end, and what a clairvoyant makes of it."""
    clock = Clock()
    controller = build(given, policy, clock, kind)
    traffic, costs = (default_rng(s) for s in SeedSequence(seed).spawn(2))
    run = play(_prepared(given, controller, traffic, costs), controller, clock)
    return run, look_back(run, controller.profiles, Filter(given.library, given.scenario.min_quality))


def _prepared(given: World, controller: Controller, traffic: Generator, costs: Generator) -> Run:
    truth = Truth(controller.profiles, given.scenario.speeds, costs)
    return blank(given.scenario, draw(given.scenario, traffic), truth, given.traces)


def one(given: World, policy: ComponentSpec, seed: int) -> dict[str, Any]:
    """One policy on one seed, summarised, with the wall and processor time of the whole."""
    began, worked = perf_counter(), process_time()
    made = default_registry().create("policy", policy, "policy")
    run, hindsight = play_seed(given, made, seed)
    return {**summarise(run, hindsight), "wall_s": perf_counter() - began, "cpu_s": process_time() - worked}


def simulate(
    given: World, policies: Mapping[str, ComponentSpec], seeds: Sequence[int], workers: int = 1
) -> dict[str, list[dict[str, Any]]]:
    """Every policy on every seed: summaries in order of ``seeds``, by the policy's name."""
    jobs = [(given, spec, seed) for spec in policies.values() for seed in seeds]
    done = [one(*job) for job in jobs] if workers <= 1 or len(jobs) == 1 else _in_processes(jobs, workers)
    each = iter(done)
    return {name: [next(each) for _ in seeds] for name in policies}


def _in_processes(jobs: Sequence[tuple[World, ComponentSpec, int]], workers: int) -> list[dict[str, Any]]:
    """All jobs; when this process is interrupted, the others are ended rather than waited for."""
    spawn = multiprocessing.get_context("spawn")  # forking a process with threads may lock up
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(min(workers, len(jobs)), mp_context=spawn)
    try:
        with _interrupts_ignored():
            done = pool.map(one, *zip(*jobs, strict=True))  # starts the processes, which inherit this
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


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal: the one that started the others decides what becomes of them."""
    if current_thread() is not main_thread():  # signals are the main thread's business
        yield
        return
    before = signal(SIGINT, SIG_IGN)
    try:
        yield
    finally:
        signal(SIGINT, SIG_DFL if before is None else before)
