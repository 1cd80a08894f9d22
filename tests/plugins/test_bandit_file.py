"""A bandit's state from a file that somebody else wrote, and in a place that is no file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kvserve_plugins.policies import _bandit_file
from kvserve_plugins.policies._arms import Memory


def dumped() -> dict[str, Any]:
    memory = Memory(16, 300.0)
    place, arm = memory.arm(("default", 0.99, "raw"), "c1", 10.0)
    place.outcomes += 1
    arm.learn(1 << 20, 0.01, 0.1, 0.2, place.outcomes, 10.0)
    (found,) = memory.dump(11.0)
    return found


def load(path: Path, place: dict[str, Any]) -> bool:
    path.write_text(json.dumps({"version": _bandit_file.VERSION, "library": "l", "places": [place]}))
    return _bandit_file.load(path, "l", Memory(16, 300.0), 0.0)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    assert load(tmp_path / "s.json", dumped())


@pytest.mark.parametrize(
    ("key", "value"),
    [("outcomes", 10**30), ("outcomes", -1), ("decisions", -1_000_000), ("age_s", float("nan")), ("age_s", -1e29)],
)
def test_a_place_with_absurd_figures_is_a_cold_start(
    tmp_path: Path, key: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    assert not load(tmp_path / "s.json", dumped() | {key: value})
    assert "starts without" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"), [("seen", -0.001), ("count", -1.0), ("until_s", 1e29), ("until_s", -1.0), ("deviation", -0.1)]
)
def test_an_arm_with_absurd_figures_is_a_cold_start(tmp_path: Path, key: str, value: float) -> None:
    place = dumped()
    place["arms"]["c1"][key] = value
    assert not load(tmp_path / "s.json", place)


def test_a_floor_that_is_no_number_is_a_cold_start(tmp_path: Path) -> None:
    assert not load(tmp_path / "s.json", dumped() | {"bucket": ["default", float("nan"), "raw"]})


def test_what_is_no_regular_file_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert not _bandit_file.load(fifo, "l", Memory(16, 300.0), 0.0)
    with pytest.raises(OSError, match="no regular file"):
        _bandit_file.write(fifo, "l", [])
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_link_keeps_pointing_where_it_did(tmp_path: Path) -> None:
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_text("{}")
    link.symlink_to(target)
    _bandit_file.write(link, "l", [])
    assert link.is_symlink()
    assert json.loads(target.read_text())["version"] == _bandit_file.VERSION


def test_links_that_lead_in_a_circle_are_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)
    assert not _bandit_file.load(one, "l", Memory(16, 300.0), 0.0)
    assert "is no regular file; name another one in 'state'" in caplog.text
    with pytest.raises(OSError, match="no regular file"):
        _bandit_file.write(one, "l", [])
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_symlink()) == ["one", "other"]


def test_what_is_written_can_be_read_whatever_the_names(tmp_path: Path) -> None:
    names = ["\u6f22" * 1000, '"\\', "\udc80", "\U0001f600"]
    memory = Memory(16, 300.0)
    _bandit_file.write(tmp_path / "s", "l", [dumped() | {"bucket": [name, 0.9, "p"]} for name in names])
    assert _bandit_file.load(tmp_path / "s", "l", memory, 0.0)
    assert {bucket[0] for bucket in memory.places} == set(names)


def test_no_more_is_written_than_is_read_and_what_was_longest_unused_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [dumped() | {"bucket": ["w", 0.9, f"p{i}"], "age_s": float(i)} for i in range(20)]
    whole = tmp_path / "whole"
    _bandit_file.write(whole, "l", places[:5])
    monkeypatch.setattr(_bandit_file, "MAX_FILE_BYTES", whole.stat().st_size)
    _bandit_file.write(tmp_path / "s", "l", places[::-1])
    memory = Memory(64, 300.0)
    assert _bandit_file.load(tmp_path / "s", "l", memory, 0.0)
    assert {bucket[2] for bucket in memory.places} == {f"p{i}" for i in range(5)}


def test_more_places_than_there_is_room_for_go_oldest_first() -> None:
    memory = Memory(64, 1e9)
    memory.restore([dumped() | {"bucket": ["w", 0.9, f"p{i}"], "age_s": float(i)} for i in range(3000)], 1e6)
    assert set(memory.places) == {("w", 0.9, f"p{i}") for i in range(64)}
