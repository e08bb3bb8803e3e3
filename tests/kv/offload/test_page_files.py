"""Page files appear whole, are checked, and are removed, also if they are damaged or their writer dies."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvant.errors import NotServable
from kvant.kv.identity import SCHEME, PageIdentity
from kvant.kv.offload.files import FileQueue
from kvant.kv.offload.moves import Bell, Key
from kvant.kv.offload.page_files import BadPage, PageFiles, checksum
from kvant.kv.pages import CacheIdentity, page_hash, root_hash

IDENTITY = PageIdentity("w", "stored", "f", "s", "r", "l", "none", "")
DATA = bytes(range(256)) * 4


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def write(files: PageFiles, number: int, data: bytes = DATA) -> None:
    files.write(0, digest(number), memoryview(data), checksum(memoryview(data)))


def read(files: PageFiles, number: int) -> bytes:
    into = bytearray(len(DATA))
    files.read(0, digest(number), memoryview(into))
    return bytes(into)


@pytest.fixture
def files(tmp_path: Path) -> PageFiles:
    return PageFiles(tmp_path, IDENTITY, 1 << 20)


def test_a_page_comes_back_as_it_was_written(files: PageFiles) -> None:
    write(files, 1)
    assert read(files, 1) == DATA
    with pytest.raises(FileNotFoundError):
        read(files, 2)


def test_a_later_version_finds_the_files_of_this_one(tmp_path: Path) -> None:
    """If the name or the bytes of a file change, `kvant.kv.identity.SCHEME` must change, too."""
    assert SCHEME == 1
    files = PageFiles(tmp_path, replace(IDENTITY, byte_order="little"), 1 << 20)
    root = root_hash(CacheIdentity("model", None, "plan"), salt="salt")
    name = page_hash(page_hash(root, range(16)), range(16, 32))
    files.write(0, name, memoryview(DATA), checksum(memoryview(DATA)))
    path = files.path(0, name)
    assert str(path.relative_to(tmp_path)) == (
        "8e208e1dd61ab07f375d36f882ca4cda/a7/"
        "a7454950a5dc304087a89a6774ed600225319e3f12f4976d2b8931896035fbf9.0"
    )
    assert hashlib.sha256(path.read_bytes()).hexdigest() == (
        "d783b0a744fa3cc0e3b0287f4408ab703b6cf00a7628ef39ad149c323c3b49d3"
    )


def test_writers_of_one_number_do_not_share_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers may each have a process 1. One writes the same page while the other one does."""
    one, two = (PageFiles(tmp_path, IDENTITY, 1 << 20) for _ in range(2))
    replace_file = os.replace

    def late(*paths: Path) -> None:
        monkeypatch.setattr(os, "replace", replace_file)
        write(two, 1)
        replace_file(*paths)

    monkeypatch.setattr(os, "replace", late)
    write(one, 1)
    assert read(one, 1) == DATA


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_no_damage_goes_unnoticed(files: PageFiles, data: st.DataObject) -> None:
    write(files, 1)
    path = files.path(0, digest(1))
    whole = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "swap"]))
    if kind == "flip":
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    elif kind == "longer":
        whole += b"x" * data.draw(st.integers(1, 9))
    else:  # the whole file of another page under this name
        write(files, 2, DATA[::-1])
        whole = bytearray(files.path(0, digest(2)).read_bytes())
    path.write_bytes(whole)
    with pytest.raises(BadPage):
        read(files, 1)


@pytest.mark.parametrize("field", [name for name in PageIdentity.__slots__])
def test_a_page_of_another_identity_is_not_found(tmp_path: Path, field: str) -> None:
    one = PageFiles(tmp_path, IDENTITY, 1 << 20)
    write(one, 1)
    other = replace(IDENTITY, **{field: "another"})
    with pytest.raises(FileNotFoundError):
        read(PageFiles(tmp_path, other, 1 << 20), 1)
    assert (IDENTITY.difference(other.fields) or "").startswith(f"{field} is another, here it is")
    # Even under its directory, the header tells.
    moved = PageFiles(tmp_path, other, 1 << 20)
    moved.path(0, digest(1)).parent.mkdir(exist_ok=True)
    os.replace(one.path(0, digest(1)), moved.path(0, digest(1)))
    with pytest.raises(BadPage):
        read(moved, 1)


