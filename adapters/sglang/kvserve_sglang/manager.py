"""SGLang's manager of one rank, on top of its own Common one: bootstrap, status, abort and heartbeat stay SGLang's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.utils.network import NetworkAddress

from kvserve_core.errors import PeerLost, PluginError
from kvserve_core.settings import Settings
from kvserve_sglang import pools
from kvserve_sglang.checks import check_manager, check_metadata
from kvserve_sglang.decode import DecodeSide
from kvserve_sglang.lobby import Lobby
from kvserve_sglang.messages import Decided, Located, Message, Register, Reported, Wanted, pack, unpack
from kvserve_sglang.peers import Peers
from kvserve_sglang.plugin import check_applied
from kvserve_sglang.prefill import PrefillSide
from kvserve_sglang.roles import decode_side, prefill_side
from kvserve_sglang.sending import Target
from kvserve_sglang.setup import Engine, RankSetup
from kvserve_sglang.slots import Slots
from kvserve_sglang.spec import AUX_GROUP, STATE_GROUPS

ABORT = b"ABORT"
LISTEN_MS = 200
"""How soon the control thread sees that it should end."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """A decode rank that asked for a room; the fields that SGLang's Common classes read, and ours."""

    wanted: Wanted

    @property
    def endpoint(self) -> str:
        """Its address."""
        return self.wanted.ip

    @property
    def dst_port(self) -> int:
        """Its control port."""
        return self.wanted.port

    @property
    def is_dummy(self) -> bool:
        """Whether it only keeps this rank in step."""
        return self.wanted.dummy

    @property
    def required_dst_info_num(self) -> int:
        """How many will ask this rank."""
        return self.wanted.ranks


