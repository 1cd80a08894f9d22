"""Pictures in files: an old one is whole until the new one is."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import IO

import pytest

from kvserve_core import library_files
from kvserve_core.errors import ConfigError
from kvserve_core.plots import check, save, write

OLD = b"an old picture"


class Plots:
    """Stands in for matplotlib, as figure and canvas too."""

    def __init__(self) -> None:
        self.canvas = self
        self.closed = 0

    def figure(self) -> Plots:
        return self

    def get_supported_filetypes(self) -> dict[str, str]:
        return {"png": "a picture"}

    def savefig(self, buffer: BytesIO, format: str, dpi: int) -> None:
        buffer.write(f"{format} at {dpi}".encode())

    def close(self, figure: Plots) -> None:
        self.closed += 1


@pytest.fixture
def out(tmp_path: Path) -> Path:
    path = tmp_path / "o.png"
    path.write_bytes(OLD)
    return path


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_picture_takes_the_place_of_the_old_one(out: Path) -> None:
    plots = Plots()
    save(plots, plots.figure(), out)
    assert out.read_bytes() == b"png at 120"
    assert list(out.parent.iterdir()) == [out]
    assert plots.closed == 1


def test_on_a_full_disk_the_old_picture_stays(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fdopen

    def small(handle: int, mode: str) -> IO[bytes]:
        file = real(handle, mode)
        monkeypatch.setattr(library_files.os, "fsync", full)
        return file

    monkeypatch.setattr(library_files.os, "fdopen", small)
    plots = Plots()
    with pytest.raises(ConfigError, match=r"o\.png: cannot be written: No space left on device$"):
        save(plots, plots.figure(), out)
    assert out.read_bytes() == OLD
    assert list(out.parent.iterdir()) == [out]


def test_a_link_keeps_pointing_where_it_did(out: Path) -> None:
    link = out.with_name("link.png")
    link.symlink_to(out)
    check(Plots(), link)
    write(link, b"new")
    assert link.is_symlink()
    assert out.read_bytes() == b"new"


def test_what_is_no_file_is_written_to_and_not_replaced() -> None:
    reader, writer = os.pipe()
    try:
        write(Path(f"/dev/fd/{writer}"), b"new")
        assert os.read(reader, 99) == b"new"
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("name", ["no/o.png", "o" * 300 + ".png", "o\0.png"])
def test_a_name_that_no_file_can_have_is_said(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: "):
        write(tmp_path / name, b"new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("denied", "message"),
    [(lambda out: out, "permission denied$"), (lambda out: out.parent, "permission denied in the folder ")],
)
def test_a_folder_or_picture_that_is_not_to_be_changed_is_found_out_before(
    denied: Callable[[Path], Path], message: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(Plots(), out)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != denied(out))  # root may write everywhere
    with pytest.raises(ConfigError, match=message):
        check(Plots(), out)
