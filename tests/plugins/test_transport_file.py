"""The file store: atomic, bounded, shared between processes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvserve_core.errors import FrameError, IntegrityError, LeaseLost, StoreFull, TransferTimeout, TransportError
from kvserve_core.wire import READS, Codebook, pack_header
from kvserve_plugins.transports._folder import TEMP
from kvserve_plugins.transports._host import host_id
from kvserve_plugins.transports.file import File
from plugins.transport_checks import Source, check, fetch_all, same, settle, soon, want


def store(folder: Path, **config: object) -> File:
    return File(File.Config(path=folder, **config))


def age(made: File, key: str, seconds: int) -> None:
    """Pretend that ``key`` was last used ``seconds`` after the epoch."""
    os.utime(made._folder.file(key), (seconds, seconds))


def frame_bytes(tmp_path: Path) -> int:
    probe = store(tmp_path / "probe")
    probe.publish("t", Source(), 5)
    return probe._folder.file("t").stat().st_size


def test_objects_outlive_their_writer_and_keys_name_no_path(tmp_path: Path) -> None:
    first, key = store(tmp_path / "s"), "../../etc/passwd"
    source = Source()
    first.publish(key, source, 5)
    first.close()
    second = store(tmp_path / "s")
    check(list(second.fetch(second.address, key, want(source.plan), soon())), source)
    assert [p.parent for p in tmp_path.rglob("*.kvframe")] == [tmp_path / "s"]


def test_contains_counts_the_leading_keys(tmp_path: Path) -> None:
    made = store(tmp_path)
    for key in ("a", "b", "d"):
        made.publish(key, Source(), 5)
    assert made.contains(["a", "b", "c", "d"]) == 2
    assert made.contains(["x", "a"]) == 0
    assert made.contains([]) == 0
    made.withdraw("a", "damaged")
    assert made.contains(["a", "b"]) == 0


def test_a_pipe_under_a_keys_name_is_no_object_and_nobody_waits_for_it(tmp_path: Path) -> None:
    made = store(tmp_path)
    os.mkfifo(made._folder.file("a"))
    assert made.contains(["a"]) == 0
    with pytest.raises(TransportError, match="is no file; remove it"):
        made.fetch(made.address, "a", want(Source().plan), soon())
    made.publish("a", Source(), 5)
    assert made.contains(["a"]) == 1


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    made = store(tmp_path / "s")
    made.publish("a", Source(), 5)
    shutil.rmtree(tmp_path / "s")
    assert made.contains(["a"]) == 0
    made.publish("b", Source(), 5)
    assert made.contains(["b"]) == 1


def test_the_last_of_two_writers_wins_and_an_open_reader_keeps_its_frame(tmp_path: Path) -> None:
    one, two = store(tmp_path), store(tmp_path)
    old, new = Source(seed=1), Source(seed=2)
    one.publish("t", old, 5)
    reading = iter(two.fetch(two.address, "t", want(old.plan), soon()))
    first = next(reading)
    two.publish("t", new, 5)
    check([first, *reading], old)
    check(fetch_all(one, one.address, new), new)


def test_least_recently_used_objects_leave_first_also_after_a_restart(tmp_path: Path) -> None:
    size = frame_bytes(tmp_path)
    made = store(tmp_path / "s", max_bytes=2 * size + 10)
    made.publish("a", Source(), 5)
    made.publish("b", Source(), 5)
    age(made, "a", 1000)
    age(made, "b", 2000)
    again = store(tmp_path / "s", max_bytes=2 * size + 10)
    fetch = again.fetch(again.address, "a", want(Source().plan), soon())  # a is now the younger
    again.publish("c", Source(), 5)
    assert [again.contains([k]) for k in "abc"] == [1, 0, 1]
    age(again, "a", 1000)
    again.publish("d", Source(), 5)
    assert [again.contains([k]) for k in "acd"] == [0, 1, 1]
    check(list(fetch), Source())  # evicted, and still readable where it was open


def test_an_object_larger_than_the_bound_evicts_nothing(tmp_path: Path) -> None:
    size = frame_bytes(tmp_path)
    made = store(tmp_path / "s", max_bytes=size + 10)
    made.publish("a", Source(), 5)
    with pytest.raises(StoreFull, match="max_bytes"):
        made.publish("b", Source(60), 5)
    assert made.contains(["a"]) == 1
    assert not list((tmp_path / "s").glob(f"{TEMP}*"))


def test_a_full_disk_is_storefull_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = store(tmp_path)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull, match="No space left"):
        made.publish("t", Source(), 5)
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_is_storefull_too(tmp_path: Path) -> None:
    code = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from plugins.transport_checks import Source
from kvserve_core.errors import StoreFull
from kvserve_plugins.transports.file import File
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
made = File(File.Config(path=Path({str(tmp_path)!r})))
try:
    made.publish("t", Source(60), 5)
except StoreFull:
    sys.exit(7)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_nothing_readable_and_its_rest_is_swept(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from plugins.transport_checks import Source
from kvserve_plugins.transports.file import File
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
File(File.Config(path=Path({str(tmp_path)!r}))).publish("t", Source(), 5)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (rest,) = tmp_path.iterdir()
    assert rest.name.startswith(TEMP)
    made = store(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert made.contains(["t"]) == 0
    with pytest.raises(LeaseLost):
        made.fetch(made.address, "t", want(Source().plan), soon())


def test_only_abandoned_temporary_files_are_swept(tmp_path: Path) -> None:
    mine = tmp_path / f"{TEMP}{host_id('pid')}-{os.getpid()}-aa"
    other_new, other_old = tmp_path / f"{TEMP}feedfacefeedface-1-bb", tmp_path / f"{TEMP}feedfacefeedface-1-cc"
    for path in (mine, other_new, other_old):
        path.write_bytes(b"x")
    os.utime(other_old, (1000, 1000))
    store(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, other_new])


@pytest.mark.parametrize("place", [0, 20, -1, -300])
def test_a_damaged_frame_is_removed_when_met(tmp_path: Path, place: int) -> None:
    made = store(tmp_path)
    made.publish("t", Source(), 5)
    path = made._folder.file("t")
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(FrameError):
        made.fetch(made.address, "t", want(Source().plan), soon())
    assert made.contains(["t"]) == 0
    with pytest.raises(LeaseLost):
        made.fetch(made.address, "t", want(Source().plan), soon())


def test_contains_changes_nothing(tmp_path: Path) -> None:
    made = store(tmp_path)
    made.publish("t", Source(), 5)
    age(made, "t", 1000)
    made._folder.file("damaged").write_bytes(b"not a frame")
    assert made.contains(["t", "damaged"]) == 1
    assert made._folder.file("t").stat().st_mtime == 1000
    assert made._folder.file("damaged").exists()


def test_a_frame_of_a_newer_version_is_kept(tmp_path: Path) -> None:
    made = store(tmp_path)
    header = Source().header
    made._folder.file("t").write_bytes(pack_header(header, (READS[1] + 1, 0)) + bytes(4096))
    assert made.contains(["t"]) == 0
    for _ in range(2):
        with pytest.raises(FrameError, match="upgrade the consumer"):
            made.fetch(made.address, "t", want(Source().plan), soon())
    assert made._folder.file("t").exists()


def test_damage_that_cannot_be_removed_is_a_transport_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = store(tmp_path)
    made._folder.file("t").write_bytes(b"not a frame")

    def read_only(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", read_only)
    monkeypatch.setattr(os, "utime", read_only)
    assert made.contains(["t"]) == 0
    with pytest.raises(TransportError, match="is damaged"):
        made.fetch(made.address, "t", want(Source().plan), soon())
    with pytest.raises(TransportError, match="cannot remove"):
        made.withdraw("t", "damaged")
    made.renew(made.address, "t", 5)  # there, whether or not its use can be noted
    with pytest.raises(LeaseLost):
        made.renew(made.address, "other", 5)


def test_what_others_left_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / f"{TEMP}x").write_bytes(b"x")
    (tmp_path / f"{TEMP}feedfacefeedface-1-dd").mkdir()
    (tmp_path / f"{TEMP}{host_id('pid')}-{10**30}-aa").write_bytes(b"no such process")
    size = frame_bytes(tmp_path / "elsewhere")
    (tmp_path / "a.kvframe").mkdir()
    os.utime(tmp_path / "a.kvframe", (1, 1))
    made = store(tmp_path, max_bytes=size + 10)
    made.publish("a", Source(), 5)
    made.publish("b", Source(), 5)
    assert [made.contains([k]) for k in "ab"] == [0, 1]
    assert sum(p.name.startswith(TEMP) for p in tmp_path.iterdir()) == 2


def test_a_key_that_is_no_text_is_refused(tmp_path: Path) -> None:
    made = store(tmp_path)
    for call in (lambda: made.contains(["\ud800"]), lambda: made.withdraw("\ud800", "")):
        with pytest.raises(TransportError, match="Unicode"):
            call()


def test_a_damaged_segment_shows_when_unsealed(tmp_path: Path) -> None:
    made, source = store(tmp_path), Source(1, 4096)
    made.publish("t", source, 5)
    path = made._folder.file("t")
    data = bytearray(path.read_bytes())
    data[data.index(bytes(source.sealed[0].body)) + 1000] ^= 1
    path.write_bytes(data)
    (got,) = fetch_all(made, made.address, source)
    assert not same(got, source.sealed[0])
    with pytest.raises(IntegrityError):
        Codebook(source.header).unseal(got)


def test_a_slow_store_meets_the_deadline(tmp_path: Path) -> None:
    made = store(tmp_path, max_bandwidth="1kB/s")
    source = Source(2, 8000)
    made.publish("t", source, 5)
    with pytest.raises(TransferTimeout, match="'t'"):
        fetch_all(made, made.address, source, seconds=0.1)


def test_a_source_that_is_not_ready_leaves_nothing(tmp_path: Path) -> None:
    made = store(tmp_path)
    with pytest.raises(TransferTimeout):
        made.publish("t", Source(ready=False), 0.05)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_a_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", Path("\0")):
        with pytest.raises(TransportError, match="cannot use"):
            store(path)


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from plugins.transport_checks import Source
from kvserve_plugins.transports.file import File
made = File(File.Config(path=Path({str(tmp_path)!r})))
for n in range(20):
    made.publish(f"k{{n % 5}}", Source(seed=int(sys.argv[1])), 5)
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, str(i)]) for i in (1, 2)]
    made = store(tmp_path)
    settle(lambda: made.contains(["k0"]), 60)
    while any(w.poll() is None for w in writers):
        delivery = made.fetch(made.address, "k0", want(Source().plan), soon())
        book = Codebook(delivery.header)
        assert len([book.unseal(s) for s in delivery]) == 6
    assert [w.wait() for w in writers] == [0, 0]
    assert made.contains([f"k{n}" for n in range(5)]) == 5
