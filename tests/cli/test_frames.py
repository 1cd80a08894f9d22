from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frame_cases import REGIONS, make_file, make_header
from kvserve_core.container import FrameReader
from kvserve_core.wire import Segment

Run = Callable[..., Any]
META = b"\x92\x91\x90\x91\x97\x10\xcd\x01\x00\x01\x01\x10\xc2\xc0"  # no parameters, one stream of 16 bytes


@pytest.fixture
def frame(tmp_path: Path) -> Path:
    path = tmp_path / "frame.kv"
    path.write_bytes(make_file(make_header(), [Segment(i, at, 0, META, bytes(64)) for i, at in enumerate(REGIONS)]))
    return path


def damage(frame: Path) -> None:
    data = bytearray(frame.read_bytes())
    with FrameReader(bytes(data)) as reader:
        data[reader.entries[1].offset + 64] ^= 1
    frame.write_bytes(data)


def test_a_summary(kvserve: Run, frame: Path) -> None:
    done = kvserve("inspect", str(frame), "--json")
    assert done.code == 0
    assert (done.json["transfer_id"], done.json["segments"], done.json["bad_segments"]) == ("request-1", 3, [])
    text = kvserve("inspect", str(frame)).out
    assert "request-1" in text
    assert "quantizer:identity@1 > codec:raw@1" in text
    assert "plane v" not in text


def test_one_row_per_segment_on_request(kvserve: Run, frame: Path) -> None:
    assert "plane v layers 0 heads 0-1 tokens 0-4" in kvserve("inspect", str(frame), "--segments").out
    rows = kvserve("inspect", str(frame), "--segments", "--json").json["segments"]
    assert [row["ok"] for row in rows] == [True] * 3


def test_a_changed_byte_is_a_failed_check_that_names_its_segment(kvserve: Run, frame: Path) -> None:
    damage(frame)
    done = kvserve("inspect", str(frame), "--json")
    assert done.code == 1
    assert [row["index"] for row in done.json["bad_segments"]] == [1]
    assert "digest mismatch" in kvserve("inspect", str(frame)).out


def test_what_is_no_frame_is_an_error(kvserve: Run, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("not a frame" * 100, encoding="utf-8")
    assert kvserve("inspect", str(path)).code == 2
    done = kvserve("inspect", str(tmp_path / "absent"))
    assert (done.code, "absent' cannot be read: No such file" in done.err) == (2, True)
    assert kvserve("inspect", str(tmp_path)).code == 2
