"""Any path but completions: to a decode server and back as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import anyio
import httpx

from kvserve_vllm.proxy.headers import Lines
from kvserve_vllm.proxy.relay import Answer
from kvserve_vllm.proxy.upstream import FAILURES, NoServer, Pool, said


@dataclass(frozen=True)
class Passed:
    """A client's request. target: path and query, percent-encoded as the client wrote them."""

    method: str
    target: bytes
    headers: Lines
    body: bytes


class Passing:
    """Hands requests to a pool of servers, each once: it may be of any kind."""

    def __init__(self, client: httpx.AsyncClient, pool: Pool) -> None:
        self._client, self._pool = client, pool

    @asynccontextmanager
    async def answered(self, passed: Passed) -> AsyncIterator[Answer]:
        """The answer, its body yet to come. Cancelling closes the connection, which aborts the engine's request.

        Raises:
            NoServer: none is up, or the one that was asked did not answer.
        """
        server = self._pool.pick()
        if server is None:
            raise NoServer("no decode server is up")
        target = urlsplit(server.url).path.encode() + passed.target
        request = self._client.build_request(
            passed.method, server.url, content=passed.body, headers=passed.headers, extensions={"target": target}
        )
        with server.busy():
            try:
                with server.leashed():
                    response = await self._client.send(request, stream=True)
            except FAILURES as error:
                server.failed(error)
                reason = f"the decode server {server.url!r} did not answer: {said(error)}"
                raise NoServer(reason, 502) from error
            try:
                yield Answer(server, response)
            finally:
                await close(response)


async def close(response: httpx.Response) -> None:
    """Also where the request was cancelled."""
    with anyio.CancelScope(shield=True):
        await response.aclose()
