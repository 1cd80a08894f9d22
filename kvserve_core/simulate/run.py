"""Playing seeds: a fresh controller and policy for each, the same worlds for every policy, several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from kvserve_core.simulate.processes import in_processes
from kvserve_core.simulate.scenario import Scenario
from kvserve_core.simulate.summary import summarise
from kvserve_core.simulate.trace import Trace, read_file
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
    files = {str(link.trace): read_file(link.trace) for link in scenario.links if link.trace is not None}
    for link in scenario.links:
        if link.trace is not None and link.name not in files[str(link.trace)]:
            raise ConfigError(f"holds no link {link.name!r}, only {sorted(files[str(link.trace)])}", str(link.trace))
    return World(scenario, library, tuple(traces_of(scenario, files)))


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
    """One policy on one seed, summarised, with the wall and processor time of the whole.

    Raises:
        KVServeError: the memory does not hold it.
    """
    began, worked = perf_counter(), process_time()
    made = default_registry().create("policy", policy, "policy")
    try:
        found = summarise(*play_seed(given, made, seed))
    except MemoryError:
        raise KVServeError(
            f"seed {seed} needs more memory than there is; simulate fewer requests, or with fewer workers"
        ) from None
    return {**found, "wall_s": perf_counter() - began, "cpu_s": process_time() - worked}


def simulate(
    given: World, policies: Mapping[str, ComponentSpec], seeds: Sequence[int], workers: int = 1
) -> dict[str, list[dict[str, Any]]]:
    """Every policy on every seed: summaries in order of ``seeds``, by the policy's name."""
    jobs = [(given, spec, seed) for spec in policies.values() for seed in seeds]
    done = [one(*job) for job in jobs] if workers <= 1 or len(jobs) == 1 else in_processes(one, jobs, workers)
    each = iter(done)
    return {name: [next(each) for _ in seeds] for name in policies}
