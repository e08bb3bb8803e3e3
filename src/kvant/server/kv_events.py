"""Publishes changes of the prefix cache in vLLM's wire format, so that routers can find prefixes.

    PUB      sends topic | number of the message, 8 bytes big-endian | msgpack of [time, events, rank]
    ROUTER   replays: takes "", first number; answers "", number, msgpack for each kept message from there on,
             then "", number -1, ""

Each event is a map. Hashes are the last 64 bits of a page's hash, as an integer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from kvant.errors import NotServable, WayOut
from kvant.kv.events import Cleared, EventsConfig, Medium, PageEvent, PageLog, Removed, Stored

KEPT = 10_000
"""Number of messages kept for replay."""

_END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """Publishes the events of `log`. Not thread-safe. Raises NotServable if it cannot bind its addresses."""

    def __init__(self, config: EventsConfig, log: PageLog, page_size: int) -> None:
        self._log, self._page_size = log, page_size
        self._topic = config.topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT)
        self._next = 0
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub = _bound(context.socket(zmq.PUB), config.endpoint)
        self._replay = None
        if config.replay:
            self._replay = _bound(context.socket(zmq.ROUTER), config.replay)
        log.cleared()  # an engine before this one may have stored pages

    def publish(self) -> None:
        """Sends the events since the last call, and answers requests for earlier messages."""
        events = self._log.take()
        if events:
            payload = msgspec.msgpack.encode([time.time(), _wire(events, self._page_size), 0])
            number = self._next.to_bytes(8, "big")
            self._next += 1
            self._kept.append((number, payload))
            self._pub.send_multipart((self._topic, number, payload))
        while self._replay is not None and self._replay.poll(0):
            self._answer(self._replay, self._replay.recv_multipart())

    def close(self) -> None:
        self._pub.close(0)
        if self._replay is not None:
            self._replay.close(0)

    def _answer(self, replay: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # not this protocol
        client, _, first = frames
        for number, payload in self._kept:
            if number >= first:
                replay.send_multipart((client, b"", number, payload))
        replay.send_multipart((client, b"", _END, b""))


def _bound(socket: zmq.Socket[bytes], endpoint: str) -> zmq.Socket[bytes]:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as fault:
        socket.close(0)
        raise NotServable(
            f"--kv-events cannot publish at {endpoint}",
            why=str(fault),
            ways_out=(WayOut("name another address, or leave --kv-events out"),),
        ) from None
    return socket


def _wire(events: Sequence[PageEvent], page_size: int) -> list[dict[str, Any]]:
    """Returns events as maps. Consecutive pages of one prompt share an event, and so do removals in a row."""
    found: list[dict[str, Any]] = []
    last: tuple[Medium, bytes] | None = None  # the page that the event before stored, and where
    for event in events:
        match event:
            case Stored(digest, parent, tokens, medium):
                if parent is not None and last == (medium, parent):
                    found[-1]["block_hashes"].append(_short(digest))
                    found[-1]["token_ids"] += tokens
                else:
                    found.append(
                        {
                            "type": "BlockStored",
                            "block_hashes": [_short(digest)],
                            "parent_block_hash": None if parent is None else _short(parent),
                            "token_ids": list(tokens),
                            "block_size": page_size,
                            "lora_id": None,
                            "medium": medium.value,
                            "lora_name": None,
                        }
                    )
                last = medium, digest
                continue
            case Removed(digest, medium):
                before = found[-1] if found else {}
                if before.get("type") == "BlockRemoved" and before["medium"] == medium.value:
                    found[-1]["block_hashes"].append(_short(digest))
                else:
                    found.append(
                        {
                            "type": "BlockRemoved",
                            "block_hashes": [_short(digest)],
                            "medium": medium.value,
                        }
                    )
            case Cleared():
                found.append({"type": "AllBlocksCleared"})
        last = None
    return found


def _short(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")
