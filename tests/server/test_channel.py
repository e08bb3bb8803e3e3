from __future__ import annotations

import asyncio

from kvant.server.admission import Admission
from kvant.server.api_error import ApiError
from kvant.server.channel import Channel
from kvant.server.messages import Failure, Piece


def test_what_waits_for_a_slow_reader_is_bounded() -> None:
    async def scenario() -> None:
        channel = Channel(10_000)
        for _ in range(1000):
            channel.put(Piece(1, "x" * 100, 1))
        assert channel.overflowed
        assert 0 < len(channel.get_waiting()) < 30
        channel.put(Failure(1, "engine_died", "the end is told all the same"))
        assert isinstance(await channel.get(), Failure)

    asyncio.run(scenario())


def test_a_reader_that_keeps_up_never_overflows() -> None:
    async def scenario() -> None:
        channel = Channel(10_000)
        for _ in range(1000):
            channel.put(Piece(1, "x" * 100, 1))
            await channel.get()
        assert not channel.overflowed

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
