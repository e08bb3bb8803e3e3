"""What travels between a front and replicas, and what decides where a request goes; without Ray."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import msgspec
import xxhash

BLOCK_BYTES = 256
"""Bytes of a conversation's JSON that are compared as one: about 60 tokens."""
MOST_BLOCKS = 2048


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request. prefer: the replica that should answer it. avoid: replicas that come last."""

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    prefer: str | None = None
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Taken:
    """The first part of every answer: which replica has the request."""

    replica: str


@dataclass(frozen=True, slots=True)
class Head:
    """The second part; bytes of the body follow."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]

    def get(self, name: bytes) -> bytes:
        return next((value for found, value in self.headers if found.lower() == name), b"")

    @property
    def is_stream(self) -> bool:
        return self.get(b"content-type").startswith(b"text/event-stream")


class ReplicaLost(Exception):
    """A replica ended, or cannot be reached, before its answer was complete.

    replica: which one, None if none had the request.
    """

    def __init__(self, message: str, replica: str | None = None) -> None:
        super().__init__(message)
        self.replica = replica


Part: TypeAlias = Taken | Head | bytes
Ask: TypeAlias = Callable[[Asked], AsyncGenerator[Part, None]]
"""Yields Taken, Head, then the body as it comes. Raises ReplicaLost. Closing it cancels the request."""


class Verdict(Enum):
    PASS = "the client gets this answer"
    RETRY = "the replica cannot answer now: another one may, or this one later"
    NEXT = "each other replica is asked once"


_RETRIED = frozenset(
    {"draining", "shutting_down", "engine_died", "engine_restarting", "engine_starting",
     "engine_stopped", "template_process"}
)  # fmt: skip
_ASKED_AROUND = frozenset({"server_full", "response_not_found", "session_not_found"})


def verdict(head: Head, body: bytes) -> Verdict:
    """What to do with a whole answer of which the client has seen nothing."""
    if head.status not in (404, 429, 503):
        return Verdict.PASS
    try:
        error = msgspec.json.decode(body)["error"]
        # Anthropic's errors have no code; their statuses say enough.
        code = error.get("code") or {429: "server_full", 503: "engine_died"}.get(head.status)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return Verdict.PASS
    if code in _RETRIED:
        return Verdict.RETRY
    return Verdict.NEXT if code in _ASKED_AROUND else Verdict.PASS


_OPENING = ("cache_salt", "tools", "system", "instructions")
_TALK = ("messages", "input", "prompt")


def prefix_keys(body: bytes, api_key: str | None) -> tuple[int, ...]:
    """Hashes of the conversation's beginnings, shortest first; each stands for BLOCK_BYTES more.

    Requests with a common beginning share the first hashes. Empty for anything that is not a conversation.
    """
    try:
        given: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return ()
    if not isinstance(given, dict):
        return ()
    parts = [given[name] for name in (*_OPENING, *_TALK) if given.get(name) is not None]
    data = msgspec.json.encode([api_key, *parts])
    keys, seed = [], 0
    for start in range(0, min(len(data), MOST_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        seed = xxhash.xxh3_64_intdigest(data[start : start + BLOCK_BYTES], seed)
        keys.append(seed)
    return tuple(keys)


class Affinity:
    """Which replica saw a beginning last, and how many requests each has now.

    most: hashes that are remembered. ahead: requests by which a replica may exceed the idlest one before
    it is no longer preferred.
    """

    def __init__(self, most: int = 400_000, ahead: int = 8) -> None:
        self.open: Counter[str] = Counter()
        self._seen: OrderedDict[int, str] = OrderedDict()
        self._most, self._ahead = most, ahead

    def prefer(self, keys: Sequence[int]) -> str | None:
        """The replica that saw the longest of these beginnings, unless it is too busy."""
        for key in reversed(keys):
            if (replica := self._seen.get(key)) is not None:
                ahead = self.open[replica] - min(self.open.values(), default=0)
                return replica if ahead <= self._ahead else None
        return None

    def begin(self, replica: str, keys: Sequence[int]) -> None:
        self.open[replica] += 1
        for key in keys:
            self._seen[key] = replica
            self._seen.move_to_end(key)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def end(self, replica: str) -> None:
        if self.open[replica] > 0:  # else it was forgotten meanwhile
            self.open[replica] -= 1

    def forget(self, replica: str) -> None:
        """The replica has ended; requests that it still holds end by themselves."""
        del self.open[replica]

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget idle replicas beside these."""
        for replica in {*self.open} - {*replicas}:
            if not self.open[replica]:
                del self.open[replica]
