"""The bandit: what it learns, what it dares, what it forgets, and the replay of the reference's own example."""

from __future__ import annotations

import csv
import gc
import json
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from pydantic import ValidationError

from kvserve_core.controller import Controller
from kvserve_core.dialect_tables import read_scores
from kvserve_core.importer import Import, import_library
from kvserve_core.latency import Speed
from kvserve_core.library import ProfileLibrary, built_in
from kvserve_core.policy import Candidate, Decision, Outcome, ServiceContext
from kvserve_plugins.policies._arms import Arm, Memory
from kvserve_plugins.policies._bandit_file import VERSION
from kvserve_plugins.policies.bandit import FALL, Bandit

DATA = Path(__file__).parents[1] / "data" / "kvserve"
MODEL_S = 0.005
QUIET = {"epsilon": 0.0, "epsilon_floor": 0.0}
CONTEXT = ServiceContext(nbytes=10**8, bandwidth=1e9)


class Clock:
    """A clock that tests move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def bandit(**config: Any) -> Bandit:
    made = Bandit(Bandit.Config(**config))
    made.start(Clock())
    return made


def candidates(*latencies: float) -> tuple[Candidate, ...]:
    """p0, p1, ... and raw last, in falling ratio."""
    count = len(latencies)
    names = [*(f"p{i}" for i in range(count - 1)), "raw"]
    return tuple(
        Candidate(n, float(count - i), t, 0.0, t, 0.0) for i, (n, t) in enumerate(zip(names, latencies, strict=True))
    )


def decided(offered: tuple[Candidate, ...], index: int, context: ServiceContext = CONTEXT) -> Decision:
    return Decision(offered[index].profile, "test", context, 1e9, offered)


def report(decision: Decision, times: float, **more: Any) -> Outcome:
    """An outcome that took ``times`` as long as expected, as the controller passes it on."""
    chosen = next(c for c in decision.candidates if c.profile == decision.profile)
    expected = chosen.latency_s - decision.context.model_s
    nbytes = decision.context.nbytes
    fields = {"spent_s": times * expected, "expected_s": expected} | more
    return Outcome("t", decision.profile, nbytes, nbytes // 2, **fields)


# -- the reference's example (its B3), in its own units: 56 "MB" and S of its speed table ------------------------------


def their_library() -> ProfileLibrary:
    rows = csv.DictReader((DATA / "5090_Qwen2.5-7B-Instruct_speed.csv").read_text().splitlines())
    s_per_byte = {
        r["type"]: (1 / float(r["prefill_throughput(GB/s)"]) + 1 / float(r["decode_throughput(GB/s)"])) / 2e9
        for r in rows
        if r["input_length"] == "1024"
    }
    raw = json.loads((DATA / "library_qwen7b_qasper_5090.json").read_text())
    scores = read_scores((DATA / "Qwen2.5-7B-Instruct_scores.csv").read_text(), "scores")
    made = import_library(raw, Import(scores), fingerprint="f")
    parts = {
        p["profile_id"]: p["metadata"]["pipeline_components"]
        for bucket in raw["accuracy_buckets"]
        for p in bucket["pareto_profiles"]
    }
    each = {name: Speed(0.0, sum(s_per_byte[c] for c in names) / 2) for name, names in parts.items()}
    profiles = [p.model_copy(update={"encode": each[p.name], "decode": each[p.name]}) for p in made.profiles]
    free = [built_in("raw", 1.0, Speed(), Speed()), built_in("lossless", 1.0, Speed(1.0), Speed(1.0))]
    changed = made.model_copy(update={"profiles": (*free, *profiles)})
    return changed.with_artefacts(made.artefacts)


LIBRARY = their_library()


def example(gbps: float) -> ServiceContext:
    return ServiceContext(56_000_000, "qasper", gbps * 1.25e8, slo_s=0.2, min_quality=0.97, model_s=MODEL_S)


def replayed(**config: Any) -> Controller:
    policy = bandit(**config)
    return Controller(LIBRARY, policy, clock=policy.clock)


def short(decision: Decision) -> str:
    return decision.profile.rpartition("_")[2]


def in_all(decision: Decision, times: float = 1.0) -> Outcome:
    """All that the reference's controller hears of a transfer is one figure."""
    chosen = next(c for c in decision.candidates if c.profile == decision.profile)
    wire = round(decision.context.nbytes / chosen.cr)
    return Outcome("t", decision.profile, decision.context.nbytes, wire, total_s=times * (chosen.latency_s - MODEL_S))


