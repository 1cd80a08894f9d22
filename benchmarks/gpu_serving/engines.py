"""Calls that run inside an engine's process: one request step by step, a link of another speed, what sessions saw."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

from vllm_engines import scheduler_side, settle, worker_side


def offer(llm: Any, prompt: list[int], table: dict[str, Any]) -> tuple[float, float, dict[str, Any] | None]:
    """Prefill: when it was asked and when it answered (``time.monotonic()``), and the params for the decode engine."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "kvserve": table}
    began, stamps, last = _run(llm, prompt, 1, params)
    return began, stamps[0], last.kv_transfer_params


def take(llm: Any, prompt: list[int], params: dict[str, Any] | None, tokens: int) -> tuple[float, list[float]]:
    """Decode: when it was asked, and when each token was there."""
    began, stamps, _ = _run(llm, prompt, tokens, params)
    return began, stamps


def _run(llm: Any, prompt: list[int], tokens: int, params: dict[str, Any] | None) -> tuple[float, list[float], Any]:
    from vllm import SamplingParams

    extra = {"kv_transfer_params": params} if params else None
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)
    engine = llm.llm_engine
    began = time.monotonic()
    engine.add_request(f"r{began}", {"prompt_token_ids": prompt}, sampling)
    stamps: list[float] = []
    last = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output
            new = len(output.outputs[0].token_ids) - len(stamps)
            stamps += [time.monotonic()] * new
    return began, stamps, last


def set_bandwidth(llm: Any, bits_per_s: float | None) -> None:
    """Let this engine's transport send at another rate. Nobody else is told."""
    from kvserve_plugins.transports import _tcp_messages as msg
    from kvserve_plugins.transports._carrier import InBand
    from kvserve_plugins.transports._pacing import Pacer

    transport = worker_side(llm)._deployment.transport()
    sender = transport._server._sender
    sender._pacer = Pacer(bits_per_s / 8 if bits_per_s else None)
    if isinstance(sender._carrier, InBand):
        sender._carrier._piece = sender._pacer.piece(msg.PIECE_BYTES)


def watch(llm: Any) -> None:
    """Keep the outcomes that this engine's sessions report."""
    side = worker_side(llm)
    for session in (side._producer, side._consumer):
        if session is not None:
            session.seen = []
            session.poll = _recording(session, session.poll)


def _recording(session: Any, poll: Any) -> Any:
    def recorded() -> Any:
        events = poll()
        session.seen += [o for o in (getattr(e, "outcome", e) for e in events) if hasattr(o, "transfer_s")]
        return events

    return recorded


def outcomes(llm: Any) -> list[dict[str, Any]]:
    """Those since the last call, after the engine has come to rest."""
    settle(llm)
    side = worker_side(llm)
    found = []
    for session in (side._producer, side._consumer):
        if session is not None:
            found += [asdict(o) for o in session.seen]
            session.seen.clear()
    return found


def force(llm: Any, profile: str | None) -> None:
    """Let every request be sent by one profile, or as the controller decides."""
    controller = scheduler_side(llm)._offering._deployment.controller
    chosen = controller.__dict__.setdefault("_chosen", controller.choose)
    if profile is None:
        controller.choose = chosen
    else:
        controller.choose = lambda context: _as(chosen(context), profile)


def _as(decision: Any, profile: str) -> Any:
    from msgspec.structs import replace as with_fields

    changed = with_fields if hasattr(decision, "__struct_fields__") else replace
    return changed(decision, profile=profile, reason="forced by the benchmark")


def peer(llm: Any) -> dict[str, Any]:
    """How this engine's consumer describes itself to a producer."""
    import msgspec

    described: dict[str, Any] = msgspec.to_builtins(worker_side(llm)._consumer.peer)
    return described


def versions(llm: Any) -> dict[str, str]:
    """Of the engine and its backend."""
    import torch
    import vllm

    from kvserve_core import __version__

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"vllm": vllm.__version__, "torch": torch.__version__, "kvserve": __version__, "device": name}
