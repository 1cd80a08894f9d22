"""The ASGI application: completions in two steps, everything else to a decode server, health and metrics of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from http.cookiejar import DefaultCookiePolicy

import anyio
import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvserve_core.errors import ConfigError
from kvserve_core.workload import WorkloadClassifier, text_of, workload_of
from kvserve_vllm.proxy.bodies import check_passed, parsed
from kvserve_vllm.proxy.counts import CONTENT_TYPE, Counts
from kvserve_vllm.proxy.headers import as_json, forwarded
from kvserve_vllm.proxy.health import Health
from kvserve_vllm.proxy.passing import Passed, Passing
from kvserve_vllm.proxy.relay import Relay, refusal
from kvserve_vllm.proxy.service import Service
from kvserve_vllm.proxy.steps import Job, Steps
from kvserve_vllm.proxy.upstream import Pool, Upstream

TWO_STEPS = ("/v1/completions", "/v1/chat/completions")
GONE = Response(status_code=499)
"""For nobody: the client has left."""
ANY = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


@dataclass(frozen=True)
class Options:
    """Servers by role, the quality floor of requests that name none, and how long to wait for what.

    health_every_s: between two checks of a server. health_timeout_s: for its answer. connect_timeout_s: to any server.
    classifier: names the workload of requests that do not; the engines see token ids only. api_key: for the proxy's own
    questions to decode servers; requests carry their clients' keys.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    min_quality: float
    prefill_timeout_s: float = 120.0
    health_every_s: float = 2.0
    health_timeout_s: float = 5.0
    connect_timeout_s: float = 2.0
    max_body_bytes: int = 16 * 2**20
    classifier: WorkloadClassifier | None = None
    api_key: str = field(default="", repr=False)


def _announced(request: Request) -> int:
    """The length of its body, as far as it says so."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


class _TooLarge(Exception):
    """A body beyond the limit."""


class Proxy:
    """The state behind the routes."""

    def __init__(self, options: Options) -> None:
        self.options, self.counts = options, Counts()
        self.prefill, self.decode = Pool("prefill", options.prefill), Pool("decode", options.decode)
        timeout = httpx.Timeout(None, connect=options.connect_timeout_s)  # a generation takes what it takes
        # Engines close connections that were idle for 5 s; one must not be picked up in the moment it closes.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        self.client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        self.client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=()))  # they are a client's, not ours
        self.passing = Passing(self.client, self.decode)
        self.steps = Steps(self.client, self.prefill, self.decode, self.counts, options.prefill_timeout_s)

    @property
    def servers(self) -> Sequence[Upstream]:
        """All of both roles."""
        return (*self.prefill.servers, *self.decode.servers)

    @asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        """Checks every server while the application runs."""
        given = self.options
        health = Health(self.client, given.health_every_s, given.health_timeout_s, given.api_key)
        async with self.client, anyio.create_task_group() as group:
            for server in self.servers:
                group.start_soon(health.watch, server)
            yield
            group.cancel_scope.cancel()

    async def generate(self, request: Request) -> Response:
        """Both completion routes."""
        try:
            service = Service.from_headers(request.headers, self.options.min_quality)
            body = parsed(await self._body(request))
        except ConfigError as error:
            self.counts.requests["refused"] += 1
            return refusal(400, str(error))
        except _TooLarge as error:
            self.counts.requests["refused"] += 1
            return refusal(413, str(error))
        except ClientDisconnect:
            self.counts.requests["disconnected"] += 1
            return GONE
        workload = workload_of(text_of(body), service.workload, self.options.classifier, "") or None
        job = Job(
            request.scope["path"], as_json(forwarded(request.headers.raw)), body, replace(service, workload=workload)
        )
        return Relay(lambda: self.steps.answered(job), self.counts)

    async def forward(self, request: Request) -> Response:
        """Any other path, as it is, to a decode server."""
        try:
            body = await self._body(request)
            check_passed(body)
        except ConfigError as error:
            return refusal(400, str(error))
        except _TooLarge as error:
            return refusal(413, str(error))
        except ClientDisconnect:
            return GONE
        query = request.scope["query_string"]
        target = request.scope["raw_path"] + (b"?" + query if query else b"")
        passed = Passed(request.method, target, forwarded(request.headers.raw), body)
        return Relay(lambda: self.passing.answered(passed))

    async def _body(self, request: Request) -> bytes:
        """All of it: both steps need it, and it may have to be sent once more."""
        limit, parts = self.options.max_body_bytes, list[bytes]()
        size = 0 if _announced(request) <= limit else limit + 1
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _TooLarge(f"the body has more than {limit} bytes, which is the proxy's limit ('--max-body')")
            parts.append(part)
        return b"".join(parts)

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