@pytest.mark.parametrize(
    ("gbps", "name", "ms", "raw_ms"), [(5, "c1", 20.75, 94.60), (25, "c12", 11.74, 22.92), (150, "raw", 7.99, 7.99)]
)
def test_b3_the_choice_by_bandwidth(gbps: float, name: str, ms: float, raw_ms: float) -> None:
    decision = replayed().choose(example(gbps))
    assert short(decision) == name
    latency = {c.profile: 1e3 * c.latency_s for c in decision.candidates}
    assert latency[decision.profile] == pytest.approx(ms, abs=0.01)
    assert latency["raw"] == pytest.approx(raw_ms, abs=0.01)


@pytest.mark.parametrize("config", [QUIET, *({"seed": s} for s in range(10))], ids=str)
def test_b3_one_slow_observation_moves_the_choice_and_it_comes_back_within_twenty(config: dict[str, Any]) -> None:
    control = replayed(**config)
    decision = control.choose(example(25))
    while short(decision) != "c12":  # a first decision may explore
        decision = control.choose(example(25))
    control.observe(decision, in_all(decision, 4.0))
    names = []
    for _ in range(40):
        decision = control.choose(example(25))
        names.append((short(decision), decision.reason))
        control.observe(decision, in_all(decision))
    exploited = [name for name, reason in names if reason != "explore"]
    assert exploited[0] == "c13"
    assert "c12" in exploited[1:20]
    assert exploited[-10:] == ["c12"] * len(exploited[-10:])


def staged(decision: Decision, times: float = 1.0) -> Outcome:
    chosen = next(c for c in decision.candidates if c.profile == decision.profile)
    wire = round(decision.context.nbytes / chosen.cr)
    encode_s, transfer_s, decode_s = (times * 1e-3 * s for s in (1.6165, 3.507, 1.6165))
    spent = (
        (encode_s, transfer_s, decode_s)
        if short(decision) == "c12"
        else (chosen.encode_s, chosen.transfer_s, chosen.decode_s)
    )
    return Outcome("t", decision.profile, decision.context.nbytes, wire, *spent)


def test_b3_with_reports_by_stage_once_speeds_are_known() -> None:
    control = replayed(**QUIET)
    for _ in range(10):
        decision = control.choose(example(25))
        control.observe(decision, staged(decision))
    assert short(decision) == "c12"
    control.observe(decision, staged(decision, 4.0))
    names = []
    for _ in range(21):
        decision = control.choose(example(25))
        names.append(short(decision))
        control.observe(decision, staged(decision))
    assert names[0] == "c13"
    assert "c12" in names[1:]


# -- learning ------------------------------------------------------------------------------------------------------


def test_without_outcomes_it_takes_the_fastest() -> None:
    choice = bandit(**QUIET).choose(CONTEXT, candidates(0.1, 0.2, 0.3))
    assert (choice.index, choice.reason) == (0, "fastest")


def test_what_takes_longer_than_the_model_says_gives_way_raw_included() -> None:
    policy, offered = bandit(**QUIET), candidates(0.1, 0.12, 0.15)
    for index in (0, 1):
        decision = decided(offered, index)
        policy.observe(decision, report(decision, 3.0))
    choice = policy.choose(CONTEXT, offered)
    assert (choice.index, choice.reason) == (2, "fastest with what was learned")
    raw = decided(offered, 2)
    for _ in range(3):
        policy.observe(raw, report(raw, 10.0))
    assert policy.choose(CONTEXT, offered).index != 2


