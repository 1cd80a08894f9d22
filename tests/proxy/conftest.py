from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvserve_vllm.proxy.app import Options, application
from proxy_stand import Build, Engine, Served, Stand, wait_until


@pytest.fixture
def stand() -> Iterator[Build]:
    """Builds a proxy in front of engines; waits until it has met all of them."""
    served: list[Served] = []
    stands: list[Stand] = []

    def build(prefill: list[Engine], decode: list[Engine], **options: Any) -> Stand:
        engines = {e: Served(e.app) for e in (*prefill, *decode)}
        served.extend(engines.values())
        urls = [tuple(engines[e].url for e in role) for role in (prefill, decode)]
        app = application(Options(*urls, **({"min_quality": 0.99, "health_every_s": 0.05} | options)))
        served.insert(0, Served(app))
        for one in served:
            one.wait()
        stands.append(Stand(app.state.proxy, served[0], engines))
        wait_until(lambda: all(s.asked for s in app.state.proxy.decode.servers))
        return stands[-1]

    yield build
    for each in stands:
        each.client.close()
    for one in served:  # all at once, for each takes a moment to notice
        one.server.should_exit = True
    for one in served:
        one.stop()
