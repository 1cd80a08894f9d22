"""Small engines that speak the protocol over real sockets, and the proxy in front of them, also over a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from kvserve_vllm.proxy.app import Proxy

PEER = {"wire": [1, 1], "reads": {"codec:zstd": [1]}, "device": "cpu", "fingerprint": "f", "shard": {"layers": [0]}}


class Served:
    """An application on a port of its own, in a thread."""

    def __init__(self, app: ASGIApp) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(app, interface="asgi3", log_level="error", ws="none", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it serves."""
        wait_until(lambda: self.server.started)

    def stop(self) -> None:
        """No socket is open afterwards; requests in flight are cut."""
        self.server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()


class Engine:
    """What the proxy sees of an engine. Prefill publishes, decode says whether it was given a locator.

    fail: a status for completions, or None. fail_transfers: one for those with a locator only. cut: break the answer
    off after so many pieces. hold_s: before a completion is answered. gate: pieces wait for :meth:`let_go`.
    hangs: health checks are not answered. describe_fails: a status for the question who it is, or None. app: what is
    served: the known routes, unless a kind of engine puts itself in front of them.
    """

    def __init__(self, *, pieces: int = 3, describes: bool = True) -> None:
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.pieces, self.describes, self.describe_calls = pieces, describes, 0
        self.fail: int | None = None
        self.fail_transfers: int | None = None
        self.cut: int | None = None
        self.hold_s = self.piece_s = 0.0
        self.healthy = self.offers = True
        self.hangs = False
        self.describe_fails: int | None = None
        self.gate, self.gone, self.health_checks = False, 0, 0
        self.running = self.aborted = self.finished = 0
        self.known = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
            ]
        )
        self.app: ASGIApp = self.known

    def let_go(self, pieces: int) -> None:
        """The first ``pieces`` pieces of an answer may leave."""
        self.gone = pieces

    async def _health(self, request: Request) -> Response:
        self.health_checks += 1
        while self.hangs:
            await asyncio.sleep(0.01)
        return Response(status_code=200 if self.healthy else 503)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "m"}]})

    async def _tokenize(self, request: Request) -> Response:
        query = dict(request.query_params)
        return JSONResponse({"got": await request.json(), "query": query}, 201, {"x-engine": "this one"})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        params = body.get("kv_transfer_params") or {}
        mine = params.get("kvserve", {})
        if mine.get("describe"):
            self.describe_calls += 1
            if self.describe_fails:
                return Response(status_code=self.describe_fails)
            return JSONResponse({"kv_transfer_params": {"kvserve": {"peer": PEER}} if self.describes else None})
        self.seen.append(body)
        self.headers.append(dict(request.headers))
        status = self.fail_transfers if self.fail_transfers and "locator" in mine else self.fail
        if status:
            return JSONResponse({"error": {"message": "as told", "code": status}}, status)
        return await self._answer(request, body, mine)

    async def _answer(self, request: Request, body: dict[str, Any], mine: dict[str, Any]) -> Response:
        self.running += 1
        try:
            if not await self._held(request):
                self.aborted += 1
                return Response(status_code=499)
        finally:
            self.running -= 1
        if "transfer_id" in mine:
            locator = {"transfer_id": mine["transfer_id"], "num_tokens": 3, "endpoints": [], "profile": "raw"}
            self.finished += 1
            offer = {"kv_transfer_params": {"kvserve": {"locator": locator, "prompt": "digest"}}} if self.offers else {}
            return JSONResponse({"choices": []} | offer)
        how = "remote" if "locator" in mine else "local"
        if body.get("stream"):
            return StreamingResponse(self._pieces(how), media_type="text/event-stream")
        return await self._whole(how)

    async def _held(self, request: Request) -> bool:
        until = time.monotonic() + self.hold_s
        while time.monotonic() < until:
            if await request.is_disconnected():
                return False
            await asyncio.sleep(0.01)
        return True

    async def _whole(self, how: str) -> Response:
        if self.cut is not None:
            return StreamingResponse(self._pieces(how), media_type="application/json")
        self.finished += 1
        return JSONResponse({"choices": [{"text": how}]})

    async def _pieces(self, how: str) -> AsyncIterator[str]:
        self.running += 1
        try:
            for i in range(self.pieces):
                while self.gate and self.gone <= i:
                    await asyncio.sleep(0.002)
                if self.cut == i:
                    raise ConnectionResetError("cut off, as told")
                yield f"data: {json.dumps({'choices': [{'text': f'{how}{i} '}]})}\n\n"
                await asyncio.sleep(self.piece_s)
            yield "data: [DONE]\n\n"
            while self.gate and self.gone <= self.pieces:
                await asyncio.sleep(0.002)
            self.finished += 1
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1


class Stand:
    """Engines behind a proxy, and a client of the proxy."""

    def __init__(self, proxy: Proxy, served: Served, engines: dict[Engine, Served]) -> None:
        self.proxy, self.engines = proxy, engines
        self.client = httpx.Client(base_url=served.url, timeout=20, trust_env=False)

    def kill(self, engine: Engine) -> None:
        """Nobody listens there any more."""
        self.engines[engine].stop()

    def post(self, headers: dict[str, str] | None = None, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """A completion of one prompt."""
        return self.client.post(path, json={"model": "m", "prompt": "hello"} | body, headers=headers)

    def text(self, **body: Any) -> str:
        """The text of an answer that must be good."""
        answer = self.post(**body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    @contextmanager
    def streamed(self) -> Iterator[Iterator[str]]:
        """The lines of a streamed answer as they come; who leaves early hangs up."""
        with self.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            yield (line for line in answer.iter_lines() if line)

    def metric(self, line: str) -> float:
        """The value of ``name`` or ``name{label="value"}`` on /metrics; 0 where it is not there yet."""
        lines = self.client.get("/metrics").text.splitlines()
        found = [float(ln.rpartition(" ")[2]) for ln in lines if ln.rpartition(" ")[0] == f"kvserve_proxy_{line}"]
        return found[0] if found else 0.0


Build = Callable[..., Stand]


def wait_until(done: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Polls; fails the test when it does not come."""
    until = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < until, "what was waited for did not come"
        time.sleep(0.005)


def events(answer: httpx.Response) -> list[str]:
    """The data of server-sent events."""
    return [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
