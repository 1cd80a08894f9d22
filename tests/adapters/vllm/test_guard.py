"""Hooks that fail: each answers what lets the engine go on, and is counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvserve_core.errors import ConfigError
from kvserve_core.metrics import Counters
from kvserve_core.policy import Decision, ServiceContext
from kvserve_vllm.connector import KVServeConnector
from kvserve_vllm.guard import isolated
from kvserve_vllm.metadata import Open, StepMeta, WorkerReport
from kvserve_vllm.stats import StatsBuffer
from kvserve_vllm.worker.loads import Ended
from kvserve_vllm.worker.side import WorkerSide
from vllm_steps import failures

WORKER = {
    "handle_preemptions": (StepMeta(),),
    "start_load_kv": (None,),
    "wait_for_save": (),
    "get_finished": (set(),),
    "build_connector_worker_meta": (),
    "shutdown": (),
}
SCHEDULER = {
    "on_new_request": (None,),
    "get_num_new_matched_tokens": (None, 0),
    "update_state_after_alloc": (None, None, 0),
    "build_connector_meta": (None,),
    "update_connector_output": (SimpleNamespace(kv_connector_worker_meta=WorkerReport()),),
    "request_finished_all_groups": (None, ([],)),
    "shutdown": (),
}
ANSWERS = {
    "get_finished": (None, None),
    "get_num_new_matched_tokens": (0, False),
    "build_connector_meta": StepMeta(),
    "request_finished_all_groups": (False, None),
}

START_UP = {
    "register_kv_caches",
    "get_handshake_metadata",
    "set_xfer_handshake_metadata_pp_aware",
    "bind_gpu_block_pool",
}
OPEN = Open("r", "t", 1, Decision("raw", "test", ServiceContext(1), 1e9), None, ())
DO_NOTHING = {"wait_for_layer_load", "save_kv_layer", "get_block_ids_with_load_errors", "get_loaded_kv_cache_group_ids"}
CALL_WHAT_IS_GUARDED = {"get_finished", "get_transfer_results", "request_finished"}


class Broken:
    """Half a connector of which nothing works but what it reports."""

    def __init__(self) -> None:
        self.stats = StatsBuffer(Counters())

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"injected into {name!r}")


def connector(**halves: Any) -> Any:
    made = object.__new__(KVServeConnector)
    made.__dict__.update({"_scheduler": None, "_worker": None, "_connector_metadata": StepMeta(), "_invalid": set()})
    made.__dict__.update(halves)
    return made


@pytest.mark.parametrize(
    ("half", "hook", "given"),
    [("_worker", hook, given) for hook, given in WORKER.items()]
    + [("_scheduler", hook, given) for hook, given in SCHEDULER.items()],
)
def test_a_hook_that_fails_answers_harmlessly_and_is_counted(half: str, hook: str, given: tuple[Any, ...]) -> None:
    broken = connector(**{half: Broken()})
    assert getattr(broken, hook)(*given) == ANSWERS.get(hook)
    reported = broken.get_kv_connector_stats()
    assert reported.data == {"hook_failures": [[[hook], 1]]}


def test_every_hook_of_a_running_engine_is_guarded() -> None:
    hooks = {name: value for name, value in vars(KVServeConnector).items() if not name.startswith("_")}
    bare = {name for name, value in hooks.items() if callable(value) and not hasattr(value, "__wrapped__")}
    assert bare == START_UP | DO_NOTHING | CALL_WHAT_IS_GUARDED


def test_another_connectors_ranks_are_refused_at_start_up() -> None:
    with pytest.raises(ConfigError, match="a SimpleNamespace of another connector; list KVServeConnector first"):
        connector().set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace()})


def test_blocks_that_were_not_loaded_are_told_once_and_by_their_own_connector() -> None:
    assert "_invalid" not in vars(KVServeConnector)  # a set of the class would be everybody's
    ends = iter([Ended(blocks={3}), Ended(blocks={4}), Ended()])
    rank = SimpleNamespace(finished=lambda req_ids: (set(), next(ends)))
    one, other = connector(_worker=rank, _by_request=False), connector(_worker=rank, _by_request=False)
    one.get_finished(set())
    one.get_finished(set())
    assert other.get_block_ids_with_load_errors() == set()
    assert one.get_block_ids_with_load_errors() == {3, 4}
    assert one.get_block_ids_with_load_errors() == set()


def test_what_is_not_for_a_role_is_an_error_that_does_not_reach_the_engine() -> None:
    assert connector(_worker=Broken()).get_num_new_matched_tokens(None, 0) == (0, False)
    assert connector().get_num_new_matched_tokens(None, 0) == (0, False)  # nobody is there to count it


def test_a_part_that_fails_leaves_its_default_and_is_counted() -> None:
    stats = StatsBuffer(Counters())

    def fail() -> int:
        raise ValueError("injected")

    assert isolated(stats, "a", fail, 3) == 3
    assert isolated(stats, "b", lambda: 4, 3) == 4
    taken = stats.take()
    assert taken is not None
    assert taken.data == {"hook_failures": [[["a"], 1]]}


class Half:
    """Offers, loads or prefixes of a rank. All calls are noted, those named fail. answers: of the others, by name."""

    def __init__(self, *broken: str, **answers: Any) -> None:
        self._broken, self._answers, self.called = broken, answers, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            self.called.append(name)
            if name in self._broken:
                raise RuntimeError("injected")
            return self._answers.get(name, [])

        return call


def worker(offers: Half, loads: Half, prefix: Half) -> WorkerSide:
    made = object.__new__(WorkerSide)
    stats = StatsBuffer(Counters())
    made.__dict__.update(offers=offers, loads=loads, prefix=prefix, stats=stats, _report=WorkerReport())
    made.__dict__.update(_producer=None, _consumer=None, _idle=True, _ended=set(), _let_go=set())
    return made


def test_orders_of_one_half_are_carried_out_whatever_another_one_does() -> None:
    offers, loads, prefix = Half("drop", "poll", "open", "advance"), Half("cancel", "release"), Half("before_batch")
    side = worker(offers, loads, prefix)
    side.before_batch(StepMeta(open=[OPEN, OPEN]))
    side.load(StepMeta())
    side.after_forward(StepMeta())
    assert offers.called == ["drop", "poll", "open", "open", "grow", "advance"]
    assert loads.called == ["cancel", "release", "start"]
    assert prefix.called == ["before_batch", "computes", "load", "computes", "after_forward"]
    assert failures(side.stats) == {"handle_preemptions": 5, "start_load_kv": 2, "wait_for_save": 1}


def test_what_is_known_of_the_end_is_told_whatever_fails() -> None:
    offers, loads, prefix = Half("poll", "finished"), Half("rest", "poll"), Half("poll", "ended", finished={"stored"})
    loads.ended = Ended(done={"loaded"})
    side = worker(offers, loads, prefix)
    assert side.finished({"a"}) == ({"stored"}, Ended(done={"loaded"}))
    assert prefix.called == ["rest", "poll", "finished", "ended"]
    assert failures(side.stats) == {"get_finished": 6}
    offers, loads, prefix = Half(finished={"sent"}), Half(), Half(finished={"sent"}, ended=Ended(failed={"b"}))
    loads.ended = Half("take")
    side = worker(offers, loads, prefix)
    assert side.finished({"a"}) == ({"sent"}, Ended(failed={"b"}))
    assert failures(side.stats) == {"get_finished": 1}


@pytest.mark.parametrize("idle", [True, False])
def test_a_step_that_computes_nothing_leaves_the_interpreter_to_loads_of_both_kinds(idle: bool) -> None:
    given: list[bool] = []
    prefix, loads = Half(finished=set(), ended=Ended()), Half()
    prefix.computes, loads.ended = given.append, Ended()
    side = worker(Half(finished=set()), loads, prefix)
    side.load(StepMeta(idle=idle))
    assert given == [False, not idle]  # what a step waits for is decoded at full speed
    side.finished(set())
    assert [half.called.count("rest") for half in (loads, prefix)] == ([1, 1] if idle else [0, 0])


class Store(Half):
    """Gives back what it is told of, when it can."""

    def finished(self, req_ids: set[str], sent: set[str], offers: Any) -> set[str]:
        if "finished" in self._broken:
            raise RuntimeError("injected")
        return req_ids | sent


def test_blocks_that_a_store_may_still_read_are_given_back_when_it_can_say() -> None:
    offers, store, loads = Half(finished={"sent"}), Store("finished", ended=Ended()), Half()
    loads.ended = Ended()
    side = worker(offers, loads, store)
    assert side.finished({"a"})[0] == set()
    store._broken = ()
    offers._answers["finished"] = set[str]()
    assert side.finished(set())[0] == {"a", "sent"}
    assert side.finished(set())[0] == set()
