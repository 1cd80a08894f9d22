"""Passing an answer on to the client, byte by byte, for as long as the client is there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvserve_vllm.proxy.counts import Counts
from kvserve_vllm.proxy.headers import Lines, returned
from kvserve_vllm.proxy.upstream import NoServer, Upstream, said

DONE = b"data: [DONE]"


@dataclass(frozen=True)
class Answer:
    """A server's answer. body: all of it as it came over the wire, or None where it is still to come."""

    server: Upstream
    response: httpx.Response
    body: bytes | None = None

    @property
    def headers(self) -> Lines:
        """As the client gets them."""
        lines = returned(self.response.headers.raw, self.server.url)
        if self.body is None:
            return lines
        kept = [line for line in lines if line[0] != b"content-length"]
        return [*kept, (b"content-length", b"%d" % len(self.body))]


class Relay(Response):
    """Passes an answer on as it comes; a client that leaves cancels whatever is running for it.

    counts: of requests by how they ended and of the wait for the answer, where these are counted.
    """

    def __init__(
        self, answered: Callable[[], AbstractAsyncContextManager[Answer]], counts: Counts | None = None
    ) -> None:
        self._answered, self._counts = answered, counts
        self._arrived_s = time.monotonic()
        self._outcome = "disconnected"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_when_gone, receive, group.cancel_scope)
            await self._relayed(scope, receive, send)
            group.cancel_scope.cancel()
        if self._counts is not None:
            self._counts.requests[self._outcome] += 1

    async def _relayed(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._answered() as answer:
                if self._counts is not None:
                    self._counts.first_byte_s.add(time.monotonic() - self._arrived_s)
                await self._pass_on(answer, send)
        except NoServer as error:
            self._outcome = "failed"
            await refusal(error.status, str(error))(scope, receive, send)

    async def _pass_on(self, answer: Answer, send: Send) -> None:
        status = answer.response.status_code
        await send({"type": "http.response.start", "status": status, "headers": answer.headers})
        if answer.body is not None:
            await send({"type": "http.response.body", "body": answer.body})
        else:
            await self._stream(answer, send)
        if self._outcome == "disconnected":
            self._outcome = "error" if answer.response.is_error else "ok"

    async def _stream(self, answer: Answer, send: Send) -> None:
        try:
            with answer.server.leashed():
                async for chunk in answer.response.aiter_raw():
                    answer.server.heard()
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    if chunk.rstrip().endswith(DONE):  # many clients leave then, which is no loss to them
                        self._outcome = "ok"
        except httpx.HTTPError as error:
            self._outcome = "broken"
            if not answer.response.headers.get("content-type", "").startswith("text/event-stream"):
                return  # the connection closes short of its end, which is how the client knows
            await send({"type": "http.response.body", "body": _error_event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _error_event(error: httpx.HTTPError) -> bytes:
    """A stream that breaks ends with an error, as the engine's own streams do, and without ``[DONE]``."""
    text = json.dumps(_error_body(502, f"the decode server broke off: {said(error)}"))
    return f"data: {text}\n\n".encode()


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "service_unavailable"
    return {"error": {"message": message, "type": kind, "code": status}}


def refusal(status: int, message: str) -> Response:
    """An error in the form of the OpenAI API."""
    return JSONResponse(_error_body(status, message), status)
