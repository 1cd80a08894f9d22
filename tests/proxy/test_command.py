from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kvserve_core.cli import main
from proxy_stand import Engine, Served, wait_until

SERVERS = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["vllm-proxy", *arguments])
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prefill", "10.0.0.5:8000", "--decode", "http://d"), "prefill: '10.0.0.5:8000' is not the URL of a server"),
        (("--prefill", "http://p", "--decode", "http://d/?a=1"), "decode: "),
        (("--prefill", "http://user:secret@p", "--decode", "http://d"), "prefill: a URL with a user name or password"),
        (
            ("--prefill", "http://p:99999", "--decode", "http://d"),
            "'http://p:99999' is not the URL of a server",
        ),
        (("--prefill", "http://a b/", "--decode", "http://d"), "'http://a b/' is not the URL of a server"),
        (("--prefill", "http://[::1", "--decode", "http://d"), "'http://[::1' is not the URL of a server"),
        (("--prefill", "http://h:9\r\nx:", "--decode", "http://d"), "is not the URL of a server"),
        ((*SERVERS, "--prefill-timeout", "soon"), "prefill-timeout: duration 'soon' is not understood"),
        ((*SERVERS, "--health-interval", "0s"), "health-interval: '0s' must be above 0"),
        ((*SERVERS, "--max-body", "much"), "max-body: "),
        ((*SERVERS, "--max-body", "0"), "max-body: '0' must be above 0"),
        ((*SERVERS, "--api-key-file", "/nowhere/key"), "api-key-file: '/nowhere/key' cannot be read"),
        ((*SERVERS, "--api-key-file", "/dev/null"), "api-key-file: '/dev/null' holds no key; expected one word"),
        ((*SERVERS, "--log-level", "loud"), "log-level: 'loud' is no log level"),
        ((*SERVERS, "--config", "/nowhere/kv.toml"), "cannot be read"),
        ((*SERVERS, "--min-quality", "2"), "--min-quality"),
        (("--prefill", "http://p"), "--decode"),
    ],
)
def test_wrong_arguments_are_named(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str) -> None:
    assert says in error(capsys, *arguments)


def test_it_serves_with_the_floor_of_the_settings_until_it_is_told_to_stop(tmp_path: Path) -> None:
    (tmp_path / "kv.toml").write_text("min_quality = 0.75\nclassifier = 'rules'\n")
    prefill, decode = Engine(), Engine()
    engines = [Served(engine.app) for engine in (prefill, decode)]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ["--prefill", engines[0].url, "--decode", engines[1].url, "--port", str(port), "--config", "kv.toml"]
    command = [sys.executable, "-m", "kvserve_core.cli", "vllm-proxy", *options]
    paths = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: _answers(url), 60)
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "Write a function."}, trust_env=False)
            assert answer.json()["choices"][0]["text"] == "remote"
        finally:
            process.send_signal(signal.SIGTERM)
            for engine in engines:
                engine.stop()
    assert process.returncode in (0, -signal.SIGTERM)
    asked = prefill.seen[0]["kv_transfer_params"]["kvserve"]
    assert (asked["min_quality"], asked["workload"]) == (0.75, "code")
    assert decode.seen[0]["cache_salt"] == "kvserve-q0.75"


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.ConnectError:
        return False
