"""A prefill and a decode rank of the real SGLang in one process: its managers, senders, receivers and pools; no model.

Bootstrap, control sockets and the kvserve transport are the real ones, over loopback.
"""

from __future__ import annotations

import contextlib
import inspect
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender, KVTransferError
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    KVClassType,
    MetadataBuffers,
    TransferBackend,
    get_kv_class,
    get_kv_transfer_buf_infos,
    setup_state_kv_args,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel
from sglang.test.test_utils import published_topology

from kvserve_core.requests import RequestOptions
from kvserve_core.settings import Settings
from kvserve_sglang.setup import Engine

load_plugins()  # as every process of SGLang does, before anything else
LAYERS, SIZE, HEADS, DIM = 3, 1024, 4, 64
MHA = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "hidden_size": 512,
    "rope_theta": 10000.0,
}
MLA = MHA | {"model_type": "deepseek_v2", "kv_lora_rank": 64, "qk_rope_head_dim": 16}
Pages = np.ndarray
OPTIONS = RequestOptions()
OLDER = "dest_tp_ranks" in inspect.signature(CommonKVSender.__init__).parameters
SENDER_EXTRA = {"dest_tp_ranks": [0], "pp_rank": 0} if OLDER else {}
"""What SGLang's scheduler passed beside, up to 0.5.21."""
NAMES = {value: name for name, value in vars(KVPoll).items() if isinstance(value, int)}


def failure(end: Any) -> str:
    """What SGLang is told of a failed request."""
    try:
        end.failure_exception()
    except KVTransferError as error:
        return str(error)
    raise AssertionError("failure_exception must raise")


def spy(monkeypatch: pytest.MonkeyPatch, of: Any, name: str) -> list[tuple[Any, ...]]:
    """The arguments of calls that go on to the real method."""
    calls: list[tuple[Any, ...]] = []
    real: Callable[..., Any] = getattr(of, name)

    def recording(*args: Any) -> Any:
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(of, name, recording)
    return calls


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait(until: Callable[[], Any], what: str, seconds: float = 15.0) -> Any:
    """The first true value of ``until()``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := until():
            return found
        time.sleep(0.005)
    raise AssertionError(f"{what} did not happen within {seconds} s")


def kv_args(pool: Any, meta: MetadataBuffers, page_size: int, heads: tuple[int, int] | None) -> KVArgs:
    """What SGLang's queues fill in."""
    args = KVArgs()
    args.engine_rank = args.pp_rank = args.system_dp_rank = args.gpu_id = args.num_draft_entries = 0
    args.rust_http_port = args.kv_layout = args.ib_device = args.prefill_end_layer = None
    args.kv_cache_dtype_str, args.page_size, args.prefill_start_layer, args.kv_layer_ids = "auto", page_size, 0, []
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = get_kv_transfer_buf_infos(pool)
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = meta.get_buf_infos()
    if heads:
        args.kv_head_num, args.total_kv_head_num = heads
    setup_state_kv_args(args, pool, None, LAYERS)
    return args


def mha_pool(page_size: int, ranks: int, dtype: torch.dtype = torch.bfloat16) -> MHATokenToKVPool:
    return MHATokenToKVPool(SIZE, page_size, dtype, HEADS // ranks, DIM, LAYERS, "cpu", False)


def mla_pool(page_size: int, ranks: int, dtype: torch.dtype = torch.bfloat16) -> MLATokenToKVPool:
    del ranks  # every rank holds all of it
    sizes = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "layer_num": LAYERS}
    return MLATokenToKVPool(SIZE, page_size, dtype, **sizes, device="cpu", enable_memory_saver=False)


