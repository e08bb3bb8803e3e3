"""Pages that leave the device's pool and come back: what lies where, and which copies run.

    remember -> offered -> copied to host memory -> written to a file
    a request asks for them -> read into host memory -> copied to the device -> found by their prefix

A page that becomes findable on the device is copied at once, so its eviction never waits for a copy.
Nothing keeps it on the device meanwhile: if it got another owner before the copy ended, the copy is thrown
away. Host memory is a second set of pages with the same hashes (`kvant.kv.pages`): pages that were not used
for the longest time give way.

All methods belong to the engine's thread. Copies, files and checksums are the work of other threads, whose
results `poll` takes.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

from kvant.kv.events import Medium, PageLog
from kvant.kv.offload.log_once import LogOnce
from kvant.kv.offload.moves import Bell, Key, Move, Moved, Mover
from kvant.kv.offload.policy import BreakEven
from kvant.kv.offload.source import Files, Prompt, Source, Wanted
from kvant.kv.offload.stats import OffloadStats, TierCounts
from kvant.kv.pages import SharedPages

MOST_OFFERED = 1 << 16
"""Pages that may wait to be copied; more are not stored."""

READ_SECONDS = 5.0
"""The longest time that a request waits for files; what has come by then is used."""

AVOID_SECONDS = 30.0
"""No request waits for files for so long after one waited in vain."""

STORE_PAGES = 256
"""Pages of one job that stores."""

LOAD_PAGES = 128
"""Pages of one job that loads."""

MOST_LOADING = 6
"""Jobs of one request that load at the same time: the bus has work for the length of a step."""

BEGUN_AT_ONCE = 2
"""Jobs of one request that begin between two steps, so that their bookkeeping holds up no running request."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Catalog:
    """What other threads may ask of tiers; each answer is a read of a dict or two.

    find: the place of a page in host memory, and its checksum; None for one that is not there.
    is_coming: whether it is on its way there.
    """

    find: Callable[[Key], tuple[int, bytes] | None]
    is_coming: Callable[[Key], bool]


class PublishedPage(NamedTuple):
    """What indexers outside may learn of a page: the hash before it, and its tokens."""

    parent: bytes | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """A findable page of the device. generation: `PageAllocator.generation_of` when it was offered."""

    key: Key
    page: int
    generation: int
    published: PublishedPage | None


class Progress(Enum):
    """Where a waiting request stands: its pages are looked for or on their way, or it waits no more."""

    NEW = "new"
    MOVING = "moving"
    FETCHED = "fetched"
    SETTLED = "settled"


@dataclass(slots=True)
class _Store:
    offers: list[Offer]
    host_pages: list[int]


@dataclass(slots=True)
class _Load:
    """What a request waits for: keys, whose device pages are allocated as their copies begin.

    held: pages of the device by group that it holds; pages that were there already come first. num_tokens:
    whose K and V the keys are. num_begun: keys whose copies began. num_jobs: jobs that run. is_whole: False
    once a page was not found or was given up. Then no further copy begins.
    """

    number: int
    keys: list[Key]
    published: list[PublishedPage | None]
    held: list[list[int]]
    num_tokens: int
    started: float
    num_begun: int = 0
    num_jobs: int = 0
    is_whole: bool = True

    @property
    def is_over(self) -> bool:
        return not self.num_jobs and (not self.is_whole or self.num_begun == len(self.keys))


@dataclass(slots=True)
class _Part:
    """A job of a load. first: the place of its first key. seconds: that beginning it took this thread."""

    load: int
    first: int
    moves: list[Move]
    seconds: float


@dataclass(slots=True)
class _Waiting:
    """A request that waits.

    load: its load. unread: pages that are being read from other places, since the time `reading`.
    num_probes: places that still look for its pages.
    """

    progress: Progress = Progress.NEW
    load: int | None = None
    unread: set[Key] = field(default_factory=set)
    reading: float = 0.0
    num_probes: int = 0