def test_what_the_controller_has_learned_is_not_learned_twice() -> None:
    policy = bandit(**QUIET)
    control = Controller(LIBRARY, policy, clock=policy.clock)
    name = control.choose(example(25)).profile
    for _ in range(200):
        decision = control.choose(replace(example(25), acceptable=frozenset({name})))
        chosen = next(c for c in decision.candidates if c.profile == decision.profile)
        wire = round(decision.context.nbytes / chosen.cr)
        control.observe(decision, Outcome("t", decision.profile, 56_000_000, wire, 4e-3, 3.5e-3, 4e-3))
    (place,) = (p for b, p in policy.memory.places.items() if b[2] == decision.candidates[0].profile)
    arm = place.arms[decision.profile]
    assert abs(arm.residual(56_000_000, 1.0)) < 1e-4


def learned(sizes: Iterable[int], fixed_s: float, s_per_byte: float) -> Arm:
    arm = Arm()
    for at, nbytes in enumerate(sizes, 1):
        arm.learn(nbytes, fixed_s + s_per_byte * nbytes, 0.1, 0.1, at, 0.0)
    return arm


def test_sizes_that_differ_tell_the_fixed_part_from_the_one_per_byte() -> None:
    arm = learned([10**6, 10**8, 10**7, 5 * 10**7] * 20, 0.010, 2e-10)
    assert arm.fixed_s == pytest.approx(0.010, rel=0.05)
    assert arm.s_per_byte == pytest.approx(2e-10, rel=0.05)


def test_what_was_learned_of_one_size_is_per_byte() -> None:
    arm = learned([10**8] * 60, 0.0, 1e-9)
    assert arm.residual(10**6, 1.0) == pytest.approx(1e-3, rel=0.02)


def test_a_place_is_a_bucket_and_an_interval() -> None:
    policy, offered = bandit(**QUIET), candidates(0.1, 0.12, 0.3)
    decision = decided(offered, 0)
    policy.observe(decision, report(decision, 5.0))
    assert policy.choose(CONTEXT, offered).index == 1
    for other in (replace(CONTEXT, workload="code"), replace(CONTEXT, min_quality=0.5)):
        assert policy.choose(other, offered).index == 0
    assert policy.choose(CONTEXT, tuple(reversed(candidates(0.3, 0.12, 0.1)))).index == 0


@pytest.mark.parametrize(
    "more",
    [{"raw_bytes": 10**6}, {"ok": False}, {"expected_s": 0.0}, {"profile": "unheard"}],
    ids=lambda m: next(iter(m)),
)
def test_parts_failures_and_strangers_teach_no_residual(more: dict[str, Any]) -> None:
    policy, offered = bandit(**QUIET), candidates(0.1, 0.12, 0.3)
    decision = decided(offered, 0)
    policy.observe(decision, replace(report(decision, 9.0), **more))
    assert policy.choose(CONTEXT, offered).index == 0


def test_residuals_fade_with_time() -> None:
    policy, offered = bandit(**QUIET), candidates(0.1, 0.12, 0.3)
    decision = decided(offered, 0)
    policy.observe(decision, report(decision, 5.0))
    policy.clock.now = 50.0  # type: ignore[attr-defined]  # the test's clock
    assert policy.choose(CONTEXT, offered).index == 1
    policy.clock.now = 290.0  # type: ignore[attr-defined]  # the test's clock
    assert policy.choose(CONTEXT, offered).index == 0


# -- exploration ---------------------------------------------------------------------------------------------------


def tried(policy: Bandit, context: ServiceContext, offered: tuple[Candidate, ...], count: int) -> list[int]:
    return [c.index for c in (policy.choose(context, offered) for _ in range(count)) if c.reason == "explore"]


