"""The two sides of a rank, put together from a manager and what was set up for it."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.runtime_context import get_disagg
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import NetworkAddress

from kvserve_core.session import Consumer
from kvserve_sglang.checks import check_host_receive, within_checksum
from kvserve_sglang.decode import DecodeSide, shards_together
from kvserve_sglang.messages import Located, Wanted
from kvserve_sglang.metrics import Exporter
from kvserve_sglang.prefill import PrefillSide
from kvserve_sglang.prefill_rank import Rank
from kvserve_sglang.ranks import Ranks
from kvserve_sglang.setup import RankSetup, check_policy

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
log = logging.getLogger(__name__)


class PrefillRooms:
    """SGLang's status table, as a prefill rank uses it. The decode side reports its own success."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def succeed(self, room: int) -> None:
        """The pages may be overwritten; the decode side needs no word of it."""
        self._manager.conclude_transfer(bootstrap_room=room, status=KVPoll.Success, targets=[])

    def fail(self, room: int, reason: str) -> None:
        """Tell both engines."""
        self._manager.conclude_failure(bootstrap_room=room, failure_reason=reason)

    def tell(self, to: Wanted, message: Located) -> None:
        """Send to a decode rank."""
        self._manager.send_message(to.ip, to.port, message)


class DecodeRooms:
    """SGLang's status table, as a decode rank uses it."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def succeed(self, room: int) -> None:
        """All of it is in place."""
        self._manager.update_status(room, KVPoll.Success)

    def fail(self, room: int, reason: str) -> None:
        """It will not come. A room that SGLang has cleared must not get a record: a later one may have its number."""
        if room in self._manager.request_status:
            self._manager.record_failure(room, reason)
            self._manager.update_status(room, KVPoll.Failed)


def prefill_side(manager: Any, setup: RankSetup) -> PrefillSide:
    """The side that sends."""
    pipelines = setup.pipelines
    if get_disagg().disaggregation_enable_kv_checksum:
        pipelines = within_checksum(pipelines, setup.settings)
    exporter = _exporter(manager)
    exporter.set("library_loaded", float(setup.deployment.library is not None))
    log.info("kvserve sends %s by profiles %s", setup.kv.model_id, ", ".join(pipelines))
    ranks = Ranks(manager, bootstrap_url(manager))
    if ranks.first:
        check_policy(setup.deployment)
    number = manager._prefill_unique_rank()
    rooms = PrefillRooms(manager)
    return PrefillSide(Rank(rooms, ranks, setup.deployment, pipelines, setup.layout, exporter, number, setup.window))


def decode_side(manager: Any, setup: RankSetup) -> DecodeSide:
    """The side that fetches; a session for each size of prefill server."""
    check_host_receive(get_disagg(), ServerArgs)

    @cache
    def consumer(prefill_size: int) -> Consumer:
        everyone = shards_together(setup.shard, prefill_size)
        return setup.deployment.consumer(
            setup.shard, side.scatter, setup.device, everyone=everyone, link=manager.local_ip
        )

    side = DecodeSide(DecodeRooms(manager), setup.layout, consumer, _exporter(manager), float(manager.waiting_timeout))
    return side


def bootstrap_url(manager: Any) -> str:
    """Where the prefill server registers its ranks, as ``register_to_bootstrap`` finds it."""
    if manager.dist_init_addr:
        host = NetworkAddress.parse(manager.dist_init_addr).resolved().host
    else:
        host = WILDCARDS.get(manager.bootstrap_host, manager.bootstrap_host)
    return str(NetworkAddress(host, manager.bootstrap_port).to_url())


def _exporter(manager: Any) -> Exporter:
    return Exporter(bool(getattr(manager.server_args, "enable_metrics", False)))
