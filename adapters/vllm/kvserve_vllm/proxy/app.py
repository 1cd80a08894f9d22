"""The ASGI application: completions in two steps, everything else to a decode server, health and metrics of its own."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

import anyio
import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvserve_core.errors import ConfigError
from kvserve_vllm.proxy.bodies import parsed
from kvserve_vllm.proxy.counts import CONTENT_TYPE, Counts
from kvserve_vllm.proxy.health import Health
from kvserve_vllm.proxy.relay import Relay, forwarded, refusal, returned
from kvserve_vllm.proxy.service import Service
from kvserve_vllm.proxy.steps import Job, Steps
from kvserve_vllm.proxy.upstream import Pool, Upstream

TWO_STEPS = ("/v1/completions", "/v1/chat/completions")
ANY = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


@dataclass(frozen=True)
class Options:
    """Servers by role, the quality floor of requests that name none, and how long to wait for what.

    health_every_s: between two checks of a server. connect_timeout_s: to any server.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    min_quality: float
    prefill_timeout_s: float = 120.0
    health_every_s: float = 2.0
    connect_timeout_s: float = 2.0


class Proxy:
    """The state behind the routes."""

    def __init__(self, options: Options) -> None:
        self.options, self.counts = options, Counts()
        self.prefill, self.decode = Pool("prefill", options.prefill), Pool("decode", options.decode)
        timeout = httpx.Timeout(None, connect=options.connect_timeout_s)  # a generation takes what it takes
        self.client = httpx.AsyncClient(timeout=timeout, limits=httpx.Limits(max_connections=None), trust_env=False)
        self.steps = Steps(self.client, self.prefill, self.decode, self.counts, options.prefill_timeout_s)

    @property
    def servers(self) -> Sequence[Upstream]:
        """All of both roles."""
        return (*self.prefill.servers, *self.decode.servers)

    @asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        """Checks every server while the application runs."""
        health = Health(self.client, self.options.health_every_s)
        async with self.client, anyio.create_task_group() as group:
            for server in self.servers:
                group.start_soon(health.watch, server)
            yield
            group.cancel_scope.cancel()

    async def generate(self, request: Request) -> Response:
        """Both completion routes."""
        arrived = time.monotonic()
        try:
            service = Service.from_headers(request.headers, self.options.min_quality)
            body = parsed(await request.body())
        except ConfigError as error:
            self.counts.requests["refused"] += 1
            return refusal(400, str(error))
        headers = forwarded(request.headers)
        headers.setdefault("x-request-id", uuid4().hex)
        return Relay(self.steps, Job(request.url.path, headers, body, service), self.counts, arrived)

    async def forward(self, request: Request) -> Response:
        """Any other path, as it is, to a decode server."""
        server = self.decode.pick()
        if server is None:
            return refusal(503, "no decode server is up")
        url = f"{server.url}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        headers = forwarded(request.headers)
        try:
            with server.busy():
                answer = await self.client.request(request.method, url, content=await request.body(), headers=headers)
        except httpx.HTTPError as error:
            server.failed(error)
            return refusal(502, f"the decode server {server.url!r} did not answer: {error or type(error).__name__}")
        return Response(answer.content, answer.status_code, returned(answer.headers))

    async def health(self, request: Request) -> Response:
        """200 while a decode server is up: without a prefill server it computes alone."""
        up = any(s.up for s in self.decode.servers)
        each = [
            {"role": s.role, "url": s.url, "up": s.up, "outstanding": s.outstanding, "known": s.peer is not None}
            for s in self.servers
        ]
        status = "ok" if all(s.up for s in self.servers) else "degraded" if up else "down"
        return JSONResponse({"status": status, "servers": each}, 200 if up else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        return PlainTextResponse(self.counts.exposition(self.servers), media_type=CONTENT_TYPE)


def application(options: Options) -> Starlette:
    """The proxy as an ASGI application."""
    proxy = Proxy(options)
    routes = [Route(path, proxy.generate, methods=["POST"]) for path in TWO_STEPS]
    routes += [Route("/health", proxy.health), Route("/metrics", proxy.metrics)]
    routes.append(Route("/{path:path}", proxy.forward, methods=ANY))
    app = Starlette(routes=routes, lifespan=proxy.running)
    app.state.proxy = proxy
    return app
