"""Reads pages from the host memory of another engine: a `Source` beside files.

A thread asks where pages lie, reads them over NIXL and checks them. An engine that does not answer, or that
vanishes while it is read, has no pages: requests compute them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import zmq

from kvant.errors import NotServable, WayOut
from kvant.kv.identity import PageIdentity
from kvant.kv.offload.mover import HostRows
from kvant.kv.offload.moves import Bell, Key
from kvant.kv.offload.page_files import checksum
from kvant.kv.offload.source import Prompt, Wanted
from kvant.kv.pages import CacheIdentity, page_hash, root_hash
from kvant.kv.transfer import messages
from kvant.kv.transfer.config import Address
from kvant.kv.transfer.memory import ReadFailed, RemoteMemory

ANSWER_SECONDS = 3.0
"""The longest wait for an answer; a giver waits a second for pages that are on their way."""

RETRY_SECONDS = 5.0
"""Time between two attempts to meet an engine that did not answer."""

READ_PAGES = 128
"""Pages of one read over NIXL."""

MOST_KNOWN = 1 << 17
"""Pages of the other engine whose places are kept."""

UNCHANGED = ("weights", "weight_format", "rotary", "byte_order", "scheme", "draft")
"""Fields of identities that no conversion makes alike."""

_log = logging.getLogger(__name__)


class Unlike(Exception):
    """The other engine's pages are not this one's; the text names the first difference."""

    def __init__(self, why: str, convert: Sequence[str] = ()) -> None:
        super().__init__(why)
        same = WayOut("give both engines the same model, --kv-cache-dtype and --page-size")
        names = ("--kv-transfer-convert", ",".join(convert))
        self.ways_out = (same, WayOut("convert its pages", names)) if convert else (same,)


class Place(NamedTuple):
    """A page in the memory of the other engine's process `instance`. digest: its hash there."""

    instance: str
    address: int
    checksum: bytes


class Converter(Protocol):
    """Pages of another engine as this one's; see `kvant.kv.transfer.convert`."""

    @property
    def formats(self) -> frozenset[str]:
        """Names of formats that may be converted."""
        ...

    def check(self, mine: PageIdentity, theirs: messages.Welcome) -> str:
        """What is converted, in words. Raises Unlike where it cannot be."""
        ...

    def convert(
        self, theirs: messages.Welcome, key: Key, row: memoryview, into: memoryview
    ) -> None:
        """Decode a page with the codecs of its formats, and encode it with this engine's."""
        ...