def test_pages_that_were_not_used_longest_give_way_and_pinned_ones_stay(tmp_path: Path) -> None:
    each = 128 + len(DATA)
    files = PageFiles(tmp_path, IDENTITY, 10 * each, pinned=lambda _: {f"{digest(0).hex()}.0"})
    for number in range(16):
        write(files, number)
        os.utime(files.path(0, digest(number)), (number, number))
    files.touch([files.path(0, digest(1)), files.path(0, digest(2))])
    trimmed = files.trim()
    assert trimmed is not None
    left, removed = trimmed
    assert left <= 10 * each
    assert len(removed) == 7
    kept = {n for n in range(16) if files.path(0, digest(n)).exists()}
    assert kept == {0, 1, 2, 10, 11, 12, 13, 14, 15}


def test_two_processes_never_remove_files_at_once(tmp_path: Path) -> None:
    first, second = (PageFiles(tmp_path, IDENTITY, 1) for _ in range(2))
    write(first, 1)
    with first.locked():
        assert second.trim() is None
    assert second.trim() is not None


_WRITER = """
import sys
from pathlib import Path
from tests.kv.offload.test_page_files import IDENTITY, PageFiles, write
files = PageFiles(Path(sys.argv[1]), IDENTITY, 1 << 30)
number = 0
while True:
    write(files, number)
    number += 1
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_whole_pages_and_no_lock(tmp_path: Path) -> None:
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(20):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
    files = PageFiles(tmp_path, IDENTITY, 1 << 30)
    names = [path for path in files.home.rglob("*.0") if not path.name.startswith(".")]
    assert len(names) >= 20
    for path in names:
        assert read(files, int(path.name.split(".")[0], 16)) == DATA
    assert files.trim() is not None, "its lock ended with it"
    unfinished = files.home / "00" / ".new-1-1"
    unfinished.write_bytes(b"half a page")
    assert not any(".new-" in found.path for found in files.scan())
    assert unfinished.exists(), "its writer may still live"
    os.utime(unfinished, (1, 1))
    list(files.scan())
    assert not unfinished.exists()


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotServable, match="pages cannot be kept"):
        PageFiles(tmp_path / "file" / "below", IDENTITY, 1 << 20)


# -- the queue ---------------------------------------------------------------------------------


def settled(queue: FileQueue) -> list[tuple[Key, bool]]:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        found = queue.take_written()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("nothing was written")


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_after_a_failed_write_none_is_tried_for_a_while(
    files: PageFiles, fault: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key, row = Key(0, digest(1)), memoryview(DATA)
    queue = FileQueue(files, Bell(), lambda group, page: row)
    real = os.replace

    def failing(source: object, target: object) -> None:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr("kvant.kv.offload.page_files.os.replace", failing)
    assert queue.takes_writes
    queue.write([(key, 1, checksum(row))])
    assert settled(queue) == [(key, False)]
    assert not queue.takes_writes
    queue.write([(key, 1, checksum(row))])
    assert settled(queue) == [(key, False)]
    assert [os.strerror(fault) in r.message for r in caplog.records] == [True], "told once"
    assert not list(files.home.rglob(".new-*")), "nothing half written stays"
    monkeypatch.setattr("kvant.kv.offload.page_files.os.replace", real)
    queue._paused_until = 0.0
    queue.write([(key, 1, checksum(row))])
    assert settled(queue) == [(key, True)]
    assert read(files, 1) == DATA


def test_a_slow_disk_takes_no_more_than_a_bounded_queue(
    files: PageFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvant.kv.offload.files.MOST_WRITING", 4 * len(DATA))
    row, taken = memoryview(DATA), 0
    queue = FileQueue(files, Bell(), lambda group, page: row)
    write_page = PageFiles.write

    def slow(*given: object) -> int:
        time.sleep(0.2)
        return write_page(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(PageFiles, "write", slow)
    while queue.takes_writes:
        queue.write([(Key(0, digest(taken)), 1, checksum(row))])
        taken += 1
    assert taken == 4
    assert settled(queue)
    assert queue.takes_writes
