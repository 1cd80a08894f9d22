"""``kvserve probe``, with real transports on both sides."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvserve_core.cli import main
from kvserve_core.errors import LeaseLost
from kvserve_core.probing import KEY, MAX_BYTES, ProbeSource, measure
from kvserve_plugins.transports.file import File
from kvserve_plugins.transports.tcp import Tcp

MIB = 2**20
INTERRUPTIBLE = """import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that runs in the background ignores it
from kvserve_core.cli import main
main(sys.argv[1:])
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["probe", *arguments])
    except SystemExit as error:
        code = int(error.code or 0)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@contextmanager
def offered(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The other side in a process of its own: its address, and the process."""
    command = [sys.executable, "-c", INTERRUPTIBLE, "probe", "--json", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(4)]
            yield json.loads("".join(lines))["address"], process
        finally:
            process.kill()


def test_a_link_is_measured_between_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with offered("--bytes", "3MiB") as (address, process):
        code, out, _ = run(capsys, address, "--rounds", "3", "--json")
        found = json.loads(out)
        assert code == 0
        assert found["address"] == address
        assert len(found["each"]) == 3
        assert min(found["each"]) * 0.9 <= found["bytes_per_s"] <= max(found["each"]) * 1.1, found
        assert re.match(r"[\d.]+ [GM]bps \(fetches from ", run(capsys, address)[1])
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "stopped\n")
    code, _, err = run(capsys, address, "--deadline", "2s")
    assert (code, err.count("\n")) == (2, 1), "nobody offers it any more"


def test_what_was_offered_in_a_store_is_removed_in_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text(f'[transport]\nname = "file"\n[transport.file]\npath = "{tmp_path}/kv"\n')
    code, out, _ = run(capsys, "--for", "10ms", "--bytes", "1", "--config", str(tmp_path / "c.toml"))
    assert (code, out) == (0, f"on the other machine run: kvserve probe 'file://{tmp_path}/kv'\n")
    assert list((tmp_path / "kv").rglob("*.kv*")) == []


def test_a_slow_link_is_seen_to_be_slow(tmp_path: Path) -> None:
    slow = File(File.Config(path=tmp_path, max_bandwidth=50e6))
    slow.publish(KEY, ProbeSource(5 * MIB + 1), 60.0)
    estimate, each = measure(slow, slow.address, 3, 60.0)
    assert len(each) == 3
    assert 1e6 < estimate < 60e6


def test_random_bytes_of_whole_segments_are_offered() -> None:
    source = ProbeSource(2 * MIB + 1)
    assert (source.header.num_segments, source.header.raw_bytes) == (3, 3 * MIB)
    assert [source.get(i, 0.0).index for i in range(3)] == [0, 1, 2]
    assert len(ProbeSource(MAX_BYTES // 2**8).plan) == 4


def test_nothing_offered_is_an_error() -> None:
    transport = Tcp(Tcp.Config())
    try:
        address = transport.address
        with pytest.raises(LeaseLost):
            measure(transport, address, 1, 5.0)
    finally:
        transport.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bytes", "2GiB"], r"bytes: 2 GiB cannot be offered; give from 1 byte to 1 GiB"),
        (["--bytes", "0"], r"bytes: 0 B cannot be offered"),
        (["carrier://pigeon"], r"transport.carrier: unknown transport 'carrier'"),
        (["tcp://127.0.0.1:1", "--deadline", "1s"], r"nothing listens there"),
        (["--for", "soon"], r"duration 'soon' is not understood"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err)
    assert os.environ.get("KVSERVE_TRACEBACK") is None