class KVServeManager(CommonKVManager):
    """One per rank. Carries messages between SGLang's sockets and a :class:`PrefillSide` or :class:`DecodeSide`."""

    kv_status_msg_tag = b"KVSERVE_STATUS"
    kv_status_msg_carries_reason = True

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        check_applied()
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.session_id = f"{self.local_ip}:{self.rank_port}"
        self.setup: RankSetup | None = None
        self._side: PrefillSide | DecodeSide | None = None
        self._peers: Peers | None = None
        self.lobby = Lobby(self._drop)
        self._stopped = threading.Event()
        self._listener: threading.Thread | None = None

    def bind_engine(self, queue: Any) -> None:
        """SGLang's queue hands over its pool; nothing works before."""
        with self._closed_on_error():
            check_metadata(queue.metadata_buffers)
            engine = Engine.of(queue)
        self.bind(engine)

    def bind(self, engine: Engine, settings: Settings | None = None) -> None:
        """Make the sessions and begin to listen. What was said before waits in the socket.

        Raises:
            KVServeError: this model, pool or configuration cannot be served.
        """
        if self._side is not None:
            log.warning("SGLang handed over its pool twice; the first one stays")
            return
        with self._closed_on_error():
            check_manager(self)
            self._bind(RankSetup(engine, self, settings))

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()  # sockets that nobody closes would keep the process from ending
            raise

    def _bind(self, setup: RankSetup) -> None:
        self.setup = setup
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self._peers = Peers(setup.kv.fingerprint, setup.holds)
            self._side = prefill_side(self, setup)
            listen = self._take_as_prefill
        else:
            self._side = decode_side(self, setup)
            listen = self._take_as_decode
        self._side.pump.start()
        self._listener = threading.Thread(target=self._listen, args=(listen,), name="kvserve-control", daemon=True)
        self._listener.start()
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            self._start_heartbeat_checker_thread()

    @property
    def side(self) -> Any:
        """The side of this rank.

        Raises:
            PluginError: SGLang never handed over its pool.
        """
        if self._side is None:
            raise PluginError("SGLang did not hand its KV pool to kvserve: its hook on '_init_kv_manager' did not run")
        return self._side

    def hook_failed(self, hook: str) -> None:
        """Count what this rank caught, so that it reaches neither SGLang nor its other requests."""
        if self._side is not None:
            self._side.exporter.count("hook_failures", hook=hook)

    def close(self) -> None:
        """End the threads and sessions of this rank; for tests, as SGLang ends by ending its process."""
        self._stopped.set()
        try:
            if self._side is not None:
                self._side.close()
            if self.setup is not None:
                self.setup.close()
        finally:
            if hasattr(self, "_heartbeat_shutdown"):
                self._heartbeat_shutdown.set()
            if self._listener is not None:
                self._listener.join()
            self._zmq_ctx.destroy(linger=0)

    def send_message(self, ip: str, port: int, message: Message) -> None:
        """To the control socket of a rank; raises PeerLost when it takes nothing."""
        at = NetworkAddress(ip, port)
        try:
            self._send_multipart_locked(at.to_tcp(), pack(message), is_ipv6=at.is_ipv6)
        except zmq.Again as error:
            raise PeerLost(f"the control socket of {at.to_host_port_str()} takes no messages") from error

    def _connect(self, endpoint: str, is_ipv6: bool = False) -> Any:
        """As SGLang's, but a peer that takes nothing must not make the others wait for it."""
        socket = super()._connect(endpoint, is_ipv6=is_ipv6)
        socket.setsockopt(zmq.SNDTIMEO, 0)
        return socket

    def slots(self, prefix: int, pages: Any, aux_index: int | None, state_indices: list[Any] | None) -> Slots:
        """The places of a request, as SGLang names them."""
        slots = Slots(self.kv_args.page_size, prefix)
        slots.add(pages)
        slots.cells, slots.windows = self.cells(aux_index, state_indices)
        return slots

    def cells(self, aux_index: int | None, state_indices: list[Any] | None) -> tuple[dict[int, int], Any]:
        """Rows of the auxiliary buffers and states, and the pages of sliding windows."""
        cells = {} if aux_index is None else {AUX_GROUP: _row(aux_index)}
        if state_indices is None:
            return cells, None
        for i, component in enumerate(pools.cell_components(self.kv_args)):
            cells[STATE_GROUPS + i] = _row(state_indices[component][0])
        window = pools.window_component(self.kv_args)
        return cells, None if window is None else pools.as_pages(state_indices[window])

    def targets(self, room: int) -> tuple[int, tuple[Target, ...]] | None:
        """The prefix that the decode side holds, and the ranks that will fetch; None when nobody asked (any more)."""
        infos = list(self.transfer_infos.get(room, {}).values())
        if not infos or self._peers is None:
            return None
        peers = self._peers
        wanted = [info.wanted for info in infos]
        return wanted[0].prefix, tuple(Target(w, peers.of(w.session)) for w in wanted if not w.dummy)

    def _listen(self, take: Callable[[list[bytes]], None]) -> None:
        while not self._stopped.is_set():
            try:
                if self.server_socket.poll(LISTEN_MS):
                    take(self.server_socket.recv_multipart())
            except Exception:
                log.exception("a control message was dropped")
                self.hook_failed("control")

    def _take_as_prefill(self, frames: list[bytes]) -> None:
        if frames[0] == ABORT:
            self._aborted(int(frames[1]))
            return
        match unpack(frames):
            case Register() as register:
                self._peers.add(register)
            case Wanted() as wanted:
                self._wanted(wanted)
            case Decided() | Reported() as message:
                self.side.pump.put(message)

    def _take_as_decode(self, frames: list[bytes]) -> None:
        message = unpack(frames)
        if isinstance(message, Located):
            self.side.pump.put(message)
        elif status := self.parse_kv_status_message(frames):
            room, code, rank, reason = status
            if code == KVPoll.Success:  # no prefill rank knows that; this side does
                log.warning("somebody says that room %s was transferred, which is not for them to say", room)
                return
            self.apply_prefill_status(bootstrap_room=room, status=code, prefill_rank=rank, failure_reason=reason)

    def _aborted(self, room: int) -> None:
        reason = "the decode engine aborted the request"
        if self.lobby.gave_up(room, reason) and self.request_status.get(room) not in (None, KVPoll.Success):
            self.record_failure(room, reason)
            self.update_status(room, KVPoll.Failed)
        self.side.abort(room, reason)

    def _drop(self, room: int) -> None:
        """A room that has no sender."""
        for table in (self.request_status, self.transfer_infos, self.req_to_decode_prefix_len):
            table.pop(room, None)
        with self.failure_lock:
            self.failure_records.pop(room, None)

    def _turn_away(self, room: int, reason: str) -> None:
        """Tell the decode ranks that asked so far."""
        self.update_status(room, KVPoll.Bootstrapping)  # opens the room where its sender is not there yet
        self.conclude_failure(bootstrap_room=room, failure_reason=reason)
        self.lobby.gave_up(room, reason)

    def _wanted(self, wanted: Wanted) -> None:
        too_late = self.lobby.asked(wanted.room)
        infos = self.transfer_infos.setdefault(wanted.room, {})
        infos[wanted.session] = Asked(wanted)
        if too_late:
            self._turn_away(wanted.room, too_late)
            return
        if len(infos) < wanted.ranks:
            return
        self.resolve_kv_replica_factor(infos)
        refusal = next(filter(None, (self._peers.refusal(session) for session in list(infos))), None)
        if refusal:
            self._turn_away(wanted.room, refusal)
            return
        self.req_to_decode_prefix_len[wanted.room] = wanted.prefix
        self.update_status(wanted.room, KVPoll.WaitingForInput)


class KVServeBootstrapServer(CommonKVBootstrapServer):
    """SGLang's registry of prefill ranks."""


def _row(number: Any) -> int:
    """A row of the auxiliary buffers or a state; raises KVServeError when it is none."""
    return int(pools.as_pages([int(number)])[0])
