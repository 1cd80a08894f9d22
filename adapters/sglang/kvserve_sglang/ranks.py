"""The prefill ranks of one server find each other through SGLang's own bootstrap registry."""

from __future__ import annotations

import time
from typing import Any

import requests

from kvserve_core.errors import PeerLost
from kvserve_sglang.messages import Message

TIMEOUT_S = 5.0
SILENT_S = 5.0
"""How long a registry that did not answer is not asked again: each question would keep all requests waiting."""


class Ranks:
    """Control sockets of the prefill ranks that share a request; asked for when first needed, as all must be up."""

    def __init__(self, manager: Any, bootstrap_url: str) -> None:
        self._manager, self._url = manager, bootstrap_url
        self._known: dict[tuple[int, int], tuple[str, int]] = {}
        self._silent_until_s = 0.0

    @property
    def first(self) -> bool:
        """Whether this rank decides."""
        return (self._manager.attn_tp_rank, self._manager.pp_rank) == (0, 0)

    @property
    def others(self) -> list[tuple[int, int]]:
        """``(tensor-parallel rank, pipeline stage)`` of all but this one."""
        m = self._manager
        every = [(tp, pp) for tp in range(m.attn_tp_size) for pp in range(m.pp_size)]
        return [rank for rank in every if rank != (m.attn_tp_rank, m.pp_rank)]

    def reporting(self, decode_size: int) -> int:
        """How many prefill ranks send to decode servers of ``decode_size`` ranks; a latent cache is sent once."""
        m = self._manager
        senders = min(m.attn_tp_size, decode_size) if m.is_mla_backend else m.attn_tp_size
        return int(senders * m.pp_size)

    def tell(self, rank: tuple[int, int], message: Message) -> None:
        """Send to one rank.

        Raises:
            PeerLost: the registry does not know it, or did not answer just now, or the rank takes no messages.
        """
        if rank not in self._known:
            self._known[rank] = self._asked(rank)
        self._manager.send_message(*self._known[rank], message)

    def _asked(self, rank: tuple[int, int]) -> tuple[str, int]:
        if time.monotonic() < self._silent_until_s:
            raise PeerLost(f"the bootstrap server at {self._url} does not answer")
        try:
            return self._find(rank)
        except requests.RequestException as error:
            self._silent_until_s = time.monotonic() + SILENT_S
            raise PeerLost(f"the bootstrap server at {self._url} does not answer: {error}") from error

    def _find(self, rank: tuple[int, int]) -> tuple[str, int]:
        m = self._manager
        group = m.attn_dp_rank if m.system_dp_size == 1 else m.system_dp_rank
        query = {
            "prefill_dp_rank": group,
            "prefill_cp_rank": m.attn_cp_rank,
            "target_tp_rank": rank[0],
            "target_pp_rank": rank[1],
        }
        answer = requests.get(f"{self._url}/route", params=query, timeout=TIMEOUT_S)
        if answer.status_code != requests.codes.ok:
            raise PeerLost(f"the bootstrap server does not know prefill rank {rank}: {answer.text}")
        found = answer.json()
        return str(found["rank_ip"]), int(found["rank_port"])
