"""The listening socket: what is written is sent, and a port in use is told."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kvant.errors import BadValue
from kvant.server.serve import bind


def test_answers_are_sent_as_they_are_written() -> None:
    """Not held back until the client has acknowledged what was sent before."""

    async def nodelay() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sock = writer.get_extra_info("socket")
            found.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        bound = bind("127.0.0.1", 0)
        async with await asyncio.start_server(accepted, sock=bound):
            _, writer = await asyncio.open_connection(*bound.getsockname())
            option = await found
            writer.close()
            await writer.wait_closed()
            return option

    assert asyncio.run(nodelay()) != 0


def test_a_port_that_is_listened_on_is_refused_with_a_way_out() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(BadValue, match="--port 0"):
        bind("127.0.0.1", taken.getsockname()[1])