def pages_of(tokens: int, seed: int, page_size: int, size: int = SIZE) -> Pages:
    """Distinct pages for so many tokens, as an allocator leaves them; page 0 is SGLang's own."""
    every = np.random.default_rng(seed).permutation(np.arange(1, size // page_size))
    return every[: -(-tokens // page_size)].astype(np.int32)


@dataclass
class Side:
    """One rank: its pool, its metadata buffers and its manager."""

    pool: Any
    meta: MetadataBuffers
    manager: Any


@dataclass
class Pair:
    """Both servers. make_pool: of a page size and a number of ranks. config: of the model, as a Hugging Face text
    config. ranks: tensor-parallel sizes of prefill and decode. hidden: widths of a metadata buffer on both sides.
    flags: more server arguments.
    """

    make_pool: Callable[[int, int], Any]
    config: dict[str, Any]
    page_size: int
    settings: Settings = field(default_factory=Settings)
    window: int | None = None
    ranks: tuple[int, int] = (1, 1)
    hidden: tuple[int, int] = (16, 16)
    flags: dict[str, Any] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Pair:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        backend, port = TransferBackend("kvserve"), free_port()
        self.address = f"127.0.0.1:{port}"
        self._classes = {kind: get_kv_class(backend, kind) for kind in KVClassType}
        server = self._classes[KVClassType.BOOTSTRAP_SERVER]("127.0.0.1", port)
        self._stack.callback(server.close)
        wait(lambda: _listens(port), "the bootstrap server")
        topology = published_topology(
            host="127.0.0.1",
            disaggregation_bootstrap_port=port,
            disaggregation_transfer_backend="kvserve",
            page_size=self.page_size,
            **self.flags,
        )
        self._server_args = self._stack.enter_context(topology)
        self._stack.enter_context(get_parallel().override(pp_group=None))
        modes = (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)
        self.prefills, self.decodes = (
            [self._side(mode, rank, size) for rank in range(size)] for mode, size in zip(modes, self.ranks, strict=True)
        )
        self.prefill, self.decode = self.prefills[0], self.decodes[0]
        self.fill()

    def fill(self, seed: int = 0) -> None:
        """Write the prefill server's pools: values of their own per rank, but for a latent cache."""
        for rank, side in enumerate(self.prefills):
            for i, buffer in enumerate(tensors(side.pool)):
                fill(buffer, seed + i + (0 if hasattr(side.pool, "kv_buffer") else 1000 * rank))

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _side(self, mode: DisaggregationMode, rank: int, size: int) -> Side:
        pool = self.make_pool(self.page_size, size)
        width = self.hidden[mode == DisaggregationMode.DECODE]
        meta = MetadataBuffers(8, width, torch.float32, max_sampling_mask_tokens=16)
        mla = "kv_lora_rank" in self.config
        every = self.config["num_key_value_heads"]
        args = kv_args(pool, meta, self.page_size, None if mla else (every // size, every))
        args.engine_rank = rank
        place = {"tp_size": size, "tp_rank": rank, "attn_tp_size": size, "attn_tp_rank": rank, "moe_tp_size": size}
        with get_parallel().override(**place):
            manager = self._classes[KVClassType.MANAGER](args, mode, self._server_args, mla)
        manager.bind(Engine(pool, self.config, "test-model", self.window), self.settings)
        self._stack.callback(manager.close)
        return Side(pool, meta, manager)

    def request(
        self, room: int, pages: Pages, prefix: int = 0, aux: int = 5, states: list[Any] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """The ranks' senders, and their receivers, which have asked for ``pages`` of their own."""
        make = self._classes[KVClassType.SENDER]
        senders = [make(side.manager, self.address, room, **SENDER_EXTRA) for side in self.prefills]
        receivers = []
        for side in self.decodes:
            wait(lambda side=side: side.manager.try_ensure_parallel_info(self.address), "the prefill's topology")
            receivers.append(self._classes[KVClassType.RECEIVER](side.manager, self.address, room))
            receivers[-1].init(0)
        for receiver in receivers:
            receiver.send_metadata(pages, aux_index=aux, state_indices=states, decode_prefix_len=prefix)
        for sender in senders:
            wait(lambda sender=sender: sender.poll() != KVPoll.Bootstrapping, "the bootstrap")
        return senders, receivers

    def write_aux(self, room: int, row: int = 1, token: int = 777) -> None:
        """What a prefill leaves for the decode side, in its metadata buffers."""
        for side in self.prefills:
            side.meta.output_ids[row, 0] = token
            side.meta.bootstrap_room[row, 0] = room

    def settle(self, *ends: Any, seconds: float = 15.0) -> list[str]:
        """Poll senders and receivers until each has ended; the names of how."""
        return [NAMES[wait(lambda end=end: _ended(end), "the end of a request", seconds)[0]] for end in ends]

    def same(self, source: Pages, target: Pages, tokens: int) -> bool:
        """Whether the decode server holds the bytes of the prefill server's ``tokens``, over all heads."""
        mine, theirs = slots(source, self.page_size, tokens), slots(target, self.page_size, tokens)
        pairs = zip(whole(self.prefills), whole(self.decodes), strict=True)
        return all(torch.equal(a[mine], b[theirs]) for a, b in pairs)


def _ended(end: Any) -> tuple[int] | None:
    status = end.poll()
    return (status,) if status in (KVPoll.Success, KVPoll.Failed) else None


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def slots(pages: Pages, page_size: int, tokens: int) -> torch.Tensor:
    """The pool slots of a request's tokens."""
    every = (torch.as_tensor(pages).long()[:, None] * page_size + torch.arange(page_size)).flatten()
    return every[:tokens]


def tensors(pool: Any) -> list[torch.Tensor]:
    """Every buffer of a pool, as bits: NaN patterns of random bytes must compare equal."""
    if hasattr(pool, "kv_buffer"):
        found = list(pool.kv_buffer)
    elif hasattr(pool, "full_kv_pool"):
        swa = getattr(pool, "swa_kv_pool", None)
        return [*tensors(pool.full_kv_pool), *(tensors(swa) if swa else ())]
    else:
        found = [*pool.k_buffer, *pool.v_buffer]
    return [x.view(torch.uint8) for x in found]


def whole(sides: list[Side]) -> list[torch.Tensor]:
    """The buffers of a server with the heads of all ranks; a latent cache is the same on each of them."""
    every = [tensors(side.pool) for side in sides]
    if hasattr(sides[0].pool, "kv_buffer"):
        assert all(torch.equal(a[1:], b[1:]) for rank in every for a, b in zip(rank, every[0], strict=True))
        return every[0]
    return [torch.cat(layer, dim=1) for layer in zip(*every, strict=True)]


def fill(buffer: torch.Tensor, seed: int) -> None:
    """Seeded values that look like a cache's, written through the view of bytes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(buffer.nbytes // 2, generator=generator).bfloat16()
    buffer.view(torch.uint8).view(-1).copy_(values.view(torch.uint8))
