"""Servers that answer nonsense, late, or not at all, and what the proxy makes of them."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from kvserve_vllm.proxy.upstream import Upstream, said
from proxy_stand import Build, Engine, wait_until


class Odd(Engine):
    """An engine whose answers to completions and to ``/v1/models`` are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.app = self.answer
        self.content: dict[str, bytes] = {}
        self.drip_s = 0.0

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        content = self.content.get(scope.get("path", ""))
        if content is None:
            await self.known(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        for byte in content if self.drip_s else ():
            await asyncio.sleep(self.drip_s)
            await send({"type": "http.response.body", "body": bytes([byte]), "more_body": True})
        await send({"type": "http.response.body", "body": b"" if self.drip_s else content})


class Locked(Engine):
    """An engine that was started with ``--api-key``: its health is for everybody, the rest for who has the key."""

    def __init__(self) -> None:
        super().__init__()
        self.app = self.answer
        self.refused = 0

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope.get("path", "").startswith("/v1/")
        if not guarded or (b"authorization", b"Bearer sesame") in scope["headers"]:
            await self.known(scope, receive, send)
            return
        self.refused += 1
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def test_a_server_with_a_key_says_who_it_is_to_a_proxy_that_has_it(stand: Build) -> None:
    p, d = Locked(), Locked()
    at = stand([p], [d], api_key="sesame")
    assert at.proxy.decode.servers[0].peer is not None
    assert at.text(headers={"authorization": "Bearer sesame"}) == "remote"
    assert at.post().status_code == 401  # the proxy's key is not lent to clients


def test_without_the_key_it_is_asked_once_and_the_service_goes_on(
    stand: Build, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = Locked(), Locked()
    at = stand([p], [d])
    seen = d.health_checks
    wait_until(lambda: d.health_checks > seen + 2)
    assert d.refused == 1
    assert [r.levelname for r in caplog.records if "--api-key-file" in r.message] == ["WARNING"]
    assert at.text(headers={"authorization": "Bearer sesame"}) == "remote"


def offer(locator: str) -> bytes:
    return f'{{"kv_transfer_params": {{"kvserve": {{"locator": {locator}}}}}}}'.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        offer('{"a": ' + "[" * 970 + "]" * 970 + "}"),
        offer('{"a": NaN}'),
        offer('{"a": "\\ud800"}'),
        b"\xff",
    ],
)
def test_an_offer_that_makes_no_sense_is_none(stand: Build, content: bytes) -> None:
    p, d = Odd(), Engine()
    at = stand([p], [d])
    p.content["/v1/completions"] = content
    assert at.text() == "local"
    assert at.metric('alone_total{reason="nothing_offered"}') == 1


def test_the_time_of_the_prefill_step_is_that_of_all_of_it(stand: Build) -> None:
    p, d = Odd(), Engine()
    at = stand([p], [d], prefill_timeout_s=0.3)
    p.content["/v1/completions"], p.drip_s = b" " * 10_000, 0.02  # always something, never all
    assert at.text() == "local"
    assert at.metric('alone_total{reason="prefill_timeout"}') == 1


@pytest.mark.parametrize("content", [b"[" * 100_000, b"{", b'{"data": 3}'])
def test_an_odd_answer_to_a_check_does_not_end_the_checks(stand: Build, content: bytes) -> None:
    p, d = Engine(), Odd()
    at = stand([p], [d])
    d.content["/v1/models"] = content
    d.healthy = False
    server = at.proxy.decode.servers[0]
    wait_until(lambda: not server.up)
    d.healthy = True
    wait_until(lambda: server.up)
    assert at.text() == "remote"
    d.content.clear()
    wait_until(lambda: server.asked)


def test_a_server_that_cannot_describe_itself_yet_is_asked_again(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    server, asked = at.proxy.decode.servers[0], d.describe_calls
    d.describe_fails = 503
    server.asked, server.peer = False, None
    wait_until(lambda: d.describe_calls > asked + 1)
    assert server.peer is None
    d.describe_fails = None
    wait_until(lambda: server.peer is not None)


def test_requests_at_a_server_that_hangs_are_answered_by_another(stand: Build) -> None:
    p, stuck, fine = Engine(), Engine(), Engine()
    at = stand([p], [stuck, fine], health_timeout_s=0.5)
    stuck.hold_s = 20.0
    stuck.hangs = True  # it takes connections and answers nothing any more, as a process that is stopped
    answers = [at.text() for _ in range(2)]
    assert "local" in answers  # by the other one, without the transfer
    assert len(fine.seen) == fine.finished >= 2
    assert stuck.finished == 0
    assert at.metric('alone_total{reason="decode_failed"}') >= 1
    server = next(s for s in at.proxy.servers if s.url == at.engines[stuck].url)
    wait_until(lambda: not server.up)
    assert server.outstanding == 0
    stuck.hangs = False


def test_a_stream_of_a_server_that_hangs_ends_with_an_error(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d], health_timeout_s=0.5)
    d.gate = True
    d.let_go(1)
    with at.streamed() as lines:
        assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] == "remote0 "
        d.hangs = True
        assert "does not answer its health checks" in json.loads(next(lines).removeprefix("data: "))["error"]["message"]
    d.hangs = d.gate = False


def test_a_server_that_drains_may_finish_what_it_has(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d], health_timeout_s=0.1)
    d.gate = True
    d.let_go(1)
    with at.streamed() as lines:
        next(lines)
        d.healthy = False
        checks = d.health_checks
        wait_until(lambda: d.health_checks > checks + 8)
        d.let_go(9)
        assert list(lines)[-1] == "data: [DONE]"
    assert not at.proxy.decode.servers[0].up


def test_a_server_that_is_slow_under_load_is_tried_as_long_as_it_is_the_only_one(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d], health_timeout_s=0.1)
    d.healthy = False
    wait_until(lambda: not at.proxy.decode.servers[0].up)
    assert at.text() == "remote"
    at.kill(d)
    wait_until(lambda: at.proxy.decode.servers[0].refuses)
    assert at.post().status_code == 503


def test_a_stream_that_goes_on_is_not_cut_though_health_checks_are_late(stand: Build) -> None:
    p, d = Engine(), Engine(pieces=150)
    at = stand([p], [d], health_timeout_s=0.5)
    d.piece_s = 0.02
    with at.streamed() as lines:
        next(lines)
        d.hangs = True
        rest = list(lines)
    d.hangs = False
    assert (len(rest), rest[-1]) == (150, "data: [DONE]")


def test_errors_are_named_in_the_log_also_where_they_say_nothing() -> None:
    assert said(httpx.ReadTimeout("")) == "ReadTimeout"
    assert said("status 503") == "status 503"


def test_a_connection_that_comes_late_is_a_strike_and_no_verdict() -> None:
    server = Upstream("decode", "http://d")
    server.failed(httpx.ConnectTimeout(""))
    assert (server.up, server.refuses) == (True, False)
    server.failed(httpx.ConnectError("refused"))
    assert (server.up, server.refuses) == (False, True)


def test_whatever_asking_a_server_raises_is_its_failure_and_no_status_500(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d], health_every_s=60.0)
    at.proxy.prefill.servers[0].url = "http://127.0.0.1:99999"
    assert at.text() == "local"
    assert at.metric('alone_total{reason="prefill_failed"}') == 1
    at.proxy.decode.servers[0].url = "http://127.0.0.1:99999"
    assert at.post().status_code == 503
    assert at.client.get("/v1/models").status_code == 502
