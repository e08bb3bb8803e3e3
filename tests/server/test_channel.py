from __future__ import annotations

import asyncio
import time

from kvant.server.api_error import ApiError
from kvant.server.messages import Failure, Piece
from kvant.server.service import Admission
from kvant.server.supervisor import Channel, Event


def test_what_waits_for_a_slow_reader_is_bounded() -> None:
    channel = Channel(10_000)
    for _ in range(1000):
        channel.put(Piece(1, "x" * 100, (1,)))
    assert channel.overflowed
    assert 0 < len(channel.take()) < 30
    last = Failure(1, "engine_died", "the end is told all the same")
    channel.put(last)
    assert channel.take() == [last]


def test_a_reader_that_keeps_up_never_overflows() -> None:
    channel = Channel(10_000)
    for _ in range(1000):
        channel.put(Piece(1, "x" * 100, (1,)))
        assert len(channel.take()) == 1
    assert not channel.overflowed


def test_a_wait_ends_with_an_event_or_when_its_time_has_come() -> None:
    async def scenario() -> None:
        channel = Channel(10_000)
        loop, begun = asyncio.get_running_loop(), time.monotonic()
        found: list[Event] = []
        for place in range(3):
            loop.call_later(0.01 * (1 + place), channel.put, Piece(place, "x", (1,)))
        until = begun + 0.1
        while time.monotonic() < until:
            if news := channel.take():
                found += news
                until = max(until, time.monotonic() + 0.1)
            else:
                await asyncio.wait_for(channel.wait(until), 5)
        assert [event.id for event in found] == [0, 1, 2]
        assert 0.1 <= time.monotonic() - begun < 2
        channel.close()

    asyncio.run(scenario())


def test_a_reader_that_waits_learns_that_its_channel_has_overflowed() -> None:
    async def scenario() -> None:
        channel = Channel(100)
        asyncio.get_running_loop().call_soon(channel.put, Piece(1, "x" * 100, (1,)))
        await asyncio.wait_for(channel.wait(time.monotonic() + 60), 5)
        assert channel.overflowed
        channel.close()

    asyncio.run(scenario())


def test_places_are_counted_exactly_and_waiting_is_estimated_within_bounds() -> None:
    admission = Admission()
    admission.capacity = 3
    admission.take(2)
    admission.take(1)
    for count, status in ((1, 429), (4, 400)):
        try:
            admission.take(count)
        except ApiError as refused:
            found = refused
        assert found.status == status
    assert admission.held == 3
    admission.give_back(2)
    assert admission.held == 1
    admission.take(2)
    assert 1 <= admission.retry_after <= 60
