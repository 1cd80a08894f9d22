"""Requests that end early or lose their blocks: nothing stays behind, and later ones are right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvserve_core.spec import Region
from vllm_engines import Answer, EngineProcess, forget, generate, held, metrics, scheduler_side, settle, worker_side
from vllm_pairs import Pair

Start = Callable[..., EngineProcess]
Prompts = list[list[int]]
SMALL = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_gpu_blocks_override": 64, "max_model_len": 1536}

DELIVERED = "kvserve:transfers{ok=true,side=producer}"


@pytest.fixture(scope="module")
def both(start: Start, folders: dict[str, Path]) -> EngineProcess:
    """One engine that offers and fetches, with a cache of 64 blocks and a slow link."""
    slow = {"transport": {"tcp": {"max_bandwidth": "8Mbps"}}}
    return start(folders["llama"], "kv_both", extra=slow, llm=SMALL)


def add(
    llm: Any, prompt: list[int], name: str, params: dict[str, Any] | None, max_tokens: int, salt: str | None = None
) -> None:
    from vllm import SamplingParams

    extra = {"kv_transfer_params": params} if params else None
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra)
    salted = {"cache_salt": salt} if salt else {}
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt} | salted, sampling)


def abort_while_loading(llm: Any, prompt: list[int], params: dict[str, Any]) -> int:
    """How many loads were in flight when the request was aborted."""
    add(llm, prompt, "gone", params, 4)
    for _ in range(3):
        llm.llm_engine.step()
    active = worker_side(llm).loads.active
    llm.llm_engine.abort_request(["gone"])
    settle(llm)
    return int(active)


def abort_while_prefilling(llm: Any, prompt: list[int]) -> int:
    """How many tokens had been announced when the request was aborted."""
    add(llm, prompt, "gone", {"do_remote_decode": True}, 1)
    for _ in range(4):
        llm.llm_engine.step()
    wanted = scheduler_side(llm)._offering._wanted
    announced = max(w.announced for w in wanted.values())
    llm.llm_engine.abort_request(["gone"])
    settle(llm)
    return int(announced)


def long_answers(llm: Any, prompts: Prompts, params: list[Any]) -> tuple[list[Any], int]:
    """Answers of 200 tokens and how often a request was preempted meanwhile."""

    def preemptions() -> int:
        return int(sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"))

    before = preemptions()
    answers = generate(llm, prompts, 200, params)
    return answers, preemptions() - before


def preempt_while_fetched(
    llm: Any, others: Prompts, prompt: list[int], locator: dict[str, Any]
) -> tuple[dict[str, Answer], list[str]]:
    """Answers to the others, to the request that offers the prompt, and to one that fetches it; how the load ended.

    Its second cell is not encoded before blocks run out and the offering request, the last that came, loses its own.
    """
    worker, scheduler = worker_side(llm), scheduler_side(llm)
    offering, fetching, encoding = scheduler._offering, scheduler._fetching, worker._producer._encoding
    gate, reasons, answers = threading.Event(), list[str](), dict[str, Answer]()
    gather, learn = encoding._gather, fetching.learn

    def slow(name: str, at: Region) -> Any:
        if at.start > 0:
            gate.wait(60)
        return gather(name, at)

    def keep(report: Any) -> None:
        reasons.extend(end.reason for end in report.loads)
        learn(report)

    encoding._gather, fetching.learn = slow, keep
    for i, other in enumerate(others):
        add(llm, other, f"other{i}", None, 200)
    table = {"transfer_id": locator["kvserve"]["locator"]["transfer_id"]}
    add(llm, prompt, "offers", {"do_remote_decode": True, "kvserve": table}, 200)
    add(llm, prompt, "fetches", locator, 200, salt="of its own, to find nothing in the prefix cache")
    while llm.llm_engine.has_unfinished_requests():
        if any(wanted.attempts > 1 for wanted in offering._wanted.values()):
            gate.set()
        for output in llm.llm_engine.step():
            if output.finished:
                tokens, finish = list(output.outputs[0].token_ids), output.outputs[0].finish_reason
                answers[output.request_id.split("-")[0]] = Answer(tokens, finish, output.kv_transfer_params)
    encoding._gather, fetching.learn = gather, learn
    return answers, reasons


def test_an_abort_while_kv_is_on_its_way(both: EngineProcess, prompts: Prompts) -> None:
    pair = Pair(both, both)
    offered = pair.offers([prompts[7]])[0]
    both.call(settle)
    assert both.call(forget)
    assert both.call(abort_while_loading, prompts[7], offered) == 1
    found = both.call(held)
    assert (found["blocks"], found["loads"], found["fetches"], found["loading"]) == (0, 0, 0, 0)


def test_an_abort_while_the_prompt_is_computed(both: EngineProcess, prompts: Prompts) -> None:
    assert both.call(forget)
    assert 0 < both.call(abort_while_prefilling, prompts[7]) < len(prompts[7]) - 1
    assert not any(both.call(held).values())


def test_requests_that_lose_their_blocks_are_offered_anew(both: EngineProcess, prompts: Prompts) -> None:
    """Four prompts of 450 tokens and answers of 200 do not fit into 64 blocks: some are preempted, and resumed."""
    batch = [prompts[7][i * 300 : i * 300 + 450] for i in range(4)]
    expected = [both.call(generate, [prompt], 200)[0].tokens for prompt in batch]
    assert both.call(forget)
    answers, preempted = both.call(long_answers, batch, [{"do_remote_decode": True}] * 4)
    assert preempted > 0
    assert [a.tokens for a in answers] == expected
    ids = [a.params["kvserve"]["locator"]["transfer_id"] for a in answers]
    assert any("." in name for name in ids)  # a second offer has an id of its own
    both.call(settle)
    assert both.call(forget)
    again, preempted = both.call(long_answers, batch, [a.params for a in answers])
    assert preempted > 0  # some of those that had loaded, while others still did
    assert [a.tokens for a in again] == expected
    assert not any(both.call(held).values())


def test_a_request_that_loses_its_blocks_while_they_are_fetched(both: EngineProcess, prompts: Prompts) -> None:
    """A router that chooses the transfer id can send the second step before it has the answer of the first."""
    pair = Pair(both, both)
    *others, prompt = [prompts[7][i * 300 + 40 : i * 300 + 490] for i in range(3)]
    expected = [both.call(generate, [p], 200)[0].tokens for p in (*others, prompt)]
    (offered,) = pair.offers([prompt])
    assert both.call(forget)
    assert pair.answers([prompt], [offered], 200)[0].tokens == expected[-1]
    assert both.call(forget)
    offered["kvserve"]["locator"]["transfer_id"] = "early"
    answers, reasons = both.call(preempt_while_fetched, others, prompt, offered)
    assert [answers[name].tokens for name in ("other0", "other1", "offers", "fetches")] == [*expected, expected[-1]]
    (reason,) = reasons
    assert "preempted" in reason
    anew = answers["offers"].params
    assert anew is not None
    assert anew["kvserve"]["locator"]["transfer_id"] == "early.1"
    both.call(settle)
    assert both.call(forget)
    assert pair.answers([prompt], [anew], 200)[0].tokens == expected[-1]
    assert not any(both.call(held).values())


def test_outcomes_reach_the_controller_and_the_metrics(both: EngineProcess, prompts: Prompts) -> None:
    pair = Pair(both, both)
    offered = pair.offers([prompts[5]], {"slo": "1ms"})
    assert both.call(forget)  # this engine is both sides: it would answer from its own cache
    before = both.call(metrics)
    pair.answers([prompts[5]], offered, 2)
    after = both.call(metrics)
    for _ in range(50):
        both.call(generate, [prompts[0]], 2)  # the producer's report comes with some later step
        after = both.call(metrics)
        if after.get(DELIVERED, 0.0) > before.get(DELIVERED, 0.0):
            break

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    raw = (len(prompts[5]) - 1) * 3 * 2 * 2 * 64 * 4
    assert grown("kvserve:raw_bytes{}") == 2 * raw  # this engine is both sides
    assert grown("kvserve:wire_bytes{}") > 0
    assert grown("kvserve:external_tokens{}") == len(prompts[5]) - 1
    assert grown(DELIVERED) == grown("kvserve:transfers{ok=true,side=consumer}") == 1
    for name in ("compression_ratio", "encode_seconds", "transfer_seconds", "decode_seconds", "load_seconds"):
        assert grown(f"kvserve:{name}{{}}") >= 1
    assert sum(v for k, v in after.items() if k.startswith("kvserve:decisions{")) > 0
    assert after["kvserve:library_loaded{}"] == 0.0
    links = [v for k, v in after.items() if k.startswith("kvserve:goodput_bytes_per_second{")]
    assert len(links) == 1
    assert grown("kvserve:slo_misses{}") == 1
    assert any(name.startswith("kvserve:break_even_bytes_per_second{") for name in after)
    assert 1e5 < links[0] < 1.25e9  # moved off the prior of 10 Gbps, towards the 1 MB/s of this link


def break_once(llm: Any) -> None:
    """Make the workers' loads and the scheduler's offers each fail once."""
    loads, offering = worker_side(llm).loads, scheduler_side(llm)._offering

    def failing(owner: Any, name: str) -> None:
        kept = getattr(owner, name)

        def fail(*given: Any) -> None:
            setattr(owner, name, kept)
            raise RuntimeError("injected")

        setattr(owner, name, fail)

    failing(loads, "poll")
    failing(offering, "learn")


def test_hooks_that_fail_are_counted_and_the_request_is_served(both: EngineProcess, prompts: Prompts) -> None:
    pair = Pair(both, both)
    expected = pair.alone([prompts[5]])
    offered = pair.offers([prompts[5]])
    assert both.call(forget)
    both.call(break_once)
    assert [answer.tokens for answer in pair.answers([prompts[5]], offered)] == expected
    both.call(generate, [prompts[0]], 2)
    counted = both.call(metrics)
    assert counted["kvserve:hook_failures{hook=get_finished}"] == 1
    assert counted["kvserve:hook_failures{hook=update_connector_output}"] == 1


def close_connector(llm: Any) -> tuple[int, list[str]]:
    """kvserve's threads before the connector is shut down, and the names of those that are left."""

    def ours() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvserve")]

    before = len(ours())
    scheduler_side(llm).close()
    worker_side(llm).close()
    return before, ours()


def test_shutting_down_ends_every_thread(both: EngineProcess) -> None:
    """Last: the engine has no connector after it."""
    before, after = both.call(close_connector)
    assert before > 0
    assert after == []
