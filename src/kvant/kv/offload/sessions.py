"""Conversations that are kept: their tokens, and the names of page files that may not be removed.

    DIRECTORY/sessions/<owner>/<id>.json

A session holds no pages itself. It pins the page files of its tokens, which any engine of the same identity
finds by their hashes. What decides the names of pages is known outside of the engine, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvant.kv.groups import STATES
from kvant.kv.offload.page_files import PageFiles
from kvant.kv.pages import CacheIdentity, page_hash, root_hash

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of sessions."""


class Session(msgspec.Struct, kw_only=True):
    """saved: seconds since 1970. saved_tokens: the first ones, whose pages are in files. pages: their names.

    identity: of the pages. messages: the conversation, as the client gave it.
    """

    id: str
    saved: float
    token_ids: list[int]
    saved_tokens: int
    pages: list[str]
    identity: dict[str, str]
    messages: list[Any] = msgspec.field(default_factory=list)


class ForeignSession(Exception):
    """A session of another model, format or arithmetic; the text names the first field that differs."""


class SessionFiles:
    """Sessions beside the page files of one identity.

    windows: tokens that each group of pages keeps, that of states last (`SharedPages.every_window`).
    others: files of the other ranks, with their parts of each page under the same names.
    """

    def __init__(
        self, files: PageFiles, windows: Sequence[int | None], page_size: int,
        others: Sequence[PageFiles] = (),
    ) -> None:  # fmt: skip
        self._files, self._windows, self._page_size = files, tuple(windows), page_size
        self._parts = (files, *others)
        self._home = files.directory / "sessions"

    def hashes(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Hashes of all full pages of these tokens."""
        identity = CacheIdentity("pages", None, self._files.identity.digest.hex())
        digest, size = root_hash(identity, salt=salt), self._page_size
        found = []
        for start in range(0, len(token_ids) - size + 1, size):
            digest = page_hash(digest, token_ids[start : start + size])
            found.append(digest)
        return found

    def count_saved(self, hashes: Sequence[bytes]) -> int:
        """Pages of the longest prefix that files hold as far as the next token reads it."""
        full = [g for g, window in enumerate(self._windows) if window is None]
        count = next(
            (
                i
                for i, digest in enumerate(hashes)
                if not all(self._is_there(g, digest) for g in full)
            ),
            len(hashes),
        )
        while count and not all(
            self._is_there(g, digest)
            for g, window in enumerate(self._windows)
            if window is not None
            for digest in hashes[self._first_read(count, window) : count]
        ):
            count -= 1
        return count

    def save(
        self, id: str, owner: str, token_ids: Sequence[int], salt: str, messages: Sequence[Any] = ()
    ) -> Session:
        """Keeps a session and pins the files of its pages, as far as there are some. Raises OSError."""
        hashes = self.hashes(token_ids, salt)
        with self._files.locked():  # nothing is removed before the session names it
            count = self.count_saved(hashes)
            names = [
                path.name
                for digest in hashes[:count]
                for group in range(len(self._windows))
                if (path := self._files.path(group, digest)).exists()
            ]
            session = Session(
                id=id,
                saved=time.time(),
                token_ids=list(token_ids),
                saved_tokens=count * self._page_size,
                pages=names,
                identity=self._files.identity.fields,
                messages=list(messages),
            )
            path = self._path(id, owner)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files.write_whole(path, msgspec.json.encode(session), durable=True)
        return session

    def read(self, id: str, owner: str) -> Session:
        """Raises FileNotFoundError, and ForeignSession if its pages are not this engine's."""
        session = _read(self._path(id, owner))
        if session is None:
            raise FileNotFoundError(id)
        difference = self._files.identity.difference(session.identity)
        if difference is not None:
            raise ForeignSession(difference)
        return session

    def list(self, owner: str) -> list[Session]:
        """Returns all sessions of an owner, of any identity, the newest first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self._path("x", owner).parent.glob("*.json"):
                session = _read(path)
                if session is not None:
                    found.append(session)
        return sorted(found, key=lambda session: -session.saved)

    def delete(self, id: str, owner: str) -> None:
        """Forgets a session; its pages may be removed from now on. Raises FileNotFoundError."""
        self._path(id, owner).unlink()

    def _first_read(self, count: int, window: int) -> int:
        """Returns the first page of a group with a window that the token behind `count` pages reads."""
        if window == STATES:
            return count - 1  # a state is kept with the last page before it
        return max(0, count * self._page_size - window + 1) // self._page_size

    def _path(self, id: str, owner: str) -> Path:
        if not ID.fullmatch(id):
            raise FileNotFoundError(id)
        return self._home / hashlib.sha256(owner.encode()).hexdigest()[:32] / f"{id}.json"

    def _is_there(self, group: int, digest: bytes) -> bool:
        return all(os.path.exists(files.path(group, digest)) for files in self._parts)


def pinned_names(directory: Path) -> set[str]:
    """Names of the page files that sessions in a directory pin."""
    found: set[str] = set()
    for path in (directory / "sessions").glob("*/*.json"):
        session = _read(path)
        if session is not None:
            found.update(session.pages)
    return found


def _read(path: Path) -> Session | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Session)
    except (OSError, msgspec.MsgspecError):
        return None
