"""The two steps of one request: where they go, what happens when a server fails, and which failures are tried again.

Nothing is tried again once the client has seen a byte. A transfer that was published but never fetched ends with its
lease on the prefill server.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property

import anyio
import httpx

from kvserve_vllm.proxy.bodies import Body, Written, alone, decode_content, offer_of, prefill_content, written
from kvserve_vllm.proxy.counts import Counts
from kvserve_vllm.proxy.headers import Lines
from kvserve_vllm.proxy.passing import close
from kvserve_vllm.proxy.relay import Answer
from kvserve_vllm.proxy.service import Service
from kvserve_vllm.proxy.upstream import BUSY, FAILURES, NEVER_REACHED, STRIKES, NoServer, Pool, Upstream

Offer = Mapping[str, object]


class _NotLoaded(Exception):
    """The decode server failed a request that had a transfer: under its policy ``fail`` it does not compute instead."""


@dataclass(frozen=True)
class Job:
    """One request of a client: where it goes, its headers as forwarded, its body and its demands."""

    path: str
    headers: Lines
    body: Body
    service: Service

    @cached_property
    def written(self) -> Written:
        """The body field by field, written once for both steps."""
        return written(self.body)

    @property
    def streams(self) -> bool:
        """Whether the answer is server-sent events."""
        return bool(self.body.get("stream"))


class Steps:
    """Runs step one and step two of a job. Cancelling either closes the connection, which aborts the engine's request.

    prefill_timeout_s: for step one; after it the decode server computes alone.
    """

    def __init__(
        self, client: httpx.AsyncClient, prefill: Pool, decode: Pool, counts: Counts, prefill_timeout_s: float
    ) -> None:
        self._client, self._prefill, self._decode, self._counts = client, prefill, decode, counts
        self._prefill_timeout_s = prefill_timeout_s

    @asynccontextmanager
    async def answered(self, job: Job) -> AsyncIterator[Answer]:
        """The decode server's answer: its body yet to come where the job streams, else complete.

        Raises:
            NoServer: none is up, or all that were tried failed.
        """
        server = self._decode.pick()
        if server is None:
            raise NoServer("no decode server is up")
        with server.busy():  # the prefill server is told of this choice, so it counts from now on
            offer = await self._transfer(job, server)
        answer = await self._decoded(job, server, offer)
        with answer.server.busy():
            try:
                yield answer
            finally:
                await close(answer.response)

    async def _transfer(self, job: Job, consumer: Upstream) -> Offer | None:
        """Step one: the offer, or None, with its reason counted, where the decode server has to compute alone."""
        started = time.monotonic()
        reason = alone(job.body)
        if reason is None:
            offer, reason = await self._prefilled(job, consumer)
            if offer is not None:
                self._counts.prefill_s.add(time.monotonic() - started)
                return offer
        self._counts.alone[reason] += 1
        return None

    async def _prefilled(self, job: Job, consumer: Upstream) -> tuple[Offer | None, str]:
        """The offer from the first prefill server that answers, else why there is none."""
        tried: list[Upstream] = []
        while (server := self._prefill.pick(tried)) is not None:
            self._counts.retries["prefill"] += bool(tried)
            tried.append(server)
            try:
                answer = await self._prefill_at(server, job, consumer)
            except TimeoutError as error:  # another server would only make the client wait as long again
                server.failed(error)
                return None, "prefill_timeout"
            except FAILURES as error:
                server.failed(error)
                continue
            if answer.is_server_error or answer.status_code == BUSY:
                server.failed(f"status {answer.status_code}")
                continue
            server.succeeded()
            if answer.is_error:  # the decode server will say why, about the body that the client wrote
                return None, "prefill_refused"
            return offer_of(answer), "nothing_offered"
        return None, "prefill_failed" if tried else "no_prefill"

    async def _prefill_at(self, server: Upstream, job: Job, consumer: Upstream) -> httpx.Response:
        content = prefill_content(job.written, job.service, consumer.peer)
        with server.busy(), server.leashed(), anyio.fail_after(self._prefill_timeout_s):
            return await self._client.post(server.url + job.path, content=content, headers=job.headers)

    async def _decoded(self, job: Job, server: Upstream | None, offer: Offer | None) -> Answer:
        """Step two: at another server, or without the transfer, as long as nothing was answered."""
        failed: list[Upstream] = []
        late = 0
        while server is not None:
            try:
                with server.busy(), server.leashed():
                    answer = await self._decode_at(server, job, offer)
                server.succeeded()
                return answer
            except _NotLoaded:
                self._counts.alone["load_failed"] += 1
                offer = None
            except NEVER_REACHED as error:  # the transfer is still there for another one
                server.failed(error)
                late += isinstance(error, httpx.ConnectTimeout)
                if server.refuses or late >= STRIKES:
                    failed.append(server)
            except FAILURES as error:  # the transfer may be half fetched
                server.failed(error)
                failed.append(server)
                self._counts.alone["decode_failed"] += offer is not None
                offer = None
            server = self._decode.pick(failed)
            self._counts.retries["decode"] += server is not None
        raise NoServer("every decode server that is up failed to answer")

    async def _decode_at(self, server: Upstream, job: Job, offer: Offer | None) -> Answer:
        content = decode_content(job.written, job.service, job.body.get("cache_salt"), offer)
        request = self._client.build_request("POST", server.url + job.path, content=content, headers=job.headers)
        answer = await self._client.send(request, stream=True)
        try:
            if answer.is_server_error and offer is not None:
                raise _NotLoaded
            return Answer(server, answer, None if job.streams else b"".join([raw async for raw in answer.aiter_raw()]))
        except BaseException:
            await close(answer)
            raise
