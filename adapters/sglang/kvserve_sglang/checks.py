"""What this adapter does not carry is refused when a server starts, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import fields
from torch import Tensor

from kvserve_core.errors import ConfigError, UnsupportedSpecError
from kvserve_core.pipeline import Pipeline
from kvserve_core.settings import Settings

HOST_RECEIVE = "disaggregation_decode_host_receive_threshold"


def check_manager(manager: Any) -> None:
    """Raise UnsupportedSpecError for a topology or a mode in which pages are not what ``send`` says they are."""
    refused = {
        "a context-parallel prefill whose ranks all send": manager.attn_cp_size > 1
        and manager.enable_all_cp_ranks_for_transfer,
        "--enable-kv-cache-sharding": getattr(manager, "kv_shard_size", 1) > 1,
        "decode context parallelism": manager.dcp_size > 1,
        "--disaggregation-decode-allocation-policy prefill_complete": getattr(
            manager, "defer_decode_allocation", False
        ),
        "a draft model's cache (speculative decoding)": manager.kv_args.num_draft_entries > 0,
    }
    for what, used in refused.items():
        if used:
            raise UnsupportedSpecError(
                f"kvserve does not carry {what}; serve without it, or with another transfer backend"
            )


def check_host_receive(disagg: Any, server_args: type) -> None:
    """Raise UnsupportedSpecError where SGLang would have requests received into host memory.

    Which threshold means never moved between releases (0, later 1), but it is the default of ``server_args`` in all.
    """
    default = next((field.default for field in fields(server_args) if field.name == HOST_RECEIVE), None)
    if getattr(disagg, HOST_RECEIVE, default) != default:
        raise UnsupportedSpecError(
            f"kvserve writes to device pages only; leave out --{HOST_RECEIVE.replace('_', '-')}, or use another"
            " transfer backend"
        )


def check_metadata(buffers: Any) -> None:
    """Raise UnsupportedSpecError for metadata buffers of SGLang's that are not in host memory."""
    for name, buffer in vars(buffers).items():
        if isinstance(buffer, Tensor) and buffer.device.type != "cpu":
            raise UnsupportedSpecError(
                f"SGLang keeps its metadata buffer {name!r} on device {buffer.device.type!r}, kvserve reads them in"
                " host memory; unset SGLANG_MOONCAKE_CUSTOM_MEM_POOL, or use another transfer backend"
            )


def within_checksum(pipelines: Mapping[str, Pipeline], settings: Settings) -> dict[str, Pipeline]:
    """The profiles that survive ``--disaggregation-enable-kv-checksum``: SGLang compares the bytes of both sides.

    Raises:
        ConfigError: lossy profiles are on offer. ``min_quality = 1`` says that exact ones will do.
    """
    exact = {name: pipeline for name, pipeline in pipelines.items() if pipeline.lossless}
    lossy = sorted(set(pipelines) - set(exact))
    if lossy and settings.min_quality < 1:
        raise ConfigError(
            f"--disaggregation-enable-kv-checksum aborts every request that is sent by the lossy profile(s)"
            f" {', '.join(map(repr, lossy))}; leave the flag out, or set min_quality = 1 to use exact profiles only",
            "min_quality",
        )
    return exact
