"""Transfers that fail: the request is computed where it runs, or fails cleanly, and the engine goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvserve_core.spec import KVSpec
from vllm_engines import EngineProcess, external_tokens, generate, held, metrics, scheduler_side, worker_side
from vllm_models import save
from vllm_pairs import NEW_TOKENS, Pair
from vllm_peers import Peer, Planes, fetched
from vllm_segments import tiny_spec
from vllm_servers import wait_until

Start = Callable[..., EngineProcess]
Prompts = list[list[int]]
CELL = 256
SLOW = {
    "lease": "1s",
    "transport": {"tcp": {"faults": "corrupt:1", "max_bandwidth": "8Mbps", "heartbeat": "0.5s"}},
}
IMPATIENT = {"deadline": "3s"}


@dataclass(frozen=True)
class Prefilled:
    """A prompt of a model, and its KV."""

    kv: KVSpec
    prompt: list[int]
    planes: Planes


def watch(llm: Any) -> None:
    """Keep how loads end, as the scheduler is told."""
    fetching = scheduler_side(llm)._fetching
    learn, llm.kvserve_ends = fetching.learn, []

    def keep(report: Any) -> None:
        llm.kvserve_ends += report.loads
        learn(report)

    fetching.learn = keep


def ends(llm: Any) -> list[str]:
    """Reasons of the loads that ended since the last call."""
    return [reason for reason, _ in ends_and_valid(llm)]


def ends_and_valid(llm: Any) -> list[tuple[str, int]]:
    """The same with how many tokens had come until then."""
    kept, llm.kvserve_ends = llm.kvserve_ends, []
    return [(end.reason, end.valid) for end in kept]


@pytest.fixture(scope="module")
def pair(start: Start, folders: dict[str, Path]) -> Pair:
    """A producer that corrupts the first segment it sends, is slow, and forgets soon; a consumer that is impatient."""
    prefill = start(folders["llama"], "kv_producer", extra=SLOW)
    decode = start(folders["llama"], "kv_consumer", extra=IMPATIENT)
    decode.call(watch)
    return Pair(prefill, decode)


def check_recomputed(pair: Pair, prompt: list[int], offered: dict[str, Any], reason: str) -> None:
    expected = pair.alone([prompt])
    pair.decode.call(ends)
    answer = pair.answers([prompt], [offered])[0]
    assert (answer.tokens, answer.finish) == (expected[0], "length")
    (found,) = pair.decode.call(ends)  # one attempt: no livelock
    assert reason in found
    assert not any(pair.decode.call(held).values())


def test_a_corrupt_segment(pair: Pair, prompts: Prompts) -> None:
    check_recomputed(pair, prompts[4], pair.offers([prompts[4]])[0], "IntegrityError")


def test_after_a_failure_transfers_go_on(pair: Pair, prompts: Prompts) -> None:
    expected = pair.alone([prompts[4]])
    pair.decode.call(ends)
    assert pair.disaggregated([prompts[4]]) == expected
    assert pair.decode.call(ends) == [""]


def test_a_lost_lease(pair: Pair, prompts: Prompts) -> None:
    offered = pair.offers([prompts[4]])[0]
    time.sleep(2.0)
    check_recomputed(pair, prompts[4], offered, "LeaseLost")
    assert not any(pair.prefill.call(held).values())


def test_a_slow_peer_past_the_deadline(pair: Pair, prompts: Prompts) -> None:
    check_recomputed(pair, prompts[7], pair.offers([prompts[7]])[0], "TransferTimeout")


def test_a_locator_of_another_prompt_is_not_used(pair: Pair, prompts: Prompts) -> None:
    offered = pair.offers([prompts[4]])[0]
    other = prompts[6][: len(prompts[4])]
    expected = pair.alone([other])
    pair.decode.call(ends)
    assert pair.answers([other], [offered])[0].tokens == expected[0]
    assert pair.decode.call(ends) == []
    assert not any(pair.prefill.call(held).values())  # it was released


@pytest.mark.parametrize(
    "table", [{"locator": {"transfer_id": 3}}, {"locator": "x"}, {"peer": []}, {"slo": "soon"}, "text"]
)
def test_params_that_make_no_sense_are_ignored(pair: Pair, prompts: Prompts, table: Any) -> None:
    given = {"do_remote_prefill": True, "do_remote_decode": True, "kvserve": table}
    expected = pair.alone([prompts[1]])
    for engine in (pair.decode, pair.prefill):
        answer = engine.call(generate, [prompts[1]], NEW_TOKENS, [given])[0]
        assert (answer.tokens, answer.params) == (expected[0], None)


def test_another_models_cache_is_refused(
    start: Start, pair: Pair, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = start(save("llama", tmp_path_factory.mktemp("other"), seed=8), "kv_producer")
    offered = Pair(other, pair.decode).offers([prompts[3]])[0]
    check_recomputed(pair, prompts[3], offered, "Unacceptable")


def test_the_policy_fail_ends_the_request_and_no_other(
    start: Start, folders: dict[str, Path], prompts: Prompts
) -> None:
    prefill = start(folders["llama"], "kv_producer", extra=SLOW)
    strict = Pair(prefill, start(folders["llama"], "kv_consumer", policy="fail"))
    expected = strict.alone([prompts[3]])
    lost = strict.offers([prompts[4]])[0]
    time.sleep(2.0)
    good = strict.offers([prompts[3]])[0]
    answers = strict.answers([prompts[4], prompts[3]], [lost, good])
    assert [a.finish for a in answers] == ["error", "length"]
    assert answers[1].tokens == expected[0]
    assert not any(strict.decode.call(held).values())


@pytest.fixture(scope="module")
def prefilled(pair: Pair, folders: dict[str, Path], prompts: Prompts) -> Prefilled:
    """A prompt of two cells, and its KV as the prefill engine computed it."""
    prompt, kv = prompts[6][:400], tiny_spec(folders["llama"])
    found = (fetched(kv, pair.offers([prompt])[0]) for _ in range(2))  # the first segment it sends is corrupt
    return Prefilled(kv, prompt, next(planes for planes in found if planes is not None))


def answered(
    pair: Pair, prompt: list[int], params: dict[str, Any], meanwhile: Callable[[], None]
) -> tuple[Any, str, int]:
    """The decode engine's answer while something happens; how its load ended, and how many tokens had come."""
    pair.decode.call(ends)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(pair.answers, [prompt], [params])
        meanwhile()
    ((reason, valid),) = pair.decode.call(ends_and_valid)
    return answer.result()[0], reason, valid


