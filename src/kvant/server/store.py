"""Stores responses that later requests can read and continue, up to a number and a size."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvant.server.api_error import ApiError


@dataclass(slots=True)
class Stored:
    """One stored response. owner: the API key that may read it. answer, items: as JSON. messages: the whole
    conversation including the answer, as JSON. task: computes it in the background, None if it has ended.
    """

    owner: str
    answer: bytes
    items: bytes
    messages: bytes = b"[]"
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return len(self.answer) + len(self.items) + len(self.messages)

    def conversation(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = msgspec.json.decode(self.messages)
        return found


class ResponseStore:
    """Keeps the most recently used responses. most: number of responses. most_bytes: bytes of their JSON."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    @property
    def is_on(self) -> bool:
        return self._most > 0

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def put(self, id: str, stored: Stored) -> None:
        """Stores or replaces a response, and drops the least recently used ones beyond the limits."""
        self._take_out(id)
        self._stored[id] = stored
        self._bytes += stored.size
        while len(self._stored) > self._most or self._bytes > self._most_bytes:
            oldest = next(iter(self._stored))
            self._end(self._take_out(oldest))

    def get(self, id: str, owner: str, param: str | None = None) -> Stored:
        """Returns a response. Raises ApiError 404 if it is not stored or another key owns it."""
        found = self._stored.get(id)
        if found is None or found.owner != owner:
            raise ApiError(
                404,
                "no response of this id is stored here; the server keeps a bounded number of them "
                "(--max-stored-responses, --max-stored-bytes)",
                param=param,
                code="response_not_found",
            )
        self._stored.move_to_end(id)
        return found

    def holds(self, id: str) -> bool:
        return id in self._stored

    def delete(self, id: str, owner: str) -> None:
        """Deletes a response and cancels its task. Raises ApiError 404 like `get`."""
        self.get(id, owner)
        self._end(self._take_out(id))

    def end_all(self) -> Sequence[asyncio.Task[None]]:
        """Cancels all background tasks. Returns the tasks to wait for."""
        found = [one.task for one in self._stored.values() if one.task is not None]
        for one in self._stored.values():
            self._end(one)
        return found

    def _take_out(self, id: str) -> Stored | None:
        found = self._stored.pop(id, None)
        if found is not None:
            self._bytes -= found.size
        return found

    def _end(self, stored: Stored | None) -> None:
        if stored is not None and stored.task is not None:
            stored.task.cancel()