class Tiers:
    """Host memory and other places behind the pages `shared` of a device.

    host: pages of the same groups in host memory. mover: copies between both. files: behind host memory.
    peers: other engines, whose pages are read into host memory.
    """

    def __init__(
        self,
        shared: SharedPages,
        host: SharedPages,
        mover: Mover,
        *,
        bell: Bell,
        policy: BreakEven | None = None,
        files: Files | None = None,
        peers: Sequence[Source] = (),
    ) -> None:
        self.policy = BreakEven() if policy is None else policy
        self.files = files
        self.kept: object = None  # what lives as long as the tiers do
        self._sources: tuple[Source, ...] = (*(() if files is None else (files,)), *peers)
        self._has_peers = bool(peers)
        self._shared, self._host, self._mover, self._bell = shared, host, mover, bell
        self._sums: dict[tuple[int, int], tuple[bytes, bytes]] = {}  # by page: hash, checksum
        self._offers: OrderedDict[Key, Offer] = OrderedDict()
        self._storing: set[Key] = set()
        self._stores: dict[int, _Store] = {}
        self._loads: dict[int, _Load] = {}
        self._parts: dict[int, _Part] = {}
        self._kept: dict[int, list[list[int]]] = {}
        self._fetches: dict[Key, int] = {}  # by page: its place in host memory
        self._waiting: dict[int, _Waiting] = {}
        self._unsaved: OrderedDict[Key, None] = OrderedDict()  # in host memory alone
        self._writing: dict[Key, int] = {}
        self._jobs = itertools.count()
        self._counts = {"host": TierCounts(), "disk": TierCounts(), "peer": TierCounts()}
        self._num_restores = self._num_restored_tokens = 0
        self._restore_seconds = 0.0
        self._log_once = LogOnce(_log)
        self._avoided_until = 0.0

    # -- what is there -------------------------------------------------------------------------

    def has(self, key: Key) -> bool:
        """Whether host memory holds a page, or another place is believed to."""
        if self.in_host(key):
            return True
        return bool(self._sources) and self._may_read and self._source_of(key) is not None

    def in_host(self, key: Key) -> bool:
        return self._host.every[key.group].find(key.digest) is not None

    def _source_of(self, key: Key) -> Source | None:
        return next((source for source in self._sources if source.has(key)), None)

    @property
    def has_sources(self) -> bool:
        """Whether a request's pages are to be looked for when it arrives, see `look`."""
        return bool(self._sources)

    @property
    def catalog(self) -> Catalog:
        """What other threads may ask."""
        return Catalog(
            find=partial(_find, [group.find for group in self._host.every], self._sums),
            is_coming=partial(_is_coming, self._storing, self._offers),
        )

    @property
    def is_full(self) -> bool:
        """Whether pages of host memory give way to others."""
        return not self._host.superblocks.free

    @property
    def is_moving(self) -> bool:
        """Whether copies run, or wait to run, whose results `poll` will take."""
        return bool(
            self._stores or self._loads or self._fetches or self._writing or self._offers
            or (self._unsaved and self.files is not None and self.files.takes_writes)
            or any(source.is_probing for source in self._sources)
        )  # fmt: skip

    @property
    def stats(self) -> OffloadStats:
        host, disk = self._counts["host"], self._counts["disk"]
        for tier in ("disk", "peer"):
            self._counts[tier].bad = sum(s.num_bad for s in self._sources if s.tier == tier)
        known = sum(group.num_known for group in self._host.every)
        file_bytes = 0 if self.files is None else self.files.num_bytes
        return OffloadStats(
            host=host.with_pages(known, known * max(self._mover.page_bytes, default=0)),
            disk=None
            if self.files is None
            else self.files.counted(disk).with_pages(self.files.num_pages, file_bytes),
            peer=self._counts["peer"].with_pages(0, 0) if self._has_peers else None,
            num_restores=self._num_restores,
            num_restored_tokens=self._num_restored_tokens,
            restore_seconds=self._restore_seconds,
            host_bytes_per_second=self.policy.bytes_per_second["host"],
            disk_bytes_per_second=self.policy.bytes_per_second["disk"],
        )

    def set_log(self, log: PageLog) -> None:
        """Tells indexers outside what host memory holds, beside what the device does."""
        self._host.log = log.beside(Medium.HOST)

    def held(self) -> list[list[list[int]]]:
        """Returns the device's pages that each load holds, by group."""
        every = [*(load.held for load in self._loads.values()), *self._kept.values()]
        return [[held[place] for held in every] for place in self._groups]

    def audit(self) -> list[str]:
        """Faults in words: every page of host memory has one owner."""
        holders: list[list[list[int]]] = [[] for _ in self._groups]
        for store in self._stores.values():
            for offer, page in zip(store.offers, store.host_pages, strict=True):
                holders[offer.key.group].append([page])
        for part in self._parts.values():
            for move in part.moves:
                holders[move.group].append([move.host_page])
        for key, page in (*self._fetches.items(), *self._writing.items()):
            holders[key.group].append([page])
        faults = [f"host memory: {fault}" for fault in self._host.audit(holders)]
        for place, group in enumerate(self._host.every):
            for digest, page in group.known():
                if self._sums.get((place, page), (b"", b""))[0] != digest:
                    faults.append(f"host memory: page {page} has no checksum")
        return faults

    # -- storing -------------------------------------------------------------------------------

    def offer(self, offers: Iterable[Offer]) -> None:
        """Copies findable pages of one sequence to host memory, if they are not there; first pages first."""
        for offer in offers:
            key = offer.key
            if key in self._storing or key in self._offers or self.in_host(key):
                continue
            if len(self._offers) >= MOST_OFFERED:
                self._counts["host"].dropped += 1
                continue
            self._offers[key] = offer
        self._store_offers()

    def touch(self, keys: Sequence[Key]) -> None:
        """Notes that pages of one sequence were used; the first ones stay longest."""
        for place, group in enumerate(self._host.every):
            pages = [group.find(key.digest) for key in keys if key.group == place]
            there = [page for page in pages if page is not None]
            group.join(there)
            group.release(there)
        if self.files is not None:
            self.files.touch(keys)

    def _store_offers(self) -> None:
        """Begins to copy offered pages, as far as host memory has room that nothing is copied to yet."""
        most = max(1, self._host.superblocks.num_usable // 2)
        while self._offers and self._host.superblocks.num_live < most:
            chosen: list[Offer] = []
            while self._offers and len(chosen) < STORE_PAGES:
                _, offer = self._offers.popitem(last=False)
                group = self._shared.every[offer.key.group]
                if group.generation_of(offer.page) == offer.generation:
                    chosen.append(offer)
                else:
                    self._counts["host"].dropped += 1
            taken = []
            for offer in chosen:
                page = self._take_host(offer.key.group)
                if page is None:
                    break
                taken.append(page)
            for offer in chosen[len(taken) :]:
                self._offers[offer.key] = offer
            del chosen[len(taken) :]
            if not chosen:
                return
            job = next(self._jobs)
            self._stores[job] = _Store(chosen, taken)
            self._storing.update(offer.key for offer in chosen)
            moves = [
                Move(offer.key.group, offer.page, page)
                for offer, page in zip(chosen, taken, strict=True)
            ]
            self._mover.store(job, moves)

    def _take_host(self, group: int) -> int | None:
        """Returns a page of host memory, held; the least recently used one gives way."""
        counts = [int(place == group) for place in self._groups]
        before = sum(one.num_known for one in self._host.every)
        found = self._host.allocate(counts, clear=False)
        if found is None:
            return None
        self._counts["host"].evicted += before - sum(one.num_known for one in self._host.every)
        return found[group][0]

    def _stored(self, done: Moved) -> None:
        store = self._stores.pop(done.job)
        counts = self._counts["host"]
        log = self._host.log
        if done.fault:
            self._note_fault("to", done.fault)
        for offer, page, checksum in zip(
            store.offers, store.host_pages, done.checksums, strict=True
        ):
            key = offer.key
            self._storing.discard(key)
            device = self._shared.every[key.group]
            is_whole = device.generation_of(offer.page) == offer.generation
            if checksum is None or not is_whole or not self._remember(page, key, checksum):
                counts.dropped += 1
                continue
            counts.stored += 1
            counts.bytes_stored += self._mover.page_bytes[key.group]
            if log is not None and offer.published is not None and key.group == 0:
                log.stored(key.digest, *offer.published)
            if self.files is not None and not self.files.has(key):
                self._unsaved[key] = None
        for place, group in enumerate(self._host.every):
            group.release(
                [
                    page
                    for offer, page in zip(store.offers, store.host_pages, strict=True)
                    if offer.key.group == place
                ]
            )

    def _remember(self, page: int, key: Key, checksum: bytes) -> bool:
        """Makes a page of host memory findable. Returns False if its contents are known as another page."""
        if not self._host.every[key.group].remember(page, key.digest):
            return False
        self._sums[key.group, page] = key.digest, checksum
        return True

    # -- restoring -----------------------------------------------------------------------------

    def progress_of(self, number: int) -> Progress:
        """Returns how far a waiting request is. It no longer waits for files that do not answer in time."""
        found = self._waiting.get(number)
        if found is None:
            return Progress.NEW
        if found.reading and found.progress is Progress.MOVING and found.load is None:
            late = time.monotonic() - found.reading
            if late > READ_SECONDS:
                self._note_late(late)
                found.progress = Progress.FETCHED
        return found.progress

    def settle(self, number: int) -> None:
        """Lets a request go on with what the device has."""
        self._waiting.setdefault(number, _Waiting()).progress = Progress.SETTLED

    def look(self, number: int, first: int, digests: Sequence[bytes], prompt: Prompt) -> None:
        """Looks for pages that another process has and that an arriving request may want.

        digests: of its pages from `first` on, which the device lacks.
        """
        if not self._may_read:
            return
        unknown = [
            Wanted(place, digest)
            for place, digest in enumerate(digests, first)
            # States lie behind few pages, and are looked for with them.
            if not all(self.has(Key(g, digest)) for g in range(len(self._shared.groups)))
        ]
        asked = [source for source in self._sources if source.is_ready]
        if unknown and asked:
            for source in asked:
                source.probe(number, unknown, self._shared.every_window, prompt)
            self._waiting[number] = _Waiting(
                Progress.MOVING, reading=time.monotonic(), num_probes=len(asked)
            )

    def pays(self, keys: Sequence[Key], num_tokens: int) -> bool:
        """Whether bringing these pages is faster than computing the tokens."""
        sizes = self._mover.page_bytes
        num_bytes = {"host": sum(sizes[key.group] for key in keys)}
        if self._sources:
            for key in keys:
                source = None if self.in_host(key) else self._source_of(key)
                if source is not None:
                    num_bytes[source.tier] = num_bytes.get(source.tier, 0) + sizes[key.group]
        return bool(keys) and self.policy.pays(num_tokens, num_bytes, len(keys))

    def fetch(self, number: int, keys: Sequence[Key]) -> bool:
        """Begins to read pages that host memory lacks. Returns False if there are none or no room."""
        if not self._sources:
            return False
        lacking = [key for key in keys if not self.in_host(key)]
        waiting = self._waiting.setdefault(number, _Waiting())
        if not lacking or waiting.progress is Progress.FETCHED:
            return False
        reads: dict[int, list[tuple[Key, int]]] = {}
        for key in lacking:
            if key in self._fetches:
                waiting.unread.add(key)
                continue
            place = next((i for i, one in enumerate(self._sources) if one.has(key)), None)
            page = None if place is None else self._take_host(key.group)
            if place is None or page is None:
                break
            self._fetches[key] = page
            waiting.unread.add(key)
            reads.setdefault(place, []).append((key, page))
        for place, some in reads.items():
            self._sources[place].read(some)
        waiting.reading = time.monotonic()
        waiting.progress = Progress.MOVING if waiting.unread else Progress.FETCHED
        return bool(waiting.unread)

    def load(
        self,
        number: int,
        joined: Sequence[Sequence[int]],
        keys: Sequence[Key],
        published: Sequence[PublishedPage | None],
        num_tokens: int,
    ) -> bool:
        """Decides to copy pages from host memory to the device. False, and no change, without room.

        joined: of each group, pages of the device that must stay meanwhile. keys: what to bring, the first
        pages first; all in host memory. published: of each. num_tokens: whose K and V they are.
        """
        counts = [sum(key.group == place for key in keys) for place in self._groups]
        if not self._shared.fit(counts, joined):
            return False
        for group, pages in zip(self._shared.every, joined, strict=True):
            group.join(pages)
        load = next(self._jobs)
        self._loads[load] = _Load(
            number, list(keys), list(published), [list(pages) for pages in joined], num_tokens,
            time.monotonic(),
        )  # fmt: skip
        waiting = self._waiting.setdefault(number, _Waiting())
        waiting.progress, waiting.load = Progress.MOVING, load
        self._bell.ring()  # copies begin with the next `poll`: this step has looked for the pages
        return True

    def _feed(self, load: int) -> None:
        """Begins further jobs of a load. Ends the load if there are none and none runs."""
        found = self._loads[load]
        for _ in range(BEGUN_AT_ONCE):
            if (
                found.is_whole
                and found.num_jobs < MOST_LOADING
                and found.num_begun < len(found.keys)
            ):
                self._begin(load, found)
        if found.is_over:
            self._end_load(load)

    def _begin(self, load: int, found: _Load) -> None:
        started = time.perf_counter()
        first, host_pages = found.num_begun, list[int]()
        keys = found.keys[first : first + LOAD_PAGES]
        for key in keys:
            host_page = self._host.every[key.group].find(key.digest)
            if host_page is None:
                break  # it gave way to others meanwhile
            host_pages.append(host_page)
        del keys[len(host_pages) :]
        counts = [sum(key.group == place for key in keys) for place in self._groups]
        taken = self._shared.allocate(counts, clear=False) if keys else None
        if taken is None:
            found.is_whole = False
            return
        found.is_whole = first + len(keys) == len(found.keys) or len(keys) == LOAD_PAGES
        fresh, moves = [iter(pages) for pages in taken], list[Move]()
        for key, host_page in zip(keys, host_pages, strict=True):
            self._host.every[key.group].join([host_page])
            _, checksum = self._sums[key.group, host_page]
            moves.append(Move(key.group, next(fresh[key.group]), host_page, checksum))
        for held, pages in zip(found.held, taken, strict=True):
            held += pages
        found.num_begun += len(moves)
        found.num_jobs += 1
        job = next(self._jobs)
        self._mover.load(job, moves)
        self._parts[job] = _Part(load, first, moves, time.perf_counter() - started)

    def _loaded(self, done: Moved) -> None:
        started = time.perf_counter()
        part = self._parts.pop(done.job)
        load = self._loads[part.load]
        load.num_jobs -= 1
        counts = self._counts["host"]
        self.policy.note_copy("host", done.num_bytes, done.seconds)
        if done.fault:
            self._note_fault("from", done.fault)
        for place, (move, checksum) in enumerate(
            zip(part.moves, done.checksums, strict=True), part.first
        ):
            key, published = load.keys[place], load.published[place]
            host, device = self._host.every[key.group], self._shared.every[key.group]
            if done.fault:
                load.is_whole = False
                continue
            if checksum is None:
                self._note_bad("host", "a page in host memory is not what was stored")
                load.is_whole = False
                if host.find(key.digest) == move.host_page:
                    host.forget([move.host_page])
                continue
            if host.find(key.digest) != move.host_page:
                load.is_whole = False  # forgotten meanwhile
                continue
            counts.restored += 1
            counts.bytes_restored += self._mover.page_bytes[key.group]
            log = device.log
            if device.remember(move.device_page, key.digest) and published is not None and log:
                log.stored(key.digest, *published)
        for place, group in enumerate(self._host.every):
            group.release([move.host_page for move in part.moves if move.group == place])
        if not done.fault:
            seconds = part.seconds + time.perf_counter() - started
            self.policy.note_pages(len(part.moves), seconds)
        if load.is_over:
            self._end_load(part.load)

    def _end_load(self, number: int) -> None:
        load = self._loads.pop(number)
        waiting = self._waiting.get(load.number)
        if waiting is None or waiting.load != number:
            self._release(load.held)
            return
        # The request shares these pages before this load releases them. Released pages without an owner would
        # have to be claimed again, one step later.
        self._kept[load.number] = load.held
        waiting.progress = Progress.SETTLED
        self._num_restores += 1
        self._restore_seconds += time.monotonic() - load.started
        if load.is_whole:
            self._num_restored_tokens += load.num_tokens

    def _release(self, held: list[list[int]]) -> None:
        for group, pages in zip(self._shared.every, held, strict=True):
            group.release(pages)

    def give_back(self) -> bool:
        """Ends all loads, since running requests need their pages. Returns False if there were none.

        Waits for the copies that run, which takes milliseconds.
        """
        if not self._loads and not self._kept:
            return False
        numbers = [load.number for load in self._loads.values()]
        for load in list(self._loads):
            self._finish(load)
        for number in numbers:
            self.settle(number)
        while self._kept:
            self._release(self._kept.popitem()[1])
        return True

    def end(self, number: int) -> None:
        """Ends the waiting of a request that runs or ended. Its loads are over when this returns."""
        waiting = self._waiting.pop(number, None)
        if waiting is not None and waiting.load is not None:
            self._finish(waiting.load)
        if number in self._kept:
            self._release(self._kept.pop(number))

    def _finish(self, load: int) -> None:
        """Begins no further job of a load, and waits for its running jobs."""
        if load in self._loads:
            self._loads[load].is_whole = False
            if self._loads[load].is_over:
                self._end_load(load)
        while load in self._loads:
            self._bell.wait(0.01)
            self._take_moved()

    # -- forgetting ----------------------------------------------------------------------------

    def forget(self, digests: Iterable[bytes]) -> None:
        """Drops pages whose contents are not trusted."""
        for digest in digests:
            for place, group in enumerate(self._host.every):
                key = Key(place, digest)
                self._offers.pop(key, None)
                self._unsaved.pop(key, None)
                group.forget(group.match((digest,)))
                for source in self._sources:
                    source.forget(key)

    def forget_all(self) -> None:
        """Drops all pages of host memory, and the files that this process wrote."""
        self._offers.clear()
        self._unsaved.clear()
        self._host.forget_all()
        if self.files is not None:
            self.files.forget_own()

    # -- results of other threads --------------------------------------------------------------

    def poll(self) -> None:
        """Takes what other threads finished, and begins what waits for it."""
        self._take_moved()
        for load in list(self._loads):
            self._feed(load)
        if self._offers:
            self._store_offers()
        for source in self._sources:
            self._poll_source(source)
        if self.files is not None:
            self._poll_writes(self.files)

    def wait(self, seconds: float) -> None:
        """Waits until something is finished, `seconds` at most; then calls `poll`."""
        self._bell.wait(seconds)
        self.poll()

    def _take_moved(self) -> None:
        for done in self._mover.take():
            if done.job in self._stores:
                self._stored(done)
            else:
                self._loaded(done)

    def _poll_source(self, source: Source) -> None:
        counts = self._counts[source.tier]
        for key, checksum, seconds in source.take_read():
            page = self._fetches.pop(key)
            if checksum is not None and self._remember(page, key, checksum):
                size = self._mover.page_bytes[key.group]
                counts.restored += 1
                counts.bytes_restored += size
                self.policy.note_copy(source.tier, size, seconds)
            self._host.every[key.group].release([page])
            for waiting in self._waiting.values():
                if key in waiting.unread:
                    waiting.unread.discard(key)
                    if not waiting.unread and waiting.load is None:
                        waiting.progress = Progress.FETCHED
        for number in source.take_probed():
            found = self._waiting.get(number)
            if found is None or not found.num_probes:
                continue
            found.num_probes -= 1
            if not found.num_probes and found.progress is Progress.MOVING and found.load is None:
                found.progress, found.reading = Progress.NEW, 0.0

    def _poll_writes(self, files: Files) -> None:
        for key, is_written in files.take_written():
            self._host.every[key.group].release([self._writing.pop(key)])
            if is_written:
                self._counts["disk"].stored += 1
                self._counts["disk"].bytes_stored += self._mover.page_bytes[key.group]
            else:
                self._counts["disk"].dropped += 1
        if self._unsaved and files.takes_writes:
            files.write(self._to_write(files))

    def _to_write(self, files: Files) -> Iterator[tuple[Key, int, bytes]]:
        """Yields unsaved pages, each held from now on, as long as files take some."""
        while self._unsaved and files.takes_writes:
            key, _ = self._unsaved.popitem(last=False)
            host = self._host.every[key.group]
            page = host.find(key.digest)
            if page is None or key in self._writing:
                # It left host memory before files took it, or what it was before is being written.
                self._counts["disk"].dropped += 1
                continue
            host.join([page])
            self._writing[key] = page
            yield key, page, self._sums[key.group, page][1]

    @property
    def _may_read(self) -> bool:
        """Whether requests wait for files."""
        return time.monotonic() >= self._avoided_until

    def _note_late(self, seconds: float) -> None:
        self._counts["disk"].late += 1
        self._avoided_until = time.monotonic() + AVOID_SECONDS
        self._log_once(
            "late", "page files did not answer within %.1f s: a request goes on without", seconds
        )

    def _note_bad(self, tier: str, what: str) -> None:
        self._counts[tier].bad += 1
        text = "%s: it is computed again; later ones are only counted"
        self._log_once(tier, text, what, level=logging.ERROR)

    def _note_fault(self, way: str, fault: str) -> None:
        """Logs a copy that could not be made. Pages stay as they are; a request computes what it lacks."""
        text = "pages could not be copied %s host memory (%s): later faults are not logged"
        self._log_once(way, text, way, fault, level=logging.ERROR)

    @property
    def _groups(self) -> range:
        return range(len(self._shared.every))


def _find(
    finds: Sequence[Callable[[bytes], int | None]],
    sums: Mapping[tuple[int, int], tuple[bytes, bytes]],
    key: Key,
) -> tuple[int, bytes] | None:
    """Returns a page of host memory and its checksum; None if another page took its place."""
    page = finds[key.group](key.digest)
    found = None if page is None else sums.get((key.group, page))
    return None if page is None or found is None or found[0] != key.digest else (page, found[1])


def _is_coming(storing: Container[Key], offers: Container[Key], key: Key) -> bool:
    return key in storing or key in offers
