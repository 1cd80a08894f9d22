"""What SGLang calls in each of its processes (entry-point group ``sglang.srt.plugins``), before it reads arguments.

SGLang logs an exception of a plugin and goes on without it. A server that asked for this backend must not: it would
refuse the name, or worse, serve without what was asked for. So a failure here is kept, and raised where the backend
is used; servers that do not use it are left alone.
"""

from __future__ import annotations

import logging
import pkgutil
import sys
from collections.abc import Callable

from kvserve_core.errors import PluginError
from kvserve_sglang import backend
from kvserve_sglang.versions import check_version

GET_CLASS = "sglang.srt.disaggregation.utils.get_kv_class"
PREFILL_QUEUE = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
DECODE_QUEUE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
log = logging.getLogger(__name__)


def register() -> None:
    """Add the backend ``kvserve``; never raises but to end a server that asked for it and cannot have it."""
    try:
        _install()
    except Exception as error:  # noqa: BLE001  # whatever is wrong with this SGLang must be said, not logged away
        refuse(f"kvserve cannot be used in this SGLang: {error}")


def refuse(reason: str) -> None:
    """Make every use of the backend fail with ``reason``."""
    log.error(reason)
    if _asked_for(sys.argv):
        raise SystemExit(reason)  # an Exception would be swallowed
    try:
        backend.add_choice()
        _hook_classes(lambda: _raise(reason))
    except Exception:  # then the name is unknown to SGLang, which refuses it
        log.exception("the reason above cannot be shown where the backend is used")


def _raise(reason: str) -> dict[str, type]:
    raise PluginError(reason)


def _asked_for(argv: list[str]) -> bool:
    return any(
        arg.endswith(f"={backend.NAME}") or following == backend.NAME
        for arg, following in zip(argv, [*argv[1:], ""], strict=True)
        if arg.startswith("--disaggregation-transfer-backend")
    )


def _install() -> None:
    import sglang.version

    check_version(sglang.version.__version__)
    _check_targets()
    backend.add_choice()
    _hook_classes(_classes)
    _hook_queues()


def _check_targets() -> None:
    """SGLang only logs a hook whose target is gone."""
    targets = [GET_CLASS, *(f"{queue}._init_kv_manager" for queue in (PREFILL_QUEUE, DECODE_QUEUE))]
    for target in [*targets, f"{PREFILL_QUEUE}.finalize_bootstrap"]:
        try:
            pkgutil.resolve_name(target)
        except (AttributeError, ImportError) as error:
            raise PluginError(f"it has no {target!r} to hook into ({error})") from error


def _classes() -> dict[str, type]:
    from kvserve_sglang.manager import KVServeBootstrapServer, KVServeManager
    from kvserve_sglang.receiver import KVServeReceiver
    from kvserve_sglang.sender import KVServeSender

    return {
        "manager": KVServeManager,
        "sender": KVServeSender,
        "receiver": KVServeReceiver,
        "bootstrap_server": KVServeBootstrapServer,
    }


def _hook_classes(classes: Callable[[], dict[str, type]]) -> None:
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    member = backend.add_member(TransferBackend)
    HookRegistry.register(GET_CLASS, backend.class_hook(member, classes), HookType.AROUND)


def _hook_queues() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvserve_sglang import hooks

    for queue in (PREFILL_QUEUE, DECODE_QUEUE):
        HookRegistry.register(f"{queue}._init_kv_manager", hooks.bind_manager, HookType.AFTER)
    HookRegistry.register(f"{PREFILL_QUEUE}.finalize_bootstrap", hooks.describe_request, HookType.AFTER)
