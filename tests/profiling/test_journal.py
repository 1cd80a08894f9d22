from __future__ import annotations

from pathlib import Path

import pytest

from kvserve_core.errors import ConfigError
from kvserve_core.profiling.journal import Journal
from kvserve_core.profiling.point import Estimate
from profiling_cases import measurement, pool

ABOUT = {"model": "m", "texts": (1, 2)}


def opened(path: Path, space: str = "s", seed: int = 1, **about: object) -> Journal:
    return Journal(path, space, seed, ABOUT | about)


def filled(path: Path) -> None:
    with opened(path) as journal:
        for p in pool()[:3]:
            journal.estimated(Estimate(p.key, 3.0))
        for p in pool()[:3]:
            journal.measured(measurement(p))


def test_what_was_kept_is_there_again(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    with opened(tmp_path / "j") as journal:
        assert [e.cr for e in journal.estimates.values()] == [3.0] * 3
        assert journal.measurements == {p.key: measurement(p) for p in pool()[:3]}


def test_cut_at_any_byte_it_goes_on_from_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    filled(path)
    data = path.read_bytes()
    ends = {i for i, byte in enumerate(data) if byte == ord("\n")}
    near_ends = {cut for end in ends for cut in (end - 1, end, end + 1)}
    for cut in sorted(near_ends | set(range(0, len(data), 23))):
        path.write_bytes(data[:cut])
        whole = data[:cut].count(b"\n")
        with opened(path) as journal:
            assert len(journal.estimates) + len(journal.measurements) == max(whole - 1, 0)
            journal.measured(measurement(pool()[5]))
        lines = path.read_bytes().splitlines(keepends=True)
        assert b"".join(lines[:-1]) == b"".join(data.splitlines(keepends=True)[: max(whole, 1)])


def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path: Path) -> None:
    for text in (b"my notes", b"my notes\nmore"):
        (tmp_path / "notes").write_bytes(text)
        with pytest.raises(ConfigError, match=r"notes: (is not a journal|line 1 of the journal is damaged)"):
            opened(tmp_path / "notes")
        assert (tmp_path / "notes").read_bytes() == text


@pytest.mark.parametrize(
    ("change", "name"), [({"space": "t"}, "space"), ({"seed": 2}, "seed"), ({"model": "n"}, "about")]
)
def test_a_journal_of_another_search_is_refused_and_left_as_it_is(
    change: dict[str, object], name: str, tmp_path: Path
) -> None:
    path = tmp_path / "j"
    filled(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"of another search: its '{name}' is") as refused:
        opened(path, **change)  # type: ignore[arg-type]  # one of them at a time
    assert "texts" not in str(refused.value)  # which are the same
    assert path.read_bytes() == before


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "j"
    filled(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"{}\n", *lines[2:]]))
    with pytest.raises(ConfigError, match="line 3 of the journal is damaged"):
        opened(path)
    path.write_bytes(b"".join(lines[1:]))
    with pytest.raises(ConfigError, match="is not a journal of version 1"):
        opened(path)


def test_two_searches_do_not_write_one_journal(tmp_path: Path) -> None:
    with opened(tmp_path / "j"), pytest.raises(ConfigError, match="another search is writing this journal"):
        opened(tmp_path / "j")


def test_where_it_cannot_be_written_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the journal cannot be used"):
        opened(tmp_path / "absent" / "j")
