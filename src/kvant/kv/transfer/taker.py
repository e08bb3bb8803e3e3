"""Reads pages from the host memory of another engine: a `Source` beside files.

A thread asks where pages lie, reads them over NIXL and checks them. An engine that does not answer, or that
vanishes while it is read, has no pages: requests compute them. If a model is divided, each rank reads its
parts from the rank of the same number (`kvant.parallel.transfer`); this is rank 0's part.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import zmq

from kvant.errors import NotServable, WayOut
from kvant.kv.identity import PageIdentity
from kvant.kv.offload.log_once import LogOnce
from kvant.kv.offload.mover import HostRows
from kvant.kv.offload.moves import Bell, Key, part_of
from kvant.kv.offload.source import Prompt, Wanted
from kvant.kv.pages import CacheIdentity, page_hash, root_hash
from kvant.kv.transfer import messages
from kvant.kv.transfer.config import Address
from kvant.kv.transfer.memory import ReadFailed
from kvant.kv.transfer.reader import READ_PAGES, PartReader, Read
from kvant.kv.transfer.reader import Converter as ConvertsPart

ANSWER_SECONDS = 3.0
"""The longest wait for an answer; a giver waits a second for pages that are on their way."""

RETRY_SECONDS = 5.0
"""Time between two attempts to meet an engine that did not answer."""

MOST_KNOWN = 1 << 17
"""Pages of the other engine whose places are kept."""

UNCHANGED = ("weights", "weight_format", "rotary", "byte_order", "scheme", "draft")
"""Fields of identities that no conversion makes alike."""

_log = logging.getLogger(__name__)


class IncompatiblePages(Exception):
    """The other engine's pages are not this one's; the text names the first difference.

    convert: formats whose conversion would help. num_ranks: of the other engine, if that is the difference.
    """

    def __init__(self, why: str, convert: Sequence[str] = (), num_ranks: int | None = None) -> None:
        super().__init__(why)
        same = WayOut("give both engines the same model, --kv-cache-dtype and --page-size")
        names = ("--kv-transfer-convert", ",".join(convert))
        self.ways_out = (same, WayOut("convert its pages", names)) if convert else (same,)
        if num_ranks is not None:
            ranks = ("--tensor-parallel-size", str(num_ranks))
            self.ways_out = (WayOut("divide both engines alike", ranks),)


class Place(NamedTuple):
    """A page in the memory of the other engine's process `instance`: its index, all parts' checksums."""

    instance: str
    page: int
    checksum: bytes


class Converter(ConvertsPart, Protocol):
    """Pages of another engine as this one's; see `kvant.kv.transfer.convert`."""

    @property
    def formats(self) -> frozenset[str]:
        """Names of formats that may be converted."""
        ...

    def check(self, mine: Sequence[messages.Part], theirs: messages.Welcome) -> str:
        """Returns what is converted, in words. mine: by rank. Raises IncompatiblePages if it cannot be."""
        ...


