"""A request on a prefill rank, as SGLang's scheduler sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NoReturn

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender

from kvserve_core.errors import PluginError
from kvserve_core.requests import RequestOptions
from kvserve_sglang import pools
from kvserve_sglang.failing import ENDED, raise_failure
from kvserve_sglang.sending import Chunk, Sending
from kvserve_sglang.slots import Slots

Prefilled = tuple[int, float]
"""Tokens that a prefill computed, and the seconds it took."""
log = logging.getLogger(__name__)


def unknown() -> Prefilled | None:
    """Where SGLang does not say."""
    return None


class KVServeSender(CommonKVSender):
    """A request on a prefill rank."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *args: Any, **kwargs: Any) -> None:
        self._born = time.monotonic()
        self._total: int | None = None
        self._options = RequestOptions()
        self._text: Callable[[], str] = str
        self._sending: Sending | None = None
        self._prefilled: Callable[[], Prefilled | None] = unknown
        over = mgr.lobby.entered(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **kwargs)
        if self.init_time is None:
            self.init_time = time.time()
        if over:
            mgr.conclude_failure(bootstrap_room=bootstrap_room, failure_reason=over)

    def describe(
        self,
        num_tokens: int,
        options: RequestOptions,
        prefilled: Callable[[], Prefilled | None] = unknown,
        text: Callable[[], str] = str,
    ) -> None:
        """How long the prompt is, so that sending can begin with its first chunk.

        prefilled: asked with the last chunk. text: the prompt's, asked where a classifier wants it.
        """
        self._total, self._options, self._prefilled, self._text = num_tokens, options, prefilled, text

    def send(
        self, kv_indices: Any, state_indices: list[Any] | None = None, num_kv_tokens: int | None = None, **kwargs: Any
    ) -> None:
        """A chunk of pages; several per request are normal. Never raises: a failure is the request's."""
        del kwargs
        event, self._early_send_wait_event = getattr(self, "_early_send_wait_event", None), None
        if self.conclude_state in ENDED:
            return
        try:
            self._send(kv_indices, state_indices, num_kv_tokens, event)
        except Exception as error:
            log.exception("room %s cannot be sent", self.bootstrap_room)
            self.kv_mgr.hook_failed("send")
            reason = f"{type(error).__name__}: {error}"
            self.kv_mgr.conclude_failure(bootstrap_room=self.bootstrap_room, failure_reason=reason)

    def _send(self, kv_indices: Any, state_indices: list[Any] | None, num_kv_tokens: int | None, event: Any) -> None:
        mgr = self.kv_mgr
        pages, _, last, skip = self._prepare_send_indices(kv_indices, state_indices)
        if skip or mgr.request_status.get(self.bootstrap_room) in (None, KVPoll.Failed):
            return
        if self._sending is None:
            self._sending = self._begin()
        tokens = len(pages) * mgr.kv_args.page_size if num_kv_tokens is None else num_kv_tokens
        cells, windows = mgr.cells(self.aux_index, state_indices) if last else ({}, None)
        prefilled = self._timed() if last else None
        mgr.side.pump.put(Chunk(self._sending, pools.as_pages(pages), tokens, last, event, cells, windows, prefilled))
        mgr.update_status(self.bootstrap_room, KVPoll.Transferring)
        self._record_transfer_indices(pages, state_indices if last else None)

    def _timed(self) -> Prefilled | None:
        """What the engine took for the prompt. Only the controller wants it: not to know it harms no request."""
        asked, self._prefilled, self._text = self._prefilled, unknown, str  # they hold the request that holds this one
        try:
            return asked()
        except Exception:
            log.exception("the prefill of room %s has no time", self.bootstrap_room)
            self.kv_mgr.hook_failed("prefilled")
            return None

    def _begin(self) -> Sending:
        mgr = self.kv_mgr
        asked = mgr.targets(self.bootstrap_room)
        if asked is None:
            raise PluginError(f"no decode rank asked for room {self.bootstrap_room}, or it is over")
        prefix, targets = asked
        slots = Slots(mgr.kv_args.page_size, prefix)
        sending = Sending(
            self.bootstrap_room, slots, targets, self._options, self._total, text=self._text, born=self._born
        )
        mgr.side.begin(sending)
        return sending

    def poll(self) -> Any:
        """Where the request stands."""
        if self.conclude_state is not None:
            return self.conclude_state
        status = self.kv_mgr.request_status.get(self.bootstrap_room, KVPoll.Failed)
        if status == KVPoll.Bootstrapping:
            status = self._check_bootstrap_timeout() or status
        if status in ENDED:
            self.conclude_state = status
        return status

    def clear(self) -> None:
        """SGLang gives the pages away next: they are not read from here on."""
        if self._sending is not None:
            self.kv_mgr.side.forget(self.bootstrap_room)
        super().clear()
        self._leave()

    def _leave(self) -> None:
        reason = "the prefill engine ended the request" if self.conclude_state == KVPoll.Failed else ""
        self.kv_mgr.lobby.left(self.bootstrap_room, reason)

    def abort(self) -> None:
        """SGLang ends the request; a decode side that is not fetching yet would wait for it."""
        reason = "the prefill engine aborted the request"
        self.kv_mgr.conclude_failure(bootstrap_room=self.bootstrap_room, failure_reason=reason)
        super().abort()
        if self._sending is not None:
            self.kv_mgr.side.forget(self.bootstrap_room, reason)
        self._leave()

    def failure_exception(self) -> NoReturn:
        """Raise what went wrong."""
        raise_failure(self)
