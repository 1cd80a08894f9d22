"""How the backend gets into a stock SGLang, and what happens where it cannot; and what of SGLang it rests on."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import inprocess
import pytest
import sglang
import sglang.version
from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
from sglang.srt.disaggregation import decode, prefill, utils
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.managers import disagg_service, scheduler
from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
from sglang.srt.plugins.hook_registry import HookRegistry, HookType, _wrap_fn

from kvserve_core.errors import PluginError
from kvserve_sglang import plugin, sender
from kvserve_sglang.hooks import prefilled
from kvserve_sglang.manager import KVServeManager
from kvserve_sglang.sender import KVServeSender
from kvserve_sglang.versions import NEWEST, OLDEST, WINDOW, check_version, release

SOURCE = Path(sglang.__file__).parent
assert inprocess.OPTIONS  # importing it loads the plugins, as every process of SGLang does


@pytest.mark.parametrize("version", ["0.5.21", "0.5.22", "0.5.23", "0.5.23.post1", "v0.5.23"])
def test_releases_inside_the_window_are_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.5.20", "0.5.24", "0.6.0", "1.0", "0.4.99", "", "0.5.²3", "٠.٥.٢٣"])  # noqa: RUF001  # digits of other scripts
def test_releases_outside_are_refused_and_the_window_is_named(version: str) -> None:
    with pytest.raises(PluginError, match=re.escape(WINDOW)):
        check_version(version)


def test_the_extra_installs_what_the_window_takes() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, (*NEWEST[:-1], NEWEST[-1] + 1)))
    assert project["optional-dependencies"]["sglang"] == [f"sglang>={oldest},<{newest}"]
    assert f"{oldest} to {'.'.join(map(str, NEWEST))}" == WINDOW


def test_suffixes_of_a_version_do_not_count() -> None:
    assert release("0.5.23rc1") == (0, 5, 23)
    assert release("0.5.23.dev3+gabc") == (0, 5, 23)


def test_sglang_takes_the_name_and_gives_our_classes_for_it() -> None:
    member = utils.TransferBackend("kvserve")
    assert member in utils.TransferBackend
    assert "kvserve" in DISAGG_TRANSFER_BACKEND_CHOICES
    assert utils.get_kv_class(member, utils.KVClassType.MANAGER) is KVServeManager
    assert utils.get_kv_class(member, utils.KVClassType.SENDER) is KVServeSender
    assert utils.get_kv_class(member, utils.KVClassType.KVARGS).__name__ == "KVArgs"


def test_other_backends_are_untouched() -> None:
    fake = utils.get_kv_class(utils.TransferBackend("fake"), utils.KVClassType.SENDER)
    assert fake.__name__ == "FakeKVSender"


def test_every_importer_of_what_is_patched_sees_the_patch() -> None:
    for module in (prefill, decode, disagg_service):
        assert module.get_kv_class is utils.get_kv_class
    assert hasattr(utils.get_kv_class, "__wrapped__")
    for module in (scheduler, disagg_service, prefill, decode):
        assert module.TransferBackend("kvserve") is utils.TransferBackend("kvserve")


PATCHED = {"get_kv_class", "TransferBackend"}
IMPORTERS = {
    "srt/disaggregation/decode.py",
    "srt/disaggregation/prefill.py",
    "srt/disaggregation/utils.py",
    "srt/managers/disagg_service.py",
    "srt/managers/multi_tokenizer_mixin.py",
    "srt/managers/scheduler.py",
}
"""Files that use what is patched, all of them read for this adapter."""


def test_nothing_else_in_the_installed_sglang_uses_what_is_patched() -> None:
    """Drift: a new user of these names may need more than the patch gives."""
    assert {str(file.relative_to(SOURCE)) for file in (SOURCE / "srt").rglob("*.py") if uses_patched(file)} == IMPORTERS


def uses_patched(file: Path) -> bool:
    """Whether code, not a comment, names what is patched."""
    text = file.read_text(encoding="utf-8")
    if not any(name in text for name in PATCHED):
        return False
    nodes = list(ast.walk(ast.parse(text)))
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    return not PATCHED.isdisjoint(imported | named)


USED = {
    conn.CommonKVManager: "update_status record_failure conclude_transfer conclude_failure apply_prefill_status"
    " _connect parse_kv_status_message resolve_kv_replica_factor _send_multipart_locked"
    " _prefill_unique_rank _start_heartbeat_checker_thread try_ensure_parallel_info register_to_bootstrap",
    conn.CommonKVSender: "init _prepare_send_indices _record_transfer_indices _check_bootstrap_timeout clear abort"
    " pop_decode_prefix_len should_send_kv_chunk get_transfer_metric",
    conn.CommonKVReceiver: "init _connect_to_bootstrap_server _check_waiting_timeout invalidate_cached_bootstrap_infos"
    " clear abort ensure_abort_notified _register_kv_args send_metadata",
}


@pytest.mark.parametrize("owner", USED, ids=lambda owner: owner.__name__)
def test_what_is_used_of_the_common_classes_is_there(owner: type) -> None:
    missing = [name for name in USED[owner].split() if not hasattr(owner, name)]
    assert not missing


def test_the_event_of_an_early_send_is_where_the_sender_looks() -> None:
    """SGLang sets it on the sender; under another name the sender would read pages that are still written."""
    for module in (prefill, sender):
        nodes = ast.walk(ast.parse(inspect.getsource(module)))
        written = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        assert "_early_send_wait_event" in written, module.__name__


def test_a_prefill_is_timed_where_the_hook_looks() -> None:
    stats = SchedulerReqTimeStats()
    req = SimpleNamespace(origin_input_ids=range(500), cached_tokens=0, time_stats=stats)
    assert prefilled(req) is None
    stats.set_wait_queue_entry_time(5.0)
    stats.set_forward_entry_time(7.0)
    stats.set_forward_entry_time(8.0)  # of its second chunk
    assert prefilled(req) is None
    stats.set_prefill_finished_time(9.5)
    assert prefilled(req) == (500, 2.5)


def test_the_states_of_a_request_have_the_known_order() -> None:
    order = ["Failed", "Bootstrapping", "WaitingForInput", "Transferring", "Success"]
    assert [getattr(KVPoll, name) for name in order] == [0, 1, 2, 3, 4]


def test_the_hooked_methods_take_what_the_hooks_expect() -> None:
    finalize = inspect.unwrap(prefill.PrefillBootstrapQueue.finalize_bootstrap)
    assert list(inspect.signature(finalize).parameters)[:2] == ["self", "req"]
    for queue in (prefill.PrefillBootstrapQueue, decode.DecodePreallocQueue):
        assert hasattr(queue._init_kv_manager, "__wrapped__")


def test_a_server_that_asked_for_the_backend_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang.version, "__version__", "0.9.0")
    monkeypatch.setattr(sys, "argv", ["launch_server", "--disaggregation-transfer-backend", "kvserve"])
    with pytest.raises(SystemExit, match=r"SGLang '0.9.0' is outside the window 0.5.21 to 0.5.23"):
        plugin.register()
    monkeypatch.setattr(sys, "argv", ["launch_server", "--disaggregation-transfer-backend=kvserve"])
    with pytest.raises(SystemExit):
        plugin.register()


def test_any_other_server_goes_on_and_the_reason_is_raised_where_the_backend_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang.version, "__version__", "0.9.0")
    monkeypatch.setattr(sys, "argv", ["launch_server", "--disaggregation-transfer-backend", "nixl"])
    before = list(HookRegistry._hooks[plugin.GET_CLASS])
    plugin.register()
    (added,) = HookRegistry._hooks[plugin.GET_CLASS][len(before) :]
    HookRegistry._hooks[plugin.GET_CLASS][:] = before
    with pytest.raises(PluginError, match=r"0.9.0"):
        added[1](utils.get_kv_class, utils.TransferBackend("kvserve"), utils.KVClassType.MANAGER)


def test_a_sglang_without_what_is_hooked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(prefill.PrefillBootstrapQueue, "finalize_bootstrap")
    monkeypatch.setattr(sys, "argv", ["x", "--disaggregation-transfer-backend", "kvserve"])
    with pytest.raises(SystemExit, match="finalize_bootstrap"):
        plugin.register()


def test_a_hook_that_sglang_did_not_apply_is_refused_when_a_manager_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.check_applied()
    bare = inspect.unwrap(prefill.PrefillBootstrapQueue.finalize_bootstrap)
    monkeypatch.setattr(prefill.PrefillBootstrapQueue, "finalize_bootstrap", bare)
    with pytest.raises(PluginError, match=r"did not apply kvserve's hook of .*finalize_bootstrap"):
        KVServeManager(None, None, None)
    others = _wrap_fn(bare, lambda ready, *args: ready, HookType.AFTER)
    monkeypatch.setattr(prefill.PrefillBootstrapQueue, "finalize_bootstrap", others)
    with pytest.raises(PluginError, match="another plugin"):
        plugin.check_applied()


def test_a_hook_under_another_plugins_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = prefill.PrefillBootstrapQueue.finalize_bootstrap
    above = _wrap_fn(ours, lambda ready, *args: ready, HookType.AFTER)
    monkeypatch.setattr(prefill.PrefillBootstrapQueue, "finalize_bootstrap", above)
    plugin.check_applied()
