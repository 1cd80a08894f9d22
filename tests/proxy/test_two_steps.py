from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from kvserve_core.registry import default_registry
from proxy_stand import PEER, Build, Engine, events, wait_until


def test_a_completion_takes_two_steps(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    assert at.text(max_tokens=7, temperature=0, min_tokens=3) == "remote"
    (first,), (second,) = p.seen, d.seen
    assert first["max_tokens"] == 1
    assert first["stream"] is False
    assert "min_tokens" not in first
    assert first["temperature"] == 0
    assert second["max_tokens"] == 7
    assert second["min_tokens"] == 3
    asked, given = first["kv_transfer_params"], second["kv_transfer_params"]
    assert (asked["do_remote_decode"], asked["do_remote_prefill"]) == (True, False)
    assert (given["do_remote_decode"], given["do_remote_prefill"]) == (False, True)
    assert given["kvserve"]["locator"]["transfer_id"] == asked["kvserve"]["transfer_id"]
    assert given["kvserve"]["prompt"] == "digest"  # whatever else the prefill server has to say
    assert at.metric('requests_total{outcome="ok"}') == 1
    assert at.metric("prefill_seconds_count") == at.metric("first_byte_seconds_count") == 1


def test_the_consumer_is_named_with_its_link(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    at.text()
    link = urlsplit(at.engines[d].url).netloc
    assert p.seen[0]["kv_transfer_params"]["kvserve"]["peer"] == PEER | {"link": link}
    assert at.client.get("/health").json()["servers"][1]["known"] is True


def test_a_consumer_that_does_not_describe_itself_is_left_unknown_and_not_asked_again(stand: Build) -> None:
    p, d = Engine(), Engine(describes=False)
    at = stand([p], [d])
    assert at.text() == "remote"
    assert "peer" not in p.seen[0]["kv_transfer_params"]["kvserve"]
    checks = d.health_checks
    wait_until(lambda: d.health_checks > checks + 2)
    assert d.describe_calls == 1


def test_chat_streams_piece_by_piece(stand: Build) -> None:
    p, d = Engine(), Engine(pieces=3)
    at = stand([p], [d])
    d.gate = True
    body = {"model": "m", "messages": [], "stream": True, "max_completion_tokens": 9, "stream_options": {}}
    with at.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line)
        for i in range(3):  # each piece is let go only after the one before has arrived here
            d.let_go(i + 1)
            assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] == f"remote{i} "
        assert next(lines) == "data: [DONE]"  # the engine has not closed its stream yet, and we leave
    wait_until(lambda: d.running == 0)
    assert at.metric('requests_total{outcome="ok"}') == 1
    assert p.seen[0]["max_completion_tokens"] == 1
    assert "stream_options" not in p.seen[0]
    assert d.seen[0]["max_completion_tokens"] == 9


def test_headers_reach_both_steps_as_demands(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    demands = {"x-kvserve-slo": "500ms", "X-KVServe-Min-Quality": "0.9", "x-kvserve-workload": "code"}
    assert at.post(demands | {"authorization": "Bearer t", "x-request-id": "r1"}).status_code == 200
    for body in (p.seen[0], d.seen[0]):
        mine = body["kv_transfer_params"]["kvserve"]
        assert (mine["slo"], mine["min_quality"], mine["workload"]) == (0.5, 0.9, "code")
    for headers in (p.headers[0], d.headers[0]):
        assert headers["authorization"] == "Bearer t"
        assert headers["x-request-id"] == "r1"
        assert not any(name.startswith("x-kvserve") for name in headers)


def test_the_workload_is_the_clients_word_or_else_the_classifiers(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d], classifier=default_registry().create("workload", "rules"))
    at.post(prompt="Write a function that sorts a list.")
    at.post({"x-kvserve-workload": "mine"}, prompt="Write a function that sorts a list.")
    at.post(prompt=[1, 2, 3])
    named = [body["kv_transfer_params"]["kvserve"].get("workload") for body in d.seen]
    assert named == ["code", "mine", None]


