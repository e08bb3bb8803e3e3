"""What the prefix cache stores and removes, for indexers outside of the process.

Pages of requests with a salt are left out: salts come from API keys and clients, who must not learn of
each other's prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvant.errors import BadValue, WayOut


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """Where events are published. endpoint, replay: ZeroMQ addresses to bind; replay may be empty.

    topic: the first frame of each message.
    """

    endpoint: str
    replay: str = ""
    topic: str = ""


class Medium(StrEnum):
    """The tier that holds a page, in vLLM's words. GPU is where the engine computes, on a CPU too."""

    DEVICE = "GPU"
    HOST = "CPU"


@dataclass(frozen=True, slots=True)
class Stored:
    """A page can be found. parent: the hash of the page before it, None for a prompt's first page."""

    digest: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    medium: Medium = Medium.DEVICE


@dataclass(frozen=True, slots=True)
class Removed:
    """A page that was stored in a tier cannot be found there any more."""

    digest: bytes
    medium: Medium = Medium.DEVICE


@dataclass(frozen=True, slots=True)
class Cleared:
    """No page can be found any more."""


PageEvent = Stored | Removed | Cleared


class PageLog:
    """Events since the last `take`, in order. medium: the tier it tells of; see `beside`."""

    def __init__(self, medium: Medium = Medium.DEVICE) -> None:
        self._medium = medium
        self._events: list[PageEvent] = []
        self._known: set[bytes] = set()

    def beside(self, medium: Medium) -> PageLog:
        """Returns a log of another tier, whose events this log returns among its own."""
        other = PageLog(medium)
        other._events = self._events
        return other

    def stored(self, digest: bytes, parent: bytes | None, tokens: Sequence[int]) -> None:
        self._known.add(digest)
        self._events.append(Stored(digest, parent, tuple(tokens), self._medium))

    def removed(self, digest: bytes) -> None:
        """Pages that were not stored before are left out."""
        if digest in self._known:
            self._known.remove(digest)
            self._events.append(Removed(digest, self._medium))

    def cleared(self) -> None:
        self._known.clear()
        self._events.append(Cleared())

    def take(self) -> list[PageEvent]:
        found = list(self._events)
        self._events.clear()
        return found


def parse_events(text: str, *, asked_by: str) -> EventsConfig:
    """Reads "ENDPOINT[,replay=ENDPOINT][,topic=TEXT]". Raises BadValue."""
    endpoint, *others = text.split(",")
    found = {"replay": "", "topic": ""}
    for part in others:
        name, equals, value = part.partition("=")
        if name not in found or not equals:
            raise _bad(text, asked_by, f"{part!r} is neither replay=ENDPOINT nor topic=TEXT")
        found[name] = value
    for address in filter(None, (endpoint or "?", found["replay"])):
        if not address.startswith(("tcp://", "ipc://")):
            raise _bad(text, asked_by, f"{address!r} is no ZeroMQ address")
    return EventsConfig(endpoint, found["replay"], found["topic"])


def _bad(text: str, asked_by: str, why: str) -> BadValue:
    return BadValue(
        f"{asked_by}: {text!r} names no place for events",
        why=why,
        ways_out=(WayOut("publish on this machine", ("--kv-events", "tcp://127.0.0.1:5557")),),
    )
