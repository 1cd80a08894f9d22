"""Asks each server now and then whether it is healthy, and decode servers who they are."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

import anyio
import httpx

from kvserve_vllm.proxy.bodies import describe_body, peer_of
from kvserve_vllm.proxy.upstream import BUSY, FAILURES, Upstream

log = logging.getLogger(__name__)
REFUSED = (401, 403)


class Health:
    """One loop per server. A server that is out comes back here only.

    every_s: between two checks of a server. timeout_s: for an answer. api_key: for servers that want one.
    """

    def __init__(self, client: httpx.AsyncClient, every_s: float, timeout_s: float, api_key: str = "") -> None:
        self._client, self._every_s, self._timeout_s = client, every_s, timeout_s
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    async def watch(self, server: Upstream) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.check(server)
            except Exception:  # one odd answer must not end the checks, and with them the proxy
                log.exception("the check of %s server %s failed", server.role, server.url)
            await anyio.sleep(self._every_s)

    async def check(self, server: Upstream) -> None:
        """Once; a decode server that is well and not yet known is asked to describe itself."""
        try:
            answer = await self._client.get(f"{server.url}/health", timeout=self._timeout_s)
            answer.raise_for_status()
        except FAILURES as error:
            server.checked(error)
            return
        server.checked(None)
        if server.role == "decode" and not server.asked:
            await self._ask(server)

    async def _ask(self, server: Upstream) -> None:
        """Goodput is kept by link, so the peer is named after where it is."""
        try:
            models = await self._client.get(f"{server.url}/v1/models", headers=self._headers, timeout=self._timeout_s)
            if models.status_code in REFUSED:
                self._refused(server, models.status_code)
                return
            body = describe_body(models.raise_for_status().json()["data"][0]["id"])
            answer = await self._client.post(
                f"{server.url}/v1/completions", json=body, headers=self._headers, timeout=self._timeout_s
            )
            if answer.is_server_error or answer.status_code == BUSY:
                answer.raise_for_status()  # it may know in a while
        except (httpx.HTTPError, LookupError, TypeError, ValueError, RecursionError) as error:
            log.info("decode server %s was not asked to describe itself: %r", server.url, error)
            return
        server.asked = True
        peer = peer_of(answer)
        server.peer = None if peer is None else peer | {"link": urlsplit(server.url).netloc}
        log.info("decode server %s is %s", server.url, "known" if peer else "not known to producers")

    def _refused(self, server: Upstream, status: int) -> None:
        """Asking again would be refused again: it is asked once each time it comes up."""
        server.asked = True
        log.warning(
            "decode server %s does not say who it is to the key that the proxy has (status %d): producers send it what"
            " every consumer reads; put its --api-key into a file and name that with '--api-key-file'",
            server.url,
            status,
        )
