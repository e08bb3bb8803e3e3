"""Lets other engines read pages of this one's host memory.

A thread answers where pages lie. Nothing is held for a reader, so a reader that vanishes leaves nothing:
a page that gives way while it is read fails the reader's checksum, and counts as missing there.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
import weakref
from collections.abc import Sequence

import msgspec
import zmq

from kvant.errors import NotServable, WayOut
from kvant.kv.offload.mover import HostRows
from kvant.kv.offload.moves import Key
from kvant.kv.offload.tiers import Catalog
from kvant.kv.transfer import messages
from kvant.kv.transfer.config import Address
from kvant.kv.transfer.memory import RemoteMemory

STORE_SECONDS = 1.0
"""How long an answer waits for pages that are on their way to host memory."""

_POLL_SECONDS = 0.2
_log = logging.getLogger(__name__)


class Giver:
    """Answers at `address` until it is closed or collected.

    parts: of every rank's pages, without rank 0's agent. rows: rank 0's host memory, kept until it is no
    longer registered. Raises NotServable if it cannot listen
    there, or without NIXL.
    """

    def __init__(
        self,
        address: Address,
        catalog: Catalog,
        parts: Sequence[messages.Part],
        page_size: int,
        rows: HostRows,
    ) -> None:
        instance = uuid.uuid4().hex
        memory = RemoteMemory(instance)
        memory.register(rows.address, rows.bytes.numel())
        own, *others = parts
        welcome = messages.Welcome(
            instance, own.identity, memory.metadata, own.first, page_size, own.groups, others
        )
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, ":" in address.host)
        try:
            socket.bind(address.endpoint)
        except zmq.ZMQError as fault:
            socket.close()
            raise NotServable(
                f"no engine can ask for pages at {address}",
                why=str(fault),
                ways_out=(WayOut("name an address of this machine that is free: give:HOST:PORT"),),
            ) from None
        stop = threading.Event()
        desk = _Desk(socket, memory, catalog, welcome, stop, rows)
        thread = threading.Thread(target=desk.run, name="kvant-give", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, stop, thread)


class _Desk:
    """The thread's part."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        memory: RemoteMemory,
        catalog: Catalog,
        welcome: messages.Welcome,
        stop: threading.Event,
        owner: object,
    ) -> None:
        self._owner = owner
        self._socket, self._memory, self._catalog = socket, memory, catalog
        self._welcome, self._stop = welcome, stop
        self._formats = messages.formats_of(welcome.groups)

    def run(self) -> None:
        try:
            while not self._stop.is_set():
                if self._socket.poll(int(1000 * _POLL_SECONDS)):
                    *envelope, body = self._socket.recv_multipart()
                    answer = self._answer(body)
                    if answer is not None:
                        self._socket.send_multipart([*envelope, answer])
        finally:
            self._socket.close()
            self._memory.close()

    def _answer(self, body: bytes) -> bytes | None:
        try:
            question = messages.read_question(body)
        except msgspec.MsgspecError as fault:
            _log.warning("another engine's question was not understood: %s", fault)
            return None
        if isinstance(question, messages.Find):
            return messages.encode(self._found(question))
        return messages.encode(self._met(question))

    def _met(self, hello: messages.Hello) -> messages.Answer:
        """Addresses are told to engines alone that can use the pages."""
        own = self._welcome.identities
        may_convert = self._formats <= set(hello.formats) and len(own) == len(hello.identities)
        if hello.version == messages.VERSION and (own == hello.identities or may_convert):
            return self._welcome
        return messages.Refused(messages.VERSION, own[0], sorted(self._formats), own[1:])

    def _found(self, find: messages.Find) -> messages.Found:
        keys = [Key(*key) for key in find.keys[: messages.MOST_KEYS]]
        end = time.monotonic() + STORE_SECONDS
        while time.monotonic() < end and not self._stop.is_set():
            lacking = [key for key in keys if self._catalog.find(key) is None]
            if not any(map(self._catalog.is_coming, lacking)):
                break
            time.sleep(0.002)
        return messages.Found(self._welcome.instance, [self._place(key) for key in keys])

    def _place(self, key: Key) -> tuple[int, bytes] | None:
        return self._catalog.find(key) if 0 <= key.group < len(self._welcome.groups) else None


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():  # garbage may be collected there
        thread.join(5.0)
