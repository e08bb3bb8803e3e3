"""Messages between the front and replicas, and the choice of a replica for a request; without Ray."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import msgspec
import xxhash

BLOCK_BYTES = 256
"""Bytes of a conversation's JSON that are hashed as one block: about 60 tokens."""
MOST_BLOCKS = 2048


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request. prefer: the replica that should answer it. avoid: replicas to choose last."""

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
    """The second part of every answer: status and headers. The body follows as bytes."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]

    def get(self, name: bytes) -> bytes:
        return next((value for found, value in self.headers if found.lower() == name), b"")

    @property
    def is_stream(self) -> bool:
        return self.get(b"content-type").startswith(b"text/event-stream")


class ReplicaLost(Exception):
    """Raised if a replica ended, or cannot be reached, before its answer was complete.

    replica: its name; None if no replica had taken the request.
    """

    def __init__(self, message: str, replica: str | None = None) -> None:
        super().__init__(message)
        self.replica = replica


Part: TypeAlias = Taken | Head | bytes
Ask: TypeAlias = Callable[[Asked], AsyncGenerator[Part, None]]
"""Sends a request. Yields Taken, Head, then pieces of the body. Closing the generator cancels the request.

Raises ReplicaLost.
"""


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
    """Returns what to do with a complete answer that the client has not seen yet."""
    if head.status not in (404, 429, 503):
        return Verdict.PASS
    try:
        error = msgspec.json.decode(body)["error"]
        # Anthropic's errors have no code, so their status decides.
        code = error.get("code") or {429: "server_full", 503: "engine_died"}.get(head.status)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return Verdict.PASS
    if code in _RETRIED:
        return Verdict.RETRY
    return Verdict.NEXT if code in _ASKED_AROUND else Verdict.PASS


_OPENING = ("cache_salt", "tools", "system", "instructions")
_TALK = ("messages", "input", "prompt")


def prefix_keys(body: bytes, api_key: str | None) -> tuple[int, ...]:
    """Returns hashes of a conversation's prefixes, shortest first, each BLOCK_BYTES longer than the last.

    Requests with a common prefix share their first hashes. Empty if the body is no JSON object.
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
    """Remembers which replica saw a conversation's prefix last, and how many open requests each has.

    most: the most hashes remembered. ahead: how many more open requests than the idlest replica the
    preferred one may have.
    """

    def __init__(self, most: int = 400_000, ahead: int = 8) -> None:
        self.open: Counter[str] = Counter()
        self._seen: OrderedDict[int, str] = OrderedDict()
        self._most, self._ahead = most, ahead

    def prefer(self, keys: Sequence[int]) -> str | None:
        """Returns the replica that saw the longest of these prefixes, or None if it is too busy."""
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
        if self.open[replica] > 0:  # 0 if `forget` was called meanwhile
            self.open[replica] -= 1

    def forget(self, replica: str) -> None:
        """Drops the count of a replica that has ended; its open requests end by themselves."""
        del self.open[replica]

    def keep(self, replicas: Iterable[str]) -> None:
        """Forgets idle replicas that are not among `replicas`."""
        for replica in {*self.open} - {*replicas}:
            if not self.open[replica]:
                del self.open[replica]