def test_requests_without_an_id_get_one_for_both_steps(stand: Build) -> None:
    p, d = Engine(), Engine()
    stand([p], [d]).text()
    assert len(p.headers[0]["x-request-id"]) == 32
    assert p.headers[0]["x-request-id"] == d.headers[0]["x-request-id"]


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"x-kvserve-slo": "fast"}, "x-kvserve-slo: duration 'fast' is not understood"),
        ({"x-kvserve-slo": "0s"}, "x-kvserve-slo"),
        ({"x-kvserve-min-quality": "1.5"}, "x-kvserve-min-quality"),
        ({"x-kvserve-min-quality": "nan"}, "x-kvserve-min-quality"),
        ({"x-kvserve-workload": "w" * 129}, "x-kvserve-workload"),
        ({"x-kvserve-quality": "1"}, "did you mean 'x-kvserve-min-quality'?"),
    ],
)
def test_bad_headers_are_refused_before_any_server_sees_them(stand: Build, headers: dict[str, str], says: str) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    answer = at.post(headers)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert p.seen == d.seen == []
    assert at.metric('requests_total{outcome="refused"}') == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "JSON object"),
        (b'{"cache_salt": 3}', "cache_salt"),
        (b'{"kv_transfer_params": {"kvserve": {"locator": {}}}}', "set by the proxy"),
    ],
)
def test_bad_bodies_are_refused(stand: Build, content: bytes, says: str) -> None:
    p, d = Engine(), Engine()
    answer = stand([p], [d]).client.post("/v1/completions", content=content)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert p.seen == d.seen == []


def test_the_decode_server_keeps_quality_classes_apart(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    for floor in ("0.9", "0.90", "1", "1.0", "0.9999999"):
        at.post({"x-kvserve-min-quality": floor})
    at.post()
    at.post(cache_salt="tenant/1@x")
    lax, lax_again, exact, exact_again, nearly, usual, own = (body["cache_salt"] for body in d.seen)
    assert lax == lax_again
    assert exact == exact_again
    assert len({lax, exact, nearly, usual, own}) == 5
    assert not set("/@\\\0") & set(own)
    assert len(own) < 128
    assert all("cache_salt" not in body for body in p.seen[:-1])  # what it computes is exact
    assert p.seen[-1]["cache_salt"] == "tenant/1@x"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": ["a", "b"]}, "several_prompts"),
        ({"prompt": [[1, 2], [3]]}, "several_prompts"),
        ({"use_beam_search": True, "n": 2}, "beam_search"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_one_transfer_cannot_serve_is_computed_alone(stand: Build, body: dict[str, object], reason: str) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    assert at.text(**body) == "local"
    assert p.seen == []
    assert at.metric(f'alone_total{{reason="{reason}"}}') == 1


@pytest.mark.parametrize("prompt", [["a"], [1, 2, 3], [[1, 2]], [7]])
def test_one_prompt_in_any_form_is_transferred(stand: Build, prompt: list[object]) -> None:
    assert stand([Engine()], [Engine()]).text(prompt=prompt, n=1) == "remote"


def test_several_samples_of_a_prompt_share_its_transfer(stand: Build) -> None:
    p, d = Engine(), Engine()
    assert stand([p], [d]).text(n=3) == "remote"
    assert "n" not in p.seen[0]
    assert d.seen[0]["n"] == 3


def test_other_paths_go_to_a_decode_server_as_they_are(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    answer = at.client.post("/tokenize?detail=1", json={"prompt": "x"})
    assert answer.status_code == 201
    assert answer.json() == {"got": {"prompt": "x"}, "query": {"detail": "1"}}
    assert answer.headers["x-engine"] == "this one"
    assert at.client.get("/v1/models").json() == {"data": [{"id": "m"}]}
    assert at.client.get("/nowhere").status_code == 404


def test_many_at_once_are_spread_and_each_gets_its_own_transfer(stand: Build) -> None:
    prefill, decode = [Engine(), Engine()], [Engine(), Engine()]
    at = stand(prefill, decode)
    for engine in decode:
        engine.piece_s = 0.01
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: events(at.post(stream=True, prompt=f"p{i}")), range(32)))
    assert all(len(a) == 4 and a[-1] == "[DONE]" for a in answers)
    ids = [b["kv_transfer_params"]["kvserve"]["locator"]["transfer_id"] for e in decode for b in e.seen]
    assert len(set(ids)) == 32
    for role in (prefill, decode):
        assert min(len(e.seen) for e in role) >= 10
    assert at.metric('requests_total{outcome="ok"}') == 32
    assert all(s["outstanding"] == 0 for s in at.client.get("/health").json()["servers"])