class Taker:
    """The other engine's pages. All methods belong to the engine's thread.

    parts: of every rank's pages here. rows: rank 0's host memory, where pages are read to, kept until it is
    no longer registered.
    Raises NotServable if the engine answers and has unlike pages, and without NIXL. An engine that does not
    answer is asked again.
    """

    tier = "peer"

    def __init__(
        self,
        address: Address,
        parts: Sequence[messages.Part],
        rows: HostRows,
        bell: Bell,
        converter: Converter | None = None,
    ) -> None:
        self._row = rows.row
        self._work: queue.SimpleQueue[Callable[[_Reader], None] | None] = queue.SimpleQueue()
        self._known: OrderedDict[Key, Place] = OrderedDict()
        self._read: deque[tuple[Key, bytes | None, float]] = deque()
        self._probed: deque[int] = deque()
        self._num_probes = 0
        name = f"taker-{id(self):x}-{time.monotonic_ns():x}"
        own = PartReader(name, PageIdentity(**parts[0].identity), rows, converter)
        self._reader = reader = _Reader(
            address, parts, own, bell, converter, self._known, self._read, self._probed
        )
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
    def giver(self) -> messages.Welcome | None:
        """What the other engine said, None while it is not met."""
        return self._reader.giver

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
        self.read_placed(self.placed(reads))

    def placed(self, reads: Iterable[tuple[Key, int]]) -> list[tuple[Key, int, Place | None]]:
        """Adds each page's place at the other engine, which is forgotten here; None for an unknown one."""
        return [(key, page, self._known.pop(key, None)) for key, page in reads]

    def read_placed(self, reads: Sequence[tuple[Key, int, Place | None]]) -> None:
        """As `read`."""
        found = [(key, self._row(key.group, page), place) for key, page, place in reads]
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
        mine: Sequence[messages.Part],
        parts: PartReader,
        bell: Bell,
        converter: Converter | None,
        known: OrderedDict[Key, Place],
        done: deque[tuple[Key, bytes | None, float]],
        probed: deque[int],
    ) -> None:
        self._address, self._mine, self._parts = address, mine, parts
        self._bell, self._converter = bell, converter
        self._known, self._done, self._probed = known, done, probed
        self._socket: zmq.Socket[bytes] | None = None
        self._giver: messages.Welcome | None = None
        self._tried = 0.0
        self._log_once = LogOnce(_log)
        self.unlike: IncompatiblePages | None = None

    @property
    def num_bad(self) -> int:
        return self._parts.num_bad

    @property
    def giver(self) -> messages.Welcome | None:
        return self._giver

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
            self._parts.close()

    # -- asking --------------------------------------------------------------------------------

    def probe(
        self, number: int, pages: Sequence[Wanted], windows: Sequence[int | None], prompt: Prompt
    ) -> None:
        """Asks where pages lie, and notes which are there."""
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
                    self._known[Key(group, page.digest)] = Place(giver.instance, *place)
                if is_lost:
                    return
            while len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)

    def _names(
        self, giver: messages.Welcome, pages: Sequence[Wanted], prompt: Prompt
    ) -> dict[bytes, bytes]:
        """Returns the other engine's hash of each page."""
        if giver.identity == self._mine[0].identity:
            return {page.digest: page.digest for page in pages}
        theirs = PageIdentity(**giver.identity)
        digest = root_hash(CacheIdentity("pages", None, theirs.digest.hex()), salt=prompt.salt)
        size, names = giver.page_size, list[bytes]()
        for start in range(0, (1 + pages[-1].place) * size, size):
            digest = page_hash(digest, prompt.token_ids[start : start + size])
            names.append(digest)
        return {page.digest: names[page.place] for page in pages}

    def _ask(self, question: messages.Question) -> messages.Answer | None:
        """Returns the other engine's answer; None if none comes."""
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
        """Exchanges identities, and learns the other engine's memory if its pages can be used."""
        self._tried = time.monotonic()
        convert = self._converter
        formats = [] if convert is None else sorted(convert.formats)
        own, *others = [part.identity for part in self._mine]
        hello = messages.Hello(messages.VERSION, own, formats, others)
        answer = self._ask(hello)
        if answer is None or isinstance(answer, messages.Found):
            return
        try:
            told = self._like(answer)
        except IncompatiblePages as fault:
            self.unlike = fault
            self._tell("unlike", f"its pages are not taken: {fault}")
            return
        assert isinstance(answer, messages.Welcome)
        try:
            self._parts.meet(answer.parts[0])
        except Exception as fault:
            self._tell("nixl", f"NIXL does not reach it: {fault}")
            return
        self._giver, self.unlike = answer, None
        self._log_once = LogOnce(_log)
        _log.info("pages of the engine at %s are taken%s", self._address, told)

    def _like(self, answer: messages.Answer) -> str:
        """Returns what is converted, in words, or nothing. Raises IncompatiblePages."""
        assert isinstance(answer, (messages.Welcome, messages.Refused))
        if isinstance(answer, messages.Refused) and answer.version != messages.VERSION:
            raise IncompatiblePages(
                f"it speaks version {answer.version}, here it is {messages.VERSION}"
            )
        ranks, own_ranks = len(answer.identities), len(self._mine)
        if ranks != own_ranks:
            raise IncompatiblePages(
                f"it runs {_ranks(ranks)}, here {_ranks(own_ranks)}: "
                "a rank reads the pages of the rank of the same number",
                num_ranks=ranks,
            )
        mine = [PageIdentity(**part.identity) for part in self._mine]
        difference = _difference(mine, answer.identities)
        if isinstance(answer, messages.Refused):
            own_formats = sorted(messages.formats_of(self._mine[0].groups))
            fixed = _difference(mine, answer.identities, UNCHANGED)
            if fixed is not None or answer.formats == own_formats:
                raise IncompatiblePages(fixed or difference or "it refuses, though nothing differs")
            theirs, own = ", ".join(answer.formats), ", ".join(own_formats)
            raise IncompatiblePages(
                f"its formats are {theirs}, here they are {own}", answer.formats
            )
        if difference is not None:
            if self._converter is None:
                raise IncompatiblePages(difference)
            return self._converter.check(self._mine, answer)
        sizes = [
            [[group.num_bytes for group in part.groups] for part in parts]
            for parts in (self._mine, answer.parts)
        ]
        if sizes[0] != sizes[1]:
            raise IncompatiblePages("its pages have other sizes")
        return ""

    # -- reading -------------------------------------------------------------------------------

    def read(self, reads: Sequence[tuple[Key, memoryview, Place | None]]) -> None:
        """Reads pages, checks them, and tells each."""
        try:
            for start in range(0, len(reads), READ_PAGES):
                self._read_some(reads[start : start + READ_PAGES])
                del start
        finally:
            self._bell.ring()

    def _read_some(self, reads: Sequence[tuple[Key, memoryview, Place | None]]) -> None:
        giver = self._giver
        found: dict[Key, tuple[Key, bytes | None, float]]
        found = {key: (key, None, 0.0) for key, _, _ in reads}
        here = [
            Read(key, row, place.page, part_of(place.checksum, 0))
            for key, row, place in reads
            if giver is not None and place is not None and place.instance == giver.instance
        ]
        try:
            if here:
                found.update((done[0], done) for done in self._parts.read(here))
        except ReadFailed as fault:
            self._lose(str(fault))
        finally:
            self._done += found.values()
            self._bell.ring()

    def _lose(self, why: str) -> None:
        """Forgets what is known of an engine that is gone."""
        if self._giver is not None:
            _log.warning("the engine at %s is lost (%s): prompts are computed", self._address, why)
        self._part()
        self._tried = time.monotonic()

    def _part(self) -> None:
        self._parts.part()
        self._giver = None
        self._known.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, kind: str, text: str) -> None:
        self._log_once(kind, "the engine at %s: %s", self._address, text)


def _difference(
    mine: Sequence[PageIdentity], theirs: Sequence[Mapping[str, str]],
    among: Collection[str] | None = None,
) -> str | None:  # fmt: skip
    """Returns the first difference of the same rank's parts, in words; None if there is none."""
    found = (a.difference(b, among) for a, b in zip(mine, theirs, strict=True))
    return next((one for one in found if one is not None), None)


def _ranks(count: int) -> str:
    return "one rank" if count == 1 else f"{count} ranks"


def _nothing(reader: _Reader) -> None:
    """Does nothing. The reader runs it when no task came in time, and then looks at the other engine."""


def _emptied(found: deque[tuple[Key, bytes | None, float]] | deque[int]) -> list:  # type: ignore[type-arg]
    taken = []
    while found:
        taken.append(found.popleft())
    return taken


def _end(
    work: queue.SimpleQueue[Callable[[_Reader], None] | None], thread: threading.Thread
) -> None:
    work.put(None)
    if thread is not threading.current_thread():  # garbage may be collected there
        thread.join(2 * ANSWER_SECONDS)
