"""Only the owner can reach the engine's socket, and its directory is removed at the end."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from kvant.server.socket_directory import SocketDirectory


@pytest.fixture(autouse=True)
def _own_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_only_its_owner_can_enter_it_and_it_goes_with_its_server(tmp_path: Path) -> None:
    directory = SocketDirectory()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    directory.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_next_server_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    killed = SocketDirectory()
    killed._lock.close()  # as the system does for a killed process
    (killed.path / "engine-0").touch()
    next_one = SocketDirectory()
    assert not killed.path.exists()
    next_one.remove()


def test_what_lives_or_is_not_ours_stays(tmp_path: Path) -> None:
    alive = SocketDirectory()
    other = tmp_path / "kvant-serve-notes"
    other.mkdir()
    (other / "notes").touch()
    SocketDirectory().remove()
    assert alive.path.exists()
    assert (other / "notes").exists()
    alive.remove()
