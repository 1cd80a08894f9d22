"""A request on a decode rank, as SGLang's scheduler sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NoReturn

import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.runtime_context import get_disagg

from kvserve_core.errors import UnsupportedSpecError
from kvserve_sglang.checks import HOST_RECEIVE
from kvserve_sglang.failing import ENDED, raise_failure
from kvserve_sglang.messages import Message, Register, Wanted, pack

log = logging.getLogger(__name__)


def shares_prefixes() -> bool:
    """Whether the decode server keeps what arrived for other requests; SGLang does not unless it is told to."""
    return bool(getattr(get_disagg(), "disaggregation_decode_enable_radix_cache", False))


class KVServeReceiver(CommonKVReceiver):
    """A request on a decode rank."""

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = None,
        **kwargs: Any,
    ) -> None:
        """Pages are ready. They stay here; the prefill ranks only learn that they may begin.

        Never raises: a failure is the request's.
        """
        del kwargs
        try:
            if getattr(destination, "value", "device") != "device":
                raise UnsupportedSpecError(
                    f"SGLang wants to receive into {destination.value!r} pages, kvserve writes to device pages only;"
                    f" leave out --{HOST_RECEIVE.replace('_', '-')}"
                )
            self._ask(kv_indices, aux_index, state_indices, decode_prefix_len or 0)
        except Exception as error:
            log.exception("room %s cannot be asked for", self.bootstrap_room)
            self.kv_mgr.hook_failed("send_metadata")
            self._fail(f"{type(error).__name__}: {error}")

    def _ask(self, pages: Any, aux_index: int | None, state_indices: list[Any] | None, prefix: int) -> None:
        mgr = self.kv_mgr
        if self.bootstrap_infos is None:
            self._fail(f"no ranks of the prefill server {self.bootstrap_addr!r} are known")
            return
        slots = mgr.slots(prefix, pages, aux_index, state_indices)
        senders = sum(not info["is_dummy"] for info in self.bootstrap_infos)
        mgr.side.begin(self.bootstrap_room, slots, senders, self.prefill_info.attn_tp_size)
        if self._to_all(lambda info: self._wanted(slots.prefix, info["is_dummy"])):
            self.init_time = time.time()
        else:
            self.invalidate_cached_bootstrap_infos()

    def _wanted(self, prefix: int, dummy: bool) -> Wanted:
        mgr = self.kv_mgr
        at = (mgr.local_ip, mgr.rank_port, mgr.session_id)
        return Wanted(self.bootstrap_room, *at, self.required_dst_info_num, prefix, dummy)

    def _register_kv_args(self) -> bool:
        """Once per prefill server: what this rank holds and can read. Never raises: a failure is the request's."""
        try:
            if self.bootstrap_infos is None:
                return False
            register = self._register()
            return self._to_all(lambda info: register)
        except Exception as error:
            log.exception("this rank cannot introduce itself to %s", self.bootstrap_addr)
            self.kv_mgr.hook_failed("_register_kv_args")
            self._fail(f"{type(error).__name__}: {error}")
            return False

    def _register(self) -> Register:
        mgr = self.kv_mgr
        peer = mgr.side.peer(self.prefill_info.attn_tp_size)
        exact = shares_prefixes() and mgr.setup.settings.lossy_prefix_cache == "forbid"
        return Register(mgr.local_ip, mgr.rank_port, mgr.session_id, peer, mgr.setup.holds, exact)

    def _to_all(self, message: Callable[[dict[str, Any]], Message]) -> bool:
        for info in self.bootstrap_infos:
            try:
                socket, lock = self._connect_to_bootstrap_server(info)
                with lock:
                    socket.send_multipart(pack(message(info)))
            except zmq.ZMQError as error:
                self._fail(f"the prefill rank at {info.get('rank_ip')}:{info.get('rank_port')} is not reached: {error}")
                return False
        return True

    def _fail(self, reason: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.conclude_state = KVPoll.Failed
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)

    def poll(self) -> Any:
        """Where the request stands."""
        if self.conclude_state is not None:
            return self.conclude_state
        status = self.kv_mgr.request_status.get(self.bootstrap_room, KVPoll.Failed)
        if status == KVPoll.WaitingForInput:
            status = self._check_waiting_timeout() or status
        if status in ENDED:
            self.conclude_state = status
        return status

    def clear(self) -> None:
        """SGLang gives the pages away next: nothing is written to them once this returns."""
        self.kv_mgr.side.forget(self.bootstrap_room)
        super().clear()

    def abort(self) -> None:
        """SGLang ends the request."""
        self.kv_mgr.side.forget(self.bootstrap_room)
        super().abort()

    def failure_exception(self) -> NoReturn:
        """Raise what went wrong."""
        raise_failure(self)
