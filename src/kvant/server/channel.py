"""Where one request's events wait for the task that answers it."""

from __future__ import annotations

import asyncio

from kvant.server.messages import Failure, Piece

Event = Piece | Failure


class Channel:
    """Events of the sequences of one request, in order. Bounded: `overflowed` once a slow reader lets
    more than `most_bytes` of text wait; nothing is kept after that.
    """

    def __init__(self, most_bytes: int) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._most_bytes = most_bytes
        self._waiting = 0
        self.overflowed = False

    def put(self, event: Event) -> None:
        size = _size(event)
        self.overflowed |= self._waiting + size > self._most_bytes
        if not self.overflowed or isinstance(event, Failure):
            self._waiting += size
            self._events.put_nowait(event)

    async def get(self) -> Event:
        event = await self._events.get()
        self._waiting -= _size(event)
        return event

    def get_waiting(self) -> list[Event]:
        """What is there already, without waiting."""
        found = []
        while not self._events.empty():
            found.append(self._events.get_nowait())
        self._waiting = 0
        return found


_PIECE_BYTES = 64
_CHAR_BYTES = 4
_LOGPROB_BYTES = 100


def _size(event: Event) -> int:
    """About what an event takes while it waits."""
    if not isinstance(event, Piece):
        return 0
    # Not those of the prompt: they come once, and have a limit of their own.
    numbers = sum(1 + len(one.top) for one in event.logprobs)
    return _PIECE_BYTES + _CHAR_BYTES * len(event.text) + _LOGPROB_BYTES * numbers