def test_exploration_is_seeded() -> None:
    offered = candidates(0.1, 0.11, 0.115, 0.3)
    runs = [tried(bandit(seed=s), CONTEXT, offered, 500) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_exploration_falls_to_its_floor() -> None:
    policy, offered = bandit(epsilon=0.5, epsilon_half_life=20.0), candidates(0.1, 0.11, 0.3)
    early, _, late = (len(tried(policy, CONTEXT, offered, n)) for n in (40, 500, 20_000))
    assert early > 4
    assert 100 < late < 300


def test_only_neighbours_that_may_be_faster_are_tried() -> None:
    policy = bandit(epsilon=1.0, epsilon_floor=1.0)
    assert set(tried(policy, CONTEXT, candidates(0.100, 0.110, 0.105, 0.3), 200)) == {1}
    assert tried(policy, replace(CONTEXT, workload="w"), candidates(0.1, 0.2, 0.4), 200) == []


def test_a_neighbour_that_is_known_well_and_slower_is_not_tried() -> None:
    policy, offered = bandit(epsilon=1.0, epsilon_floor=1.0), candidates(0.1, 0.12, 0.3)
    decision = decided(offered, 1)
    for _ in range(30):
        policy.observe(decision, report(decision, 1.0))
    assert tried(policy, CONTEXT, offered, 200) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6), st.floats(0.01, 2.0), st.integers(0, 5))
def test_exploration_never_dares_what_may_break_the_slo(latencies: list[float], slo_s: float, seed: int) -> None:
    policy = bandit(epsilon=1.0, epsilon_floor=1.0, seed=seed)
    offered, context = candidates(*sorted(latencies)), replace(CONTEXT, slo_s=slo_s)
    for index in tried(policy, context, offered, 20):
        assert 1.5 * offered[index].latency_s <= slo_s


def in_stages(decision: Decision, encode_s: float, transfer_s: float, decode_s: float, **more: Any) -> Outcome:
    """A report of every stage, which the model has learned from."""
    told = {"encode_s": encode_s, "transfer_s": transfer_s, "decode_s": decode_s}
    took = {"spent_s": sum(told.values()), "expected_s": sum(told.values())}
    return report(decision, 1.0, **(told | took | more))


def test_where_stages_are_told_a_try_is_for_speeds_that_nobody_knows() -> None:
    policy, context = bandit(epsilon=1.0, epsilon_floor=1.0), replace(CONTEXT, model_s=0.05)
    moving = candidates(0.15, 0.16, 0.4)  # all of it is sending
    coding = computing(moving)
    assert set(tried(policy, context, moving, 50)) == {1}, "nothing was told yet"
    policy.observe(decided(moving, 0, context), in_stages(decided(moving, 0, context), 0.01, 0.08, 0.01))
    assert tried(policy, context, moving, 50) == []
    assert set(tried(policy, context, coding, 50)) == {1}
    policy.observe(decided(coding, 1, context), in_stages(decided(coding, 1, context), 0.05, 0.01, 0.05))
    assert tried(policy, context, coding, 50) == [], "it was told how fast this one is"
    policy.clock.now = 59.0  # type: ignore[attr-defined]  # the test's clock
    assert set(tried(policy, context, coding, 50)) == {1}, "which is half forgotten"
    policy.clock.now = 61.0  # type: ignore[attr-defined]  # the test's clock
    assert set(tried(policy, context, moving, 50)) == {1}, "as is that reports hold stages"


def test_noise_in_the_stages_leaves_no_residual_and_what_is_between_them_does() -> None:
    policy = bandit(**QUIET)
    control = Controller(LIBRARY, policy, clock=policy.clock)
    for step in range(40):
        decision = control.choose(example(25))
        control.observe(decision, staged(decision, 0.9 if step % 2 else 1.1))
    assert short(decision) == "c12"
    assert set(policy.residuals(decision).values()) == {0.0}
    whole = staged(decision)
    total_s = whole.transfer_s + whole.decode_s + 2e-3
    for _ in range(20):
        control.observe(decision, replace(whole, total_s=total_s))
    assert policy.residuals(decision)[decision.profile] == pytest.approx(2e-3, rel=0.05)


