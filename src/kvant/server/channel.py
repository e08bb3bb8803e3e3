"""Where one request's events wait for the task that answers it."""

from __future__ import annotations

import asyncio

from kvant.server.messages import Failure, Piece

Event = Piece | Failure


class Channel:
    """Events of the sequences of one request, in order. Bounded: `overflowed` once a slow reader lets
    more than `most_bytes` of text wait; nothing is kept after that. Whoever reads closes it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._events: list[Event] = []
        self._came = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._most_bytes = most_bytes
        self._waiting = 0
        self.overflowed = False

    def put(self, event: Event) -> None:
        size = _size(event)
        self.overflowed |= self._waiting + size > self._most_bytes
        if not self.overflowed or isinstance(event, Failure):
            self._waiting += size
            self._events.append(event)
        self._came.set()

    def take(self) -> list[Event]:
        """All that wait, perhaps none."""
        events, self._events = self._events, []
        self._waiting = 0
        self._came.clear()
        return events

    async def wait(self, until: float) -> None:
        """Until something is put, or until then on `time.monotonic`'s clock, or a while less.

        One alarm serves many waits, each of which ends no earlier than the one before: to set one and
        to stop it again for each token would be a quarter of what a token costs.
        """
        if self._alarm is None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_at(until, self._ring)
        await self._came.wait()

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _ring(self) -> None:
        self._alarm = None
        self._came.set()


_PIECE_BYTES = 64
_CHAR_BYTES = 4
_LOGPROB_BYTES = 100


def _size(event: Event) -> int:
    """About what an event takes while it waits."""
    if not isinstance(event, Piece):
        return 0
    size = _PIECE_BYTES + _CHAR_BYTES * len(event.text)
    if event.logprobs:
        # Not those of the prompt: they come once, and have a limit of their own.
        size += _LOGPROB_BYTES * sum(1 + len(one.top) for one in event.logprobs)
    return size
