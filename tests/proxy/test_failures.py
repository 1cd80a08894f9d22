from __future__ import annotations

import json

import httpx
import pytest

from proxy_stand import Build, Engine, Stand, events, wait_until


def alone(at: Stand, reason: str) -> float:
    return at.metric(f'alone_total{{reason="{reason}"}}')


def up(at: Stand) -> list[bool]:
    return [s["up"] for s in at.client.get("/health").json()["servers"]]


def test_a_dead_prefill_server_is_left_out_and_another_one_takes_its_requests(stand: Build) -> None:
    dead, alive, d = Engine(), Engine(), Engine()
    at = stand([dead, alive], [d], health_every_s=60.0)  # nobody notices but the requests themselves
    at.kill(dead)
    assert [at.text() for _ in range(4)] == ["remote"] * 4
    assert len(alive.seen) == 4
    assert at.metric('retries_total{step="prefill"}') == 1
    assert up(at) == [False, True, True]
    assert at.metric(f'upstream_ejections_total{{role="prefill",url="{at.engines[dead].url}"}}') == 1


def test_without_any_prefill_server_the_decode_server_computes_alone(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d], health_every_s=60.0)
    at.kill(p)
    assert at.text() == "local"
    assert at.text() == "local"
    assert (alone(at, "prefill_failed"), alone(at, "no_prefill")) == (1, 1)
    health = at.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert "kv_transfer_params" not in d.seen[-1]
    assert d.seen[-1]["cache_salt"]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_prefill_server_in_trouble_is_passed_over(stand: Build, status: int) -> None:
    bad, good, d = Engine(), Engine(), Engine()
    at = stand([bad, good], [d])
    bad.fail = status
    assert [at.text() for _ in range(2)] == ["remote"] * 2
    assert len(good.seen) == 2
    assert at.metric('retries_total{step="prefill"}') >= 1


def test_a_prompt_that_prefill_refuses_gets_the_decode_servers_answer(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    p.fail = d.fail = 400
    answer = at.post()
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "as told")
    assert len(p.seen) == len(d.seen) == 1
    assert alone(at, "prefill_refused") == 1
    assert at.metric('requests_total{outcome="error"}') == 1
    assert up(at) == [True, True]


def test_a_prefill_server_that_offers_nothing(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    p.offers = False
    assert at.text() == "local"
    assert alone(at, "nothing_offered") == 1


def test_a_prefill_server_that_takes_too_long_is_given_up_and_told_so(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d], prefill_timeout_s=0.2)
    p.hold_s = 20.0
    assert at.text() == "local"
    assert alone(at, "prefill_timeout") == 1
    wait_until(lambda: p.aborted == 1)


def test_a_server_comes_back_by_its_health_check_and_is_asked_anew(stand: Build) -> None:
    p, d, other = Engine(), Engine(), Engine()
    at = stand([p], [d, other])
    d.healthy = False
    wait_until(lambda: up(at) == [True, False, True])
    assert at.text() == "remote"
    assert len(other.seen) == 1
    asked = d.describe_calls
    d.healthy = True
    wait_until(lambda: up(at) == [True, True, True] and d.describe_calls == asked + 1)


def test_a_decode_server_that_cannot_be_reached_leaves_the_transfer_to_another(stand: Build) -> None:
    p, dead, alive = Engine(), Engine(), Engine()
    at = stand([p], [dead, alive], health_every_s=60.0)
    at.kill(dead)
    assert [at.text() for _ in range(2)] == ["remote"] * 2
    assert len(p.seen) == 2
    assert len(alive.seen) == 2
    assert at.metric('retries_total{step="decode"}') == 1


def test_a_load_that_the_engine_fails_is_computed_instead(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    d.fail_transfers = 500
    assert at.text() == "local"
    assert alone(at, "load_failed") == 1
    assert up(at) == [True, True]


def test_an_error_of_the_decode_server_itself_is_the_clients(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    d.fail = 500
    answer = at.post()
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "as told")


def test_an_answer_that_breaks_before_its_end_is_computed_anew_elsewhere(stand: Build) -> None:
    p, bad, good = Engine(), Engine(), Engine()
    at = stand([p], [bad, good])
    bad.cut = 1
    assert at.text() == "local"
    assert len(good.seen) == 1
    assert alone(at, "decode_failed") == 1


def test_a_stream_that_breaks_ends_with_an_error_event(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    d.cut = 2
    first, second, last = events(at.post(stream=True))
    assert [json.loads(e)["choices"][0]["text"] for e in (first, second)] == ["remote0 ", "remote1 "]
    assert "broke off" in json.loads(last)["error"]["message"]
    assert at.metric('requests_total{outcome="broken"}') == 1


def test_no_decode_server_is_an_error_that_says_so(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d], health_every_s=60.0)
    at.kill(d)
    first, second = at.post(), at.post()
    assert first.status_code == second.status_code == 503
    assert "every decode server" in first.json()["error"]["message"]
    assert "no decode server is up" in second.json()["error"]["message"]
    assert at.client.get("/v1/models").status_code == 503
    health = at.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "down")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_prefill_stops_it(stand: Build, stream: bool) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    p.hold_s = 20.0
    with pytest.raises(httpx.ReadTimeout):
        at.client.post("/v1/completions", json={"prompt": "x", "stream": stream}, timeout=0.3)
    wait_until(lambda: p.aborted == 1 and p.running == 0)
    wait_until(lambda: at.metric('requests_total{outcome="disconnected"}') == 1)
    assert d.seen == []


def test_a_client_that_leaves_while_the_answer_is_made_stops_it(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    d.hold_s = 20.0
    with pytest.raises(httpx.ReadTimeout):
        at.client.post("/v1/completions", json={"prompt": "x"}, timeout=0.3)
    wait_until(lambda: d.aborted == 1 and d.running == 0)
    wait_until(lambda: all(s["outstanding"] == 0 for s in at.client.get("/health").json()["servers"]))


def test_a_client_that_leaves_in_mid_stream_stops_it(stand: Build) -> None:
    p, d = Engine(), Engine(pieces=10_000)
    at = stand([p], [d])
    d.piece_s = 0.01
    with at.streamed() as lines:
        next(lines)
        assert d.running == 1
    wait_until(lambda: d.aborted == 1 and d.running == 0)
    wait_until(lambda: at.metric('requests_total{outcome="disconnected"}') == 1)
    assert at.text() == "remote"