def computing(offered: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The same, but all of the latency is encoding."""
    return tuple(structs.replace(c, encode_s=c.latency_s, transfer_s=0.0) for c in offered)


def test_what_sends_more_needs_room_for_a_link_that_fell_unseen() -> None:
    context, offered = replace(CONTEXT, slo_s=0.3), candidates(0.1, 0.11, 0.3)
    policy = bandit(epsilon=1.0, epsilon_floor=1.0)
    assert tried(policy, context, offered, 200) == []
    assert set(tried(policy, context, computing(offered), 200)) == {1}
    assert set(tried(policy, replace(context, slo_s=1.5 * FALL * 0.111), offered, 200)) == {1}
    sends_less = (structs.replace(offered[0], cr=1.5), *offered[1:])
    assert set(tried(policy, replace(context, workload="w"), sends_less, 200)) == {1}


def test_what_was_seen_to_vary_needs_more_room() -> None:
    policy, offered = bandit(epsilon=1.0, epsilon_floor=1.0), computing(candidates(0.1, 0.11, 0.3))
    context = replace(CONTEXT, slo_s=0.18)
    assert tried(policy, context, offered, 20)
    decision = decided(offered, 1, context)
    for times in (0.5, 1.5, 0.6, 1.5):
        policy.observe(decision, report(decision, times))
    assert tried(policy, context, offered, 200) == []


# -- cooldowns -------------------------------------------------------------------------------------------------------


def late(policy: Bandit, offered: tuple[Candidate, ...], index: int, context: ServiceContext, count: int) -> None:
    """Uses that miss the SLO by spikes that leave no residual: each is followed by one as much too fast."""
    decision = decided(offered, index, context)
    for _ in range(count):
        policy.observe(decision, report(decision, 2.5, expected_s=2.5 * offered[index].latency_s))


def test_three_violations_in_ten_uses_are_a_cooldown_that_ends() -> None:
    policy, offered = bandit(**QUIET), candidates(0.1, 0.12, 0.3)
    context = replace(CONTEXT, slo_s=0.2)
    late(policy, offered, 0, context, 2)
    assert policy.choose(context, offered).index == 0
    late(policy, offered, 0, context, 1)
    assert policy.choose(context, offered).index == 1
    policy.clock.now = 10.1  # type: ignore[attr-defined]  # the test's clock
    assert policy.choose(context, offered).index == 0


def test_violations_far_apart_are_no_cooldown() -> None:
    policy, offered = bandit(**QUIET), candidates(0.1, 0.12, 0.3)
    context = replace(CONTEXT, slo_s=0.2)
    decision = decided(offered, 0, context)
    for _ in range(5):
        late(policy, offered, 0, context, 1)
        for _ in range(9):
            policy.observe(decision, report(decision, 1.0))
    assert policy.choose(context, offered).index == 0


def test_missing_an_slo_that_nothing_meets_is_no_fault() -> None:
    policy, offered = bandit(**QUIET), candidates(0.1, 0.12, 0.3)
    context = replace(CONTEXT, slo_s=0.05)
    late(policy, offered, 0, context, 10)
    assert policy.choose(context, offered).index == 0


def test_a_profile_that_fails_cools_down() -> None:
    policy, offered = bandit(**QUIET), candidates(0.1, 0.12, 0.3)
    decision = decided(offered, 0)
    for _ in range(3):
        policy.observe(decision, report(decision, 1.0, ok=False))
    assert policy.choose(CONTEXT, offered).index == 1


def test_a_cooldown_ends_early_where_nothing_else_meets_the_slo() -> None:
    policy, offered = bandit(**QUIET), candidates(0.1, 0.25, 0.3)
    context = replace(CONTEXT, slo_s=0.2)
    late(policy, offered, 0, context, 3)
    choice = policy.choose(context, offered)
    assert (choice.index, choice.reason) == (0, "would cool down, but nothing else meets the SLO")


def test_when_all_cool_down_the_fastest_goes() -> None:
    policy, offered = bandit(**QUIET), candidates(0.1, 0.12)
    for index in (0, 1):
        decision = decided(offered, index)
        for _ in range(3):
            policy.observe(decision, report(decision, 1.0, ok=False))
    choice = policy.choose(CONTEXT, offered)
    assert (choice.index, choice.reason) == (0, "all candidates cool down, fastest")


def test_when_nothing_meets_the_slo_the_least_violating_goes_and_is_reported() -> None:
    policy, offered = bandit(**QUIET), candidates(0.1, 0.12, 0.3)
    context = replace(CONTEXT, slo_s=0.15)
    for index in (0, 1):
        decision = decided(offered, index, context)
        policy.observe(decision, report(decision, 3.0))
    choice = policy.choose(context, offered)
    assert choice.index == 0
    assert "nothing meets the SLO with what was learned, least violating" in choice.reason


# -- memory ------------------------------------------------------------------------------------------------------------


def size(thing: object, seen: set[int]) -> int:
    """Bytes of an object and all that it holds."""
    if id(thing) in seen or isinstance(thing, type):
        return 0
    seen.add(id(thing))
    inner: list[object] = []
    if isinstance(thing, dict):
        inner = [*thing.keys(), *thing.values()]
    elif isinstance(thing, (list, tuple, set, frozenset)):
        inner = list(thing)
    inner += [getattr(thing, name) for name in getattr(type(thing), "__slots__", ()) if hasattr(thing, name)]
    inner += list(getattr(thing, "__dict__", {}).values())
    return sys.getsizeof(thing) + sum(size(each, seen) for each in inner)


def test_the_memory_is_bounded_in_bytes_whatever_is_asked() -> None:
    policy = bandit()
    offered = candidates(0.1, 0.11, 0.12, 0.3)
    for i in range(4000):
        policy.clock.now += 0.01  # type: ignore[attr-defined]  # the test's clock
        context = replace(CONTEXT, workload=f"workload {i}")
        for index in range(3):
            decision = decided(offered, index, context)
            policy.observe(decision, report(decision, 1.1))
    assert len(policy.memory) <= 512
    assert sum(len(p.arms) for p in policy.memory.places.values()) == len(policy.memory)
    assert size(policy.memory, set()) <= 2**20


def test_places_without_outcomes_are_bounded_too() -> None:
    policy = bandit(max_arms=8, **QUIET)
    for i in range(100):
        policy.choose(replace(CONTEXT, workload=f"w{i}"), candidates(0.1, 0.2))
    assert len(policy.memory.places) <= 8


def test_the_place_longest_unused_goes_first() -> None:
    memory = Memory(max_arms=2, ttl_s=300.0)
    for now, workload in enumerate(("a", "b", "a", "c")):
        memory.arm((workload, None, "p"), "p", float(now))
    assert {b[0] for b in memory.places} == {"a", "c"}


def test_what_was_not_used_for_five_minutes_is_forgotten() -> None:
    policy, offered = bandit(**QUIET), candidates(0.1, 0.12, 0.3)
    decision = decided(offered, 0)
    for _ in range(50):
        policy.observe(decision, report(decision, 50.0))
    policy.clock.now = 299.0  # type: ignore[attr-defined]  # the test's clock
    assert policy.choose(CONTEXT, offered).index == 1
    policy.clock.now = 299.0 + 301.0  # type: ignore[attr-defined]  # the test's clock
    assert policy.choose(CONTEXT, offered).index == 0
    assert len(policy.memory) == 0


# -- state on disk -----------------------------------------------------------------------------------------------------


def test_a_saved_state_is_a_warm_start(tmp_path: Path) -> None:
    path, offered = tmp_path / "state.json", candidates(0.1, 0.12, 0.3)
    policy = bandit(**QUIET)
    decision = decided(offered, 0)
    policy.observe(decision, report(decision, 5.0))
    policy.save(path)
    warm = bandit(state=path, **QUIET)
    assert warm.choose(CONTEXT, offered).index == 1
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    assert json.loads(path.read_text())["version"] == VERSION


def test_a_cooldown_survives_a_restart(tmp_path: Path) -> None:
    path, offered = tmp_path / "state.json", candidates(0.1, 0.12, 0.3)
    policy = bandit(**QUIET, cooldown=1000.0)
    decision = decided(offered, 0)
    for _ in range(3):
        policy.observe(decision, report(decision, 1.0, ok=False))
    policy.save(path)
    assert bandit(state=path, **QUIET).choose(CONTEXT, offered).index == 1


def saved_outcomes(path: Path) -> int:
    return sum(place["outcomes"] for place in json.loads(path.read_text())["places"])


def test_it_saves_itself_at_once_now_and_then_and_in_the_end(tmp_path: Path) -> None:
    path, offered = tmp_path / "state.json", candidates(0.1, 0.12, 0.3)
    policy = bandit(state=path, save_every=60.0)
    decision = decided(offered, 0)
    saved = []
    for now in (0.0, 59.0, 61.0, 62.0):
        policy.clock.now = now  # type: ignore[attr-defined]  # the test's clock
        policy.observe(decision, report(decision, 1.0))
        saved.append(saved_outcomes(path))
    assert saved == [1, 1, 3, 3]
    del policy
    gc.collect()
    assert saved_outcomes(path) == 4


def test_what_is_asked_and_learns_nothing_saves_nothing(tmp_path: Path) -> None:
    policy = bandit(state=tmp_path / "state.json")
    policy.choose(CONTEXT, candidates(0.1, 0.3))
    del policy
    gc.collect()
    assert list(tmp_path.iterdir()) == []


SERVED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from plugins.test_bandit import bandit, candidates, decided, report

def serve():
    policy = bandit(state=Path(sys.argv[2]))
    decision = decided(candidates(0.1, 0.3), 0)
    for _ in range(5):
        policy.observe(decision, report(decision, 1.0))
    serve.policy = policy

if sys.argv[3] == "alone":
    serve()
else:
    import multiprocessing
    worker = multiprocessing.get_context("fork").Process(target=serve)
    worker.start()
    worker.join()
"""


@pytest.mark.parametrize("how", ["alone", "a worker"])
def test_what_a_process_learned_is_there_when_it_has_ended(how: str, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    subprocess.run([sys.executable, "-c", SERVED, str(Path(__file__).parents[1]), str(path), how], check=True)
    assert saved_outcomes(path) == 5


def test_the_state_of_another_library_is_a_cold_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Profiles may have the same names: what one took beyond its estimate says nothing of another's."""
    path = tmp_path / "state.json"
    for library, learned in ((LIBRARY, False), (LIBRARY, True), (slower(LIBRARY), False)):
        caplog.clear()
        policy = bandit(**QUIET)
        policy.config = policy.config.model_copy(update={"state": path})
        control = Controller(library, policy, clock=policy.clock)
        assert bool(policy.memory.places) == learned
        decision = control.choose(example(25))
        control.observe(decision, in_all(decision, 4.0))
        del policy, control
    assert "learned with another profile library" in caplog.text


def slower(library: ProfileLibrary) -> ProfileLibrary:
    profiles = [
        p.model_copy(update={"encode": Speed(p.encode.fixed_s, 2 * p.encode.s_per_byte)}) for p in library.profiles
    ]
    return library.model_copy(update={"profiles": tuple(profiles)})


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", '{"version": 1, "places": []}', '{"version": 2}', '{"version": 2, "places": []}'),
        '{"version": 2, "library": "", "places": [{"bucket": 3}]}',
    ],
)
def test_a_file_that_is_none_is_a_cold_start_and_is_said(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    policy = bandit(state=path)
    assert policy.memory.places == {}
    assert "starts without" in caplog.text


def test_figures_out_of_range_are_a_cold_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, offered = tmp_path / "state.json", candidates(0.1, 0.3)
    policy = bandit()
    decision = decided(offered, 0)
    policy.observe(decision, report(decision, 1.0))
    policy.save(path)
    stored = json.loads(path.read_text())
    stored["places"][0]["arms"]["p0"]["seconds"] = float("nan")
    path.write_text(json.dumps(stored))
    assert bandit(state=path).memory.places == {}
    assert "out of range" in caplog.text


def test_an_outcome_that_is_yet_to_come_is_a_cold_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, offered = tmp_path / "state.json", candidates(0.1, 0.3)
    policy = bandit()
    decision = decided(offered, 0)
    policy.observe(decision, report(decision, 1.0))
    policy.save(path)
    stored = json.loads(path.read_text())
    stored["places"][0]["arms"]["p0"]["at"] = 10**9
    path.write_text(json.dumps(stored))
    assert bandit(state=path).choose(CONTEXT, offered).index == 0
    assert "an arm has outcome 1000000000 of 1" in caplog.text


def test_a_state_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = bandit(state=tmp_path / "gone" / "state.json", save_every=1.0)
    control = Controller(LIBRARY, policy, clock=policy.clock)
    decision = control.choose(example(25))
    for _ in range(3):
        policy.clock.now += 2.0  # type: ignore[attr-defined]  # the test's clock
        control.observe(decision, in_all(decision))
    assert control.policy_failures == 0
    assert policy.memory.places
    (said,) = [r.message for r in caplog.records if "state.json" in r.message and "cannot save" in r.message]
    assert "goes on without" in said
    assert "has not learned" not in caplog.text
    assert control.choose(example(25)).candidates


# -- the rest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [{"epsilon": 0.001}, {"violations": 11}, {"alpha": 1.0}, {"cooldown": "x"}])
def test_a_configuration_that_cannot_be_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Bandit.Config(**bad)


def test_residuals_are_of_the_candidates_alone() -> None:
    policy, offered = bandit(**QUIET), candidates(0.1, 0.12, 0.3)
    for index in range(3):
        made = decided(offered, index)
        policy.observe(made, report(made, 2.0))
    assert set(policy.residuals(decided(offered, 0))) == {"p0", "p1", "raw"}
    fewer = offered[:1] + offered[2:]
    assert set(policy.residuals(decided(fewer, 0))) == {"p0", "raw"}


def test_residuals_are_read_while_new_arms_come() -> None:
    policy = bandit(max_arms=65536)
    shown = decided(candidates(0.1, 0.2), 0)
    names = tuple(f"n{i}" for i in range(3000))
    first, done = shown.candidates[0], threading.Event()

    def learn() -> None:
        try:
            for name in names:
                offered = (first, structs.replace(first, profile=name))
                made = decided(offered, 1)
                policy.observe(made, report(made, 1.0))
        finally:
            done.set()

    def read() -> int:
        reads = 0
        while not done.is_set():
            assert set(policy.residuals(shown)) <= {"p0", "raw"}
            reads += 1
        return reads

    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            learned, *readers = pool.submit(learn), pool.submit(read), pool.submit(read)
            learned.result()
            assert all(r.result() for r in readers)
    finally:
        sys.setswitchinterval(old)


def test_many_threads_choose_while_others_observe() -> None:
    policy = bandit(max_arms=16)
    offered = candidates(0.1, 0.11, 0.3)

    def work(seed: int) -> None:
        for i in range(400):
            context = replace(CONTEXT, workload=f"w{(i * seed) % 9}")
            decision = decided(offered, policy.choose(context, offered).index, context)
            policy.observe(decision, report(decision, 1.0 + (i % 5) / 10))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert sum(len(p.arms) for p in policy.memory.places.values()) == len(policy.memory) <= 16
