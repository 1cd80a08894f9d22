"""Passing an answer on to the client, byte by byte, for as long as the client is there."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import anyio
import httpx
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvserve_vllm.proxy.counts import Counts
from kvserve_vllm.proxy.service import PREFIX
from kvserve_vllm.proxy.steps import Job, NoServer, Steps

OF_THE_CONNECTION = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "content-length", "accept-encoding"),
    }
)
"""Headers that are about one connection (RFC 9110, 7.6.1), or that the next hop writes itself."""
DONE = b"data: [DONE]"


class Relay(Response):
    """Runs a job and passes its answer on as it comes; a client that leaves cancels whatever step is running."""

    def __init__(self, steps: Steps, job: Job, counts: Counts, arrived: float) -> None:
        self._steps, self._job, self._counts, self._arrived = steps, job, counts, arrived
        self._outcome = "disconnected"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_when_gone, receive, group.cancel_scope)
            await self._relayed(scope, receive, send)
            group.cancel_scope.cancel()
        self._counts.requests[self._outcome] += 1

    async def _relayed(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._steps.answered(self._job) as answer:
                self._counts.first_byte_s.add(time.monotonic() - self._arrived)
                await self._pass_on(answer, send)
        except NoServer as error:
            self._outcome = "failed"
            await refusal(503, str(error))(scope, receive, send)

    async def _pass_on(self, answer: httpx.Response, send: Send) -> None:
        headers = returned(answer.headers)
        if answer.is_stream_consumed:
            headers["content-length"] = str(len(answer.content))
        raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
        await send({"type": "http.response.start", "status": answer.status_code, "headers": raw})
        if answer.is_stream_consumed:
            await send({"type": "http.response.body", "body": answer.content})
        else:
            await self._stream(answer, send)
        if self._outcome == "disconnected":
            self._outcome = "error" if answer.is_error else "ok"

    async def _stream(self, answer: httpx.Response, send: Send) -> None:
        """A stream that breaks ends with an error event, as the engine's own streams do, and without ``[DONE]``."""
        try:
            async for chunk in answer.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if chunk.rstrip().endswith(DONE):  # many clients leave then, which is no loss to them
                    self._outcome = "ok"
        except httpx.HTTPError as error:
            self._outcome = "broken"
            text = json.dumps(_error_body(502, f"the decode server broke off: {error or type(error).__name__}"))
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """A client's headers as a server gets them."""
    kept = {k: v for k, v in headers.items() if k not in OF_THE_CONNECTION and not k.startswith(PREFIX)}
    return kept | {"accept-encoding": "identity"}


def returned(headers: httpx.Headers) -> dict[str, str]:
    """A server's headers as the client gets them."""
    return {k: v for k, v in headers.items() if k not in OF_THE_CONNECTION}


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status == 400 else "service_unavailable"
    return {"error": {"message": message, "type": kind, "code": status}}


def refusal(status: int, message: str) -> Response:
    """An error in the form of the OpenAI API."""
    return JSONResponse(_error_body(status, message), status)
