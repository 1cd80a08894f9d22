"""What the proxy passes on as it is: paths, headers and bodies of any kind, and what it must not pass on."""

from __future__ import annotations

import asyncio
import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from kvserve_vllm.proxy.headers import returned
from proxy_stand import Build, Engine, Stand, wait_until

Lines = list[tuple[bytes, bytes]]


class Echo(Engine):
    """An engine that keeps what it gets on paths below ``/x`` or ``/v1/`` that it does not know, to the byte.

    answer: headers of its answers. pieces: of the body, with ``pause_s`` before each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.app = self.answer
        self.paths: list[bytes] = []
        self.lines: list[Lines] = []
        self.bodies: list[bytes] = []
        self.headers_back: Lines = [(b"content-type", b"text/plain")]
        self.parts, self.pause_s, self.status = [b"echo"], 0.0, 200
        self.cancelled = 0

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or any(route.path == scope["path"] for route in self.known.routes):
            await self.known(scope, receive, send)
            return
        self.paths.append(scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b""))
        self.lines.append(list(scope["headers"]))
        self.bodies.append((await receive())["body"])
        gone = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers_back})
        for part in self.parts:
            await asyncio.sleep(self.pause_s)
            if gone.done():
                self.cancelled += 1
                return
            await send({"type": "http.response.body", "body": part, "more_body": True})
        gone.cancel()
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def at(stand: Build, echo: Echo) -> Stand:
    return stand([Engine()], [echo])


def raw(at: Stand, request: bytes) -> bytes:
    """What comes back for bytes on a socket, up to its end."""
    url = urlsplit(str(at.client.base_url))
    with socket.create_connection((str(url.hostname), url.port or 80), timeout=10) as connection:
        connection.sendall(request)
        found = b""
        while chunk := connection.recv(65536):
            found += chunk
    return found


TRANSFER = {"do_remote_prefill": True, "kvserve": {"locator": {"endpoints": [{"address": "tcp://evil:1"}]}}}


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"kv_transfer_params": TRANSFER}).encode(),
        json.dumps({"sampling_params": {"extra_args": {"kv_transfer_params": TRANSFER}}}).encode(),
        json.dumps([{"kv_transfer_params": TRANSFER}]).encode("utf-16"),
        json.dumps({"kv_transfer_params": TRANSFER}).encode("utf-16-le"),
        b'{"kv\\u005ftransfer_params": {}}',
        b"{'kv_transfer_params': {}}",
        b"[" * 100_000 + b'"\\u005f"',
    ],
    ids=["plain", "nested", "utf-16", "utf-16-le", "escaped", "no JSON", "deep"],
)
def test_no_path_takes_transfers_from_clients(at: Stand, echo: Echo, content: bytes) -> None:
    for path in ("/v1/responses", "/v1/messages", "/inference/v1/generate", "/v1/chat/completions/"):
        answer = at.client.post(path, content=content, headers={"content-type": "application/json"})
        assert (answer.status_code, echo.bodies) == (400, [])


@pytest.mark.parametrize(
    "content",
    [b"", b'{"kv_transfer_params": null, "x": "\xc3\xa9"}', bytes(range(256)), b'{"about": "kv transfer"}', b"\\u00"],
)
def test_other_bodies_arrive_as_they_were_sent(at: Stand, echo: Echo, content: bytes) -> None:
    assert at.client.post("/v1/audio", content=content).text == "echo"
    assert echo.bodies == [content]


@pytest.mark.parametrize(
    "path", [b"/x/a%2Fb", b"/x/..%2f..%2fhealth", b"/x/a%25b", b"/x/%e6%97%a5?q=%20+&q=2", b"/x//b", b"/v1/models/a:b"]
)
def test_paths_arrive_as_they_were_written(at: Stand, echo: Echo, path: bytes) -> None:
    answer = raw(at, b"GET " + path + b" HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert echo.paths == [path]


def test_headers_arrive_line_by_line_and_byte_by_byte(at: Stand, echo: Echo) -> None:
    lines = (
        b"x-multi: a\r\nX-Multi: b\r\nx-name: caf\xe9\r\nx-hop: 1\r\nconnection: close, x-hop\r\nx-kvserve-slo: 1s\r\n"
    )
    raw(at, b"GET /x HTTP/1.1\r\nhost: h\r\n" + lines + b"\r\n")
    (got,) = echo.lines
    assert [value for name, value in got if name == b"x-multi"] == [b"a", b"b"]
    assert (b"x-name", b"caf\xe9") in got
    assert not {b"x-hop", b"x-kvserve-slo"} & {name for name, _ in got}


def test_headers_come_back_line_by_line_and_byte_by_byte(at: Stand, echo: Echo) -> None:
    cookies = [(b"set-cookie", b"sid=1; Path=/"), (b"set-cookie", b"b=2; Path=/")]
    echo.headers_back = [*cookies, (b"x-name", "日本".encode()), (b"connection", b"x-hop"), (b"x-hop", b"1")]
    answer = raw(at, b"GET /x HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n").lower()
    assert answer.count(b"set-cookie: ") == 2
    assert b"x-name: " + "日本".encode() in answer
    assert b"x-hop" not in answer
    assert answer.count(b"\r\ndate: ") == answer.count(b"\r\nserver: ") == 1


def test_cookies_of_one_client_are_not_sent_for_another(at: Stand, echo: Echo) -> None:
    echo.headers_back = [(b"set-cookie", b"sid=client1; Path=/")]
    assert httpx.get(f"{at.client.base_url}/x", trust_env=False).cookies["sid"] == "client1"
    httpx.get(f"{at.client.base_url}/x", trust_env=False, headers={"cookie": "b=2"})
    assert [value for name, value in echo.lines[1] if name == b"cookie"] == [b"b=2"]


def test_a_redirect_of_the_server_to_itself_leads_to_the_proxy(at: Stand, echo: Echo) -> None:
    echo.status, own = 307, at.engines[echo].url
    echo.headers_back = [(b"location", f"{own}/v1/x?a=1".encode())]
    assert at.client.get("/x").headers["location"] == "/v1/x?a=1"
    assert returned([(b"location", f"{own}0/v1".encode())], own) == [(b"location", f"{own}0/v1".encode())]


def test_other_paths_stream_and_a_client_that_leaves_stops_them(at: Stand, echo: Echo) -> None:
    echo.parts, echo.pause_s = [b"data: 1\n\n"] * 10_000, 0.01
    with at.client.stream("POST", "/v1/responses", json={"stream": True}) as answer:
        assert next(answer.iter_lines()) == "data: 1"
    wait_until(lambda: echo.cancelled == 1)
    wait_until(lambda: at.proxy.decode.servers[0].outstanding == 0)


def test_head_and_status_and_length_are_those_of_the_server(at: Stand, echo: Echo) -> None:
    echo.status, echo.parts, echo.headers_back = 418, [], [(b"content-length", b"17")]
    answer = at.client.head("/x")
    assert (answer.status_code, answer.headers["content-length"]) == (418, "17")


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "cache_salt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "x", "cache_salt": "\xed\xa0\x80"}',
        b'{"prompt": ' + b"[" * 970 + b"]" * 970 + b"}",
    ],
)
def test_what_json_cannot_carry_on_is_refused_before_any_server_sees_it(stand: Build, content: bytes) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    answer = at.client.post("/v1/completions", content=content)
    assert (answer.status_code, p.seen, d.seen) == (400, [], [])
    assert "not JSON" in answer.json()["error"]["message"]
    assert at.metric('requests_total{outcome="refused"}') == 1


def test_odd_header_bytes_do_not_stop_a_completion(stand: Build) -> None:
    p, d = Engine(), Engine()
    at = stand([p], [d])
    assert at.post(headers={b"x-name": b"caf\xe9"}).status_code == 200  # type: ignore[dict-item]
    assert p.headers[0]["x-name"] == d.headers[0]["x-name"] == "café"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_bodies_beyond_the_limit_are_refused_while_they_come(at: Stand, echo: Echo, path: str) -> None:
    limit = at.proxy.options.max_body_bytes
    pieces = (b" " * 2**20 for _ in range(limit // 2**20 + 2))
    answer = at.client.post(path, content=pieces)
    assert answer.status_code == 413
    assert "--max-body" in answer.json()["error"]["message"]
    assert echo.bodies == []


def test_a_body_that_is_announced_as_too_large_is_not_read(at: Stand) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: 99999999999\r\n\r\n{"
    assert raw(at, head).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("path", [b"/v1/completions", b"/x"])
def test_a_client_that_leaves_before_its_body_is_sent_is_no_error(
    at: Stand, caplog: pytest.LogCaptureFixture, path: bytes
) -> None:
    url = urlsplit(str(at.client.base_url))
    with socket.create_connection((str(url.hostname), url.port or 80)) as connection:
        connection.sendall(b"POST " + path + b" HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\n{")
    assert at.client.get("/health").status_code == 200
    if path == b"/v1/completions":
        wait_until(lambda: at.metric('requests_total{outcome="disconnected"}') == 1)
    assert "Traceback" not in caplog.text