class Taker:
    """The other engine's pages. All methods belong to the engine's thread.

    identity: of this engine's pages. rows: its host memory, where pages are read to, kept until it is no
    longer registered. formats: of this engine.
    Raises NotServable if the engine answers and has unlike pages, and without NIXL. An engine that does not
    answer is asked again.
    """

    tier = "peer"

    def __init__(
        self,
        address: Address,
        identity: PageIdentity,
        rows: HostRows,
        bell: Bell,
        converter: Converter | None = None,
        formats: Sequence[str] = (),
    ) -> None:
        self._row = rows.row
        self._work: queue.SimpleQueue[Callable[[_Reader], None] | None] = queue.SimpleQueue()
        self._known: OrderedDict[Key, Place] = OrderedDict()
        self._read: deque[tuple[Key, bytes | None, float]] = deque()
        self._probed: deque[int] = deque()
        self._num_probes = 0
        memory = RemoteMemory(f"taker-{id(self):x}-{time.monotonic_ns():x}")
        memory.register(rows.address, rows.bytes.numel())
        self._reader = reader = _Reader(
            address, identity, rows.row_bytes, memory, bell, converter, self._known, self._read,
            self._probed, tuple(formats), rows,
        )  # fmt: skip
        met = threading.Event()
        thread = threading.Thread(
            target=reader.run, args=(self._work, met), name="kvant-take", daemon=True
        )
        thread.start()
        self.close = weakref.finalize(self, _end, self._work, thread)
        met.wait(2 * ANSWER_SECONDS)
        if reader.unlike is not None:
            raise NotServable(
                f"pages of the engine at {address} are not taken",
                why=str(reader.unlike),
                ways_out=reader.unlike.ways_out,
            )
        if not reader.is_met:
            _log.warning(
                "the engine at %s does not answer yet: prompts are computed until it does", address
            )

    @property
    def num_bad(self) -> int:
        return self._reader.num_bad

    @property
    def is_ready(self) -> bool:
        return self._reader.is_met

    @property
    def is_probing(self) -> bool:
        return self._num_probes > 0

    def has(self, key: Key) -> bool:
        return key in self._known

    def probe(
        self, number: int, pages: Sequence[Wanted], windows: Sequence[int | None], prompt: Prompt
    ) -> None:
        self._num_probes += 1
        self._work.put(lambda reader: reader.probe(number, pages, windows, prompt))

    def read(self, reads: Iterable[tuple[Key, int]]) -> None:
        found = [
            (key, self._row(key.group, page), self._known.pop(key, None)) for key, page in reads
        ]
        if found:
            self._work.put(lambda reader: reader.read(found))

    def take_read(self) -> list[tuple[Key, bytes | None, float]]:
        return _emptied(self._read)

    def take_probed(self) -> list[int]:
        found = _emptied(self._probed)
        self._num_probes -= len(found)
        return found

    def touch(self, keys: Sequence[Key]) -> None:
        """The other engine knows what it uses."""

    def forget(self, key: Key) -> None:
        self._known.pop(key, None)