@pytest.mark.parametrize("state", ["before its offer", "while it sends", "between segments"])
def test_a_peer_that_dies_before_all_of_it_came(pair: Pair, prefilled: Prefilled, state: str) -> None:
    expected = pair.alone([prefilled.prompt])[0]
    with Peer(prefilled.kv, prefilled.planes, "1Mbps" if state == "while it sends" else "1Gbps") as peer:

        def die() -> None:
            peer.wait_asked(CELL if state == "between segments" else 0)
            time.sleep(0.3)  # what it had to give before is under way, or there
            peer.kill()

        if state == "before its offer":
            peer.kill()
            answer, reason, valid = answered(pair, prefilled.prompt, peer.named(state), lambda: None)
        else:
            params = peer.offer(state, CELL if state == "between segments" else len(prefilled.prompt) - 1)
            answer, reason, valid = answered(pair, prefilled.prompt, params, die)
    assert (answer.tokens, answer.finish) == (expected, "length")
    assert "PeerLost" in reason or "TransferTimeout" in reason
    assert valid == (CELL if state == "between segments" else 0)
    assert not any(pair.decode.call(held).values())


def test_a_peer_that_dies_after_its_last_segment_is_not_missed(
    pair: Pair, prefilled: Prefilled, tmp_path: Path
) -> None:
    expected = pair.alone([prefilled.prompt])[0]
    before = pair.decode.call(external_tokens)
    with Peer(prefilled.kv, prefilled.planes, "1Gbps") as peer:

        def die() -> None:
            wait_until(lambda: (tmp_path / "arrived").exists())
            peer.kill()
            (tmp_path / "go").touch()

        pair.decode.call(hold_release, tmp_path)
        params = peer.offer("after the last", len(prefilled.prompt) - 1)
        answer, reason, valid = answered(pair, prefilled.prompt, params, die)
    assert (answer.tokens, reason, valid) == (expected, "", len(prefilled.prompt) - 1)
    assert pair.decode.call(external_tokens) - before == len(prefilled.prompt) - 1
    assert not any(pair.decode.call(held).values())


def hold_release(llm: Any, folder: Path) -> None:
    """What the next load has to say to its producer waits until the folder holds ``go``."""
    consumer = worker_side(llm)._consumer

    def release(*given: Any) -> None:
        del consumer._release
        (folder / "arrived").touch()
        wait_until(lambda: (folder / "go").exists())
        consumer._release(*given)

    consumer._release = release


def test_a_producer_that_dies(pair: Pair, prompts: Prompts) -> None:
    """Last: the producer is gone after it."""
    expected = pair.alone([prompts[7], prompts[1]])
    offered = pair.offers([prompts[7], prompts[1]])
    pair.decode.call(ends)
    killer = threading.Timer(0.5, pair.prefill.kill)
    killer.start()
    first = pair.answers([prompts[7]], [offered[0]])[0]
    killer.join()
    second = pair.answers([prompts[1]], [offered[1]])[0]
    assert [first.tokens, second.tokens] == expected
    reasons = pair.decode.call(ends)
    assert len(reasons) == 2
    assert all("PeerLost" in r or "TransferTimeout" in r for r in reasons)
    assert not any(pair.decode.call(held).values())
    counted = pair.decode.call(metrics)
    assert counted["kvserve:transfers{ok=false,side=consumer}"] >= 5
    assert counted["kvserve:fallbacks{rung=recompute}"] >= 5