class _Reader:
    """The thread's part. unlike: why pages of the engine that answered cannot be used."""

    def __init__(
        self,
        address: Address,
        identity: PageIdentity,
        row_bytes: tuple[int, ...],
        memory: RemoteMemory,
        bell: Bell,
        converter: Converter | None,
        known: OrderedDict[Key, Place],
        done: deque[tuple[Key, bytes | None, float]],
        probed: deque[int],
        formats: tuple[str, ...],
        owner: object,
    ) -> None:
        self._formats, self._owner = formats, owner
        self._address, self._identity, self._row_bytes = address, identity, row_bytes
        self._memory, self._bell, self._converter = memory, bell, converter
        self._known, self._done, self._probed = known, done, probed
        self._socket: zmq.Socket[bytes] | None = None
        self._giver: messages.Welcome | None = None
        self._name = ""
        self._scratch: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
        self._tried = 0.0
        self._told: set[str] = set()
        self.unlike: Unlike | None = None
        self.num_bad = 0

    @property
    def is_met(self) -> bool:
        return self._giver is not None

    def run(
        self,
        work: queue.SimpleQueue[Callable[[_Reader], None] | None],
        met: threading.Event,
    ) -> None:
        try:
            self._meet()
            met.set()
            while True:
                try:
                    task = work.get(timeout=RETRY_SECONDS)
                except queue.Empty:
                    task = _nothing
                if task is None:
                    return
                try:
                    task(self)
                    if self._giver is None and time.monotonic() - self._tried > RETRY_SECONDS:
                        self._meet()
                except Exception:
                    _log.exception("pages of the engine at %s could not be taken", self._address)
        finally:
            met.set()
            self._part()
            self._memory.close()

    # -- asking --------------------------------------------------------------------------------

    def probe(
        self, number: int, pages: Sequence[Wanted], windows: Sequence[int | None], prompt: Prompt
    ) -> None:
        """Ask where pages lie, and note which are there."""
        try:
            if self._giver is not None:
                self._probe(self._giver, pages, windows, prompt)
        finally:
            self._probed.append(number)
            self._bell.ring()

    def _probe(
        self, giver: messages.Welcome, pages: Sequence[Wanted], windows: Sequence[int | None],
        prompt: Prompt,
    ) -> None:  # fmt: skip
        names = self._names(giver, pages, prompt)
        groups = range(len(windows))
        most = max(1, messages.MOST_KEYS // len(windows))
        for start in range(0, len(pages), most):
            some = pages[start : start + most]
            keys = [(group, names[page.digest]) for page in some for group in groups]
            found = self._ask(messages.Find(keys))
            if not isinstance(found, messages.Found) or found.instance != giver.instance:
                self._lose("it does not answer" if found is None else "it began again")
                return
            places = iter(found.places)
            for page in some:
                is_lost = False
                for group, window in enumerate(windows):
                    place = next(places, None)
                    if place is None:
                        is_lost |= window is None
                        continue
                    at = giver.first + giver.groups[group].stride * place[0]
                    self._known[Key(group, page.digest)] = Place(giver.instance, at, place[1])
                if is_lost:
                    return
            while len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)

    def _names(
        self, giver: messages.Welcome, pages: Sequence[Wanted], prompt: Prompt
    ) -> dict[bytes, bytes]:
        """The other engine's hash of each page."""
        if giver.identity == self._identity.fields:
            return {page.digest: page.digest for page in pages}
        theirs = PageIdentity(**giver.identity)
        digest = root_hash(CacheIdentity("pages", None, theirs.digest.hex()), salt=prompt.salt)
        size, names = giver.page_size, list[bytes]()
        for start in range(0, (1 + pages[-1].place) * size, size):
            digest = page_hash(digest, prompt.token_ids[start : start + size])
            names.append(digest)
        return {page.digest: names[page.place] for page in pages}

    def _ask(self, question: messages.Question) -> messages.Answer | None:
        """None if no answer comes."""
        if self._socket is None:
            self._socket = zmq.Context.instance().socket(zmq.REQ)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.IPV6, ":" in self._address.host)
            self._socket.connect(self._address.endpoint)
        self._socket.send(messages.encode(question))
        if self._socket.poll(int(1000 * ANSWER_SECONDS)):
            try:
                answer: messages.Answer = messages.read_answer(self._socket.recv())
                return answer
            except msgspec.MsgspecError as fault:
                self._tell("answer", f"it answers otherwise than this version does: {fault}")
        self._socket.close()  # an answer that comes later would be taken for another question's
        self._socket = None
        return None

    def _meet(self) -> None:
        """Exchange identities; know the other engine's memory if pages can be used."""
        self._tried = time.monotonic()
        convert = self._converter
        formats = [] if convert is None else sorted(convert.formats)
        hello = messages.Hello(messages.VERSION, self._identity.fields, formats)
        answer = self._ask(hello)
        if answer is None or isinstance(answer, messages.Found):
            return
        try:
            told = self._like(answer)
        except Unlike as fault:
            self.unlike = fault
            self._tell("unlike", f"its pages are not taken: {fault}")
            return
        assert isinstance(answer, messages.Welcome)
        try:
            self._name = self._memory.meet(answer.agent)
        except Exception as fault:
            self._tell("nixl", f"NIXL does not reach it: {fault}")
            return
        self._giver, self.unlike = answer, None
        self._told.clear()
        _log.info("pages of the engine at %s are taken%s", self._address, told)

    def _like(self, answer: messages.Answer) -> str:
        """What is converted, in words, or nothing. Raises Unlike."""
        assert isinstance(answer, (messages.Welcome, messages.Refused))
        difference = self._identity.difference(answer.identity)
        if isinstance(answer, messages.Refused):
            if answer.version != messages.VERSION:
                raise Unlike(f"it speaks version {answer.version}, here it is {messages.VERSION}")
            theirs, own = ", ".join(answer.formats), ", ".join(self._formats)
            fixed = self._identity.difference(answer.identity, UNCHANGED)
            if fixed is not None or answer.formats == list(self._formats):
                raise Unlike(fixed or difference or "it refuses, though nothing differs")
            raise Unlike(f"its formats are {theirs}, here they are {own}", answer.formats)
        if difference is not None:
            if self._converter is None:
                raise Unlike(difference)
            return self._converter.check(self._identity, answer)
        if tuple(group.num_bytes for group in answer.groups) != self._row_bytes:
            raise Unlike("its pages have other sizes")
        return ""

    # -- reading -------------------------------------------------------------------------------

    def read(self, reads: Sequence[tuple[Key, memoryview, Place | None]]) -> None:
        """Read pages, check them, and tell each."""
        try:
            for start in range(0, len(reads), READ_PAGES):
                self._read_some(reads[start : start + READ_PAGES])
                del start
        finally:
            self._bell.ring()

    def _read_some(self, reads: Sequence[tuple[Key, memoryview, Place | None]]) -> None:
        giver, started = self._giver, time.perf_counter()
        here = [
            (key, row, place)
            for key, row, place in reads
            if giver is not None and place is not None and place.instance == giver.instance
        ]
        sums: dict[Key, bytes | None] = {key: None for key, _, _ in reads}
        try:
            if giver is not None and here:
                self._fill(giver, here, sums)
        except ReadFailed as fault:
            self._lose(str(fault))
        finally:
            each = (time.perf_counter() - started) / max(1, len(reads))
            for key, total in sums.items():
                self._done.append((key, total, each))
            self._bell.ring()

    def _fill(
        self, giver: messages.Welcome, reads: Sequence[tuple[Key, memoryview, Place]],
        sums: dict[Key, bytes | None],
    ) -> None:  # fmt: skip
        """Read rows, converted where they are others. Adds to `sums`. Raises ReadFailed."""
        is_same = giver.identity == self._identity.fields
        rows = [row for _, row, _ in reads] if is_same else self._room(giver, reads)
        pieces = [
            (_address(row), place.address, len(row))
            for row, (_, _, place) in zip(rows, reads, strict=True)
        ]
        self._memory.read(self._name, pieces)
        for row, (key, into, place) in zip(rows, reads, strict=True):
            if checksum(row) != place.checksum:
                self.num_bad += 1
                self._tell("bad", "a page was not what it said, for example because it gave way")
                continue
            if is_same:
                sums[key] = place.checksum
                continue
            assert self._converter is not None
            self._converter.convert(giver, key, row, into)
            sums[key] = checksum(into)

    def _room(
        self, giver: messages.Welcome, reads: Sequence[tuple[Key, memoryview, Place]]
    ) -> list[memoryview]:
        """Memory for the other engine's pages before they are converted."""
        if self._scratch is None:
            most = READ_PAGES * max(group.num_bytes for group in giver.groups)
            self._scratch = np.zeros(most, np.uint8)
            self._memory.register(self._scratch.ctypes.data, most)
        room, at, rows = memoryview(self._scratch.data), 0, list[memoryview]()
        for key, _, _ in reads:
            size = giver.groups[key.group].num_bytes
            rows.append(room[at : at + size])
            at += size
        return rows

    def _lose(self, why: str) -> None:
        """The engine is gone: what is known of it means nothing."""
        if self._giver is not None:
            _log.warning("the engine at %s is lost (%s): prompts are computed", self._address, why)
        self._part()
        self._tried = time.monotonic()

    def _part(self) -> None:
        if self._giver is not None:
            self._memory.part(self._name)
        self._giver = None
        self._known.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, kind: str, text: str) -> None:
        """Log a kind of fault once."""
        if kind not in self._told:
            self._told.add(kind)
            _log.warning("the engine at %s: %s", self._address, text)


def _address(row: memoryview) -> int:
    return int(np.frombuffer(row, np.uint8).ctypes.data)


def _nothing(reader: _Reader) -> None:
    """Time to look whether the other engine answers again."""


def _emptied(found: deque[tuple[Key, bytes | None, float]] | deque[int]) -> list:  # type: ignore[type-arg]
    taken = []
    while found:
        taken.append(found.popleft())
    return taken


def _end(
    work: queue.SimpleQueue[Callable[[_Reader], None] | None], thread: threading.Thread
) -> None:
    work.put(None)
    thread.join(2 * ANSWER_SECONDS)
