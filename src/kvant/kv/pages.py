"""Page ownership: ids, reference counts and prefix hashes. No tensors; the pool holds the bytes.

Pages of several groups lie in one arena (`kvant.kv.groups`). A group has its own ids, and takes superblocks
of the arena for them. A page in a group's superblock is always in exactly one state:

    held      some sequences refer to it; it may be known by a prefix hash, then others can join
    idle      no sequence refers to it, a prefix hash finds its contents: reused oldest first
    free      no sequence refers to it, and its contents mean nothing

    free --allocate--> held --release--> idle (has a hash) or free
    idle --match--> held            idle --allocate, when nothing is free--> held, hash forgotten

Only full pages have hashes, so a page that others may join is never written again: no copying.
Page `SCRATCH` takes the writes of padding and belongs to no sequence.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from struct import Struct

from kvant.kv.events import PageLog
from kvant.kv.groups import STATES, ArenaLayout

SCRATCH = 0
"""Same page as `kvant.kv.pool.SCRATCH_PAGE`, which cannot be imported here (it brings torch)."""


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """Identity of cached pages: everything that decides what their bytes mean and who may share them.

    model: a name or path. plan: what is stored and how it was computed, as text.
    """

    model: str
    revision: str | None
    plan: str


def root_hash(identity: CacheIdentity, *, salt: str = "") -> bytes:
    """Returns the hash before a sequence's first page.

    Sequences with different roots share no page, even with equal tokens.
    """
    digest = hashlib.sha256(b"kvant prefix 1")
    revision = "" if identity.revision is None else f"@{identity.revision}"
    for part in (salt, identity.model, revision, identity.plan):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))  # no two lists encode alike
        digest.update(encoded)
    return digest.digest()


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the hash of one full page: SHA-256 over the hash of the page before it and its own tokens."""
    return hashlib.sha256(parent + _packer(len(tokens))(*tokens)).digest()


@cache
def _packer(count: int) -> Callable[..., bytes]:
    """Returns a packer of `count` int64 in native byte order."""
    return Struct(f"={count}q").pack


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The pages of one group now. window, sink: as in `PageGroup`. shared: held by
    several sequences. idle: see above. usable: if the group had the whole arena.
    """

    window: int | None
    sink: int
    held: int
    shared: int
    idle: int
    usable: int


class Superblocks:
    """Superblocks of an arena, lent to groups of pages. The only place that knows which group has which.

    A superblock is live while a sequence holds one of its pages, resting while it holds only pages that
    a prefix hash finds, else free. Groups take free ones first, then the one that has rested longest.
    """

    def __init__(self, num_superblocks: int) -> None:
        self.num_usable = num_superblocks - 1  # the first one holds the scratch pages
        self.free = list(range(num_superblocks - 1, SCRATCH, -1))  # a stack: lowest first
        self.resting: OrderedDict[int, PageAllocator] = OrderedDict()  # longest first

    @property
    def num_takeable(self) -> int:
        """Superblocks that a group could take now."""
        return len(self.free) + len(self.resting)

    @property
    def num_live(self) -> int:
        return self.num_usable - self.num_takeable


class PageAllocator:
    """Hands out the pages of one group.

    superblocks: shared with other groups; or the number of pages, the scratch page counted, of an arena
    for this group alone. per_superblock: pages of a superblock. Everything is O(1) a page, or
    O(per_superblock) a superblock, except `audit`.
    """

    def __init__(self, superblocks: int | Superblocks, per_superblock: int = 1) -> None:
        if not isinstance(superblocks, Superblocks):
            superblocks = Superblocks(superblocks)
        self.superblocks = superblocks
        self.per_superblock = per_superblock
        self.num_pages = (superblocks.num_usable + 1) * per_superblock
        self._ref_counts = [0] * self.num_pages
        self._held_in = [0] * (superblocks.num_usable + 1)  # held pages of each superblock
        self._num_held = self._num_idle = self._num_shared = 0
        # In live superblocks only: unused pages, by superblock, and idle pages, longest unused first.
        self._spots: dict[int, list[int]] = {}
        self._num_spots = 0
        self._by_held: list[dict[int, None]] = [{} for _ in range(per_superblock + 1)]
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self.log: PageLog | None = None  # records hashes that are dropped
        self._to_zero: list[int] = []
        self._generations = [0] * self.num_pages  # how often each was handed out

    @property
    def num_usable(self) -> int:
        """Pages that can be held at all, if no other group holds any."""
        return self.superblocks.num_usable * self.per_superblock

    @property
    def num_own(self) -> int:
        """Pages without a holder in live superblocks of this group."""
        return self._num_spots + len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now, idle ones included, if no other group takes any."""
        return self.num_own + self.superblocks.num_takeable * self.per_superblock

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def num_idle(self) -> int:
        """Pages without a holder that a later request may find by their prefix."""
        return self._num_idle

    @property
    def num_shared(self) -> int:
        """Pages that several sequences refer to."""
        return self._num_shared

    @property
    def num_known(self) -> int:
        """Pages that a request may find by their prefix, with a holder or without."""
        return len(self._hash_of)

    def lacks(self, count: int) -> int:
        """Superblocks that `count` more pages would take."""
        return -(-max(0, count - self.num_own) // self.per_superblock)

    def allocate(
        self, count: int, *, spare: int | None = None, clear: bool = True
    ) -> list[int] | None:
        """Returns `count` pages with reference count 1, or None (and no change) if there are too few.

        All must be zeroed, see `take_pages_to_zero`. Idle pages are taken last, longest unused first.
        spare: superblocks that may be taken, though idle pages would do; all without. clear: without it
        they need no zeroing, because the caller overwrites them whole.
        """
        lacking = self.lacks(count)
        shared = self.superblocks
        if lacking > shared.num_takeable:
            return None
        if spare is None:
            spare = shared.num_takeable - lacking
        pages: list[int] = []
        while len(pages) < count:
            left = count - len(pages)
            if self._num_spots:
                pages += self._take_spots(left)
            elif len(self._idle) < left:
                self._take_superblock(left, pages)
            elif spare > 0 and shared.free:
                spare -= 1
                self._take_superblock(left, pages)
            else:
                page, _ = self._idle.popitem(last=False)
                self._evict(page)
                self._hold_in_live(page)
                pages.append(page)
        for page in pages:
            self._ref_counts[page] = 1
            self._generations[page] += 1
        self._num_held += count
        if clear:
            self._to_zero += pages
        return pages

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Returns the pages of the longest known prefix of `hashes`. Changes nothing; see `join`."""
        found: list[int] = []
        for digest in hashes:
            page = self._page_of.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def find(self, digest: bytes) -> int | None:
        """Returns the page with these contents."""
        return self._page_of.get(digest)

    def known(self) -> list[tuple[bytes, int]]:
        """Returns every findable page, and its hash."""
        return list(self._page_of.items())

    def generation_of(self, page: int) -> int | None:
        """Returns how often a page was handed out. While this is constant, so are its contents.

        None for a page that no request can find.
        """
        return self._generations[page] if page in self._hash_of else None

    def if_joined(self, pages: Iterable[int]) -> tuple[int, int]:
        """Returns what `join` would change: by how much `num_own` falls, and superblocks that become live."""
        woken: Counter[int] = Counter()
        own = 0
        for page in pages:
            if not self._ref_counts[page]:
                superblock = page // self.per_superblock
                if self._held_in[superblock]:
                    own += 1
                else:
                    woken[superblock] += 1
        return own - sum(self.per_superblock - n for n in woken.values()), len(woken)

    def join(self, pages: Iterable[int]) -> None:
        """Adds one reference to each page that `match` found."""
        for page in pages:
            assert page in self._hash_of, f"page {page} has no contents to join"
            if not self._ref_counts[page]:
                self._num_idle -= 1
                self._num_held += 1
                if self.per_superblock == 1:  # what follows, for a superblock of one page
                    del self.superblocks.resting[page]
                    self._held_in[page] = 1
                else:
                    self._wake(page // self.per_superblock)
                    del self._idle[page]
                    self._hold_in_live(page)
            self._ref_counts[page] += 1
            self._num_shared += self._ref_counts[page] == 2

    def remember(self, page: int, digest: bytes) -> bool:
        """Makes a full, written page findable. Returns False if its contents are known as another page."""
        assert self._ref_counts[page] > 0, f"page {page} has no holder"
        assert page not in self._hash_of, f"page {page} is known already"
        if digest in self._page_of:
            return False
        self._page_of[digest] = page
        self._hash_of[page] = digest
        return True

    def rename(self, old: bytes, new: bytes) -> bool:
        """Lets contents that were remembered as `old` be found as `new`, if they are still there.

        False if they are not, or if `new` is known already; then they are forgotten.
        """
        page = self._page_of.get(old)
        if page is None:
            return False
        if new in self._page_of:
            self.forget([page])
            return False
        del self._page_of[old]
        if self.log is not None:
            self.log.removed(old)
        self._page_of[new] = page
        self._hash_of[page] = new
        return True

    def forget(self, pages: Iterable[int]) -> None:
        """Makes these pages unfindable, because their contents are not trusted. Holders keep them."""
        for page in pages:
            if page not in self._hash_of:
                continue
            if self._ref_counts[page]:
                self._drop_hash(page)
                continue
            superblock = page // self.per_superblock
            self._evict(page)
            if self._held_in[superblock]:
                del self._idle[page]
                self._add_spot(page)
            elif not any(p in self._hash_of for p in self._pages_of(superblock)):
                del self.superblocks.resting[superblock]
                self.superblocks.free.append(superblock)

    def release(self, pages: Sequence[int]) -> None:
        """Releases one reference to each page of a sequence, in the sequence's order.

        The end of the sequence becomes idle before its beginning, so it is recycled first: a page is
        useless without the pages before it.
        """
        for page in reversed(pages):
            count = self._ref_counts[page] - 1
            assert count >= 0, f"page {page} was given back twice"
            self._ref_counts[page] = count
            self._num_shared -= count == 1
            if count:
                continue
            self._num_held -= 1
            if self.per_superblock == 1 and page in self._hash_of:  # what follows, for one page
                self._held_in[page] = 0
                self._num_idle += 1
                self.superblocks.resting[page] = self
                continue
            superblock = page // self.per_superblock
            self._move(superblock, -1)
            if page in self._hash_of:
                self._num_idle += 1
                self._idle[page] = None
            else:
                self._add_spot(page)
            if not self._held_in[superblock]:
                self._rest(superblock)

    def forget_all(self) -> None:
        """Empties the prefix cache."""
        self.forget(list(self._hash_of))

    def take_pages_to_zero(self) -> list[int]:
        """Returns pages handed out since the last call; the pool clears them before any write."""
        pages, self._to_zero = self._to_zero, []
        return pages

    def surrender(self, superblock: int) -> None:
        """Forgets the idle pages of a superblock that another group takes."""
        for page in self._pages_of(superblock):
            if page in self._hash_of:
                self._evict(page)

    def audit(self, holders: Iterable[Sequence[int]]) -> list[str]:
        """Recomputes all counts; returns each inconsistency as text, [] if there is none.

        holders: the pages of every sequence that holds any.
        """
        faults: list[str] = []
        held = Counter(page for pages in holders for page in pages)
        shared, size = self.superblocks, self.per_superblock
        held_in = Counter(page // size for page in held)
        spots = Counter(page for pages in self._spots.values() for page in pages)
        free = Counter(shared.free)
        num_idle = 0
        # No other page can be at fault: they are held, free, idle and found nowhere, as they should be.
        told = {page for page, count in enumerate(self._ref_counts) if count}
        told.update(held, spots, self._idle, self._hash_of, *map(self._pages_of, held_in))
        for page in sorted(told.intersection(range(self.num_pages))):
            superblock = page // size
            count, referred = self._ref_counts[page], held[page]
            if count != referred:
                faults.append(f"page {page}: reference count {count}, {referred} sequences hold it")
            is_known = page in self._hash_of
            rests = shared.resting.get(superblock) is self
            is_idle = page in self._idle or (rests and is_known)
            num_idle += is_idle
            is_live = superblock in held_in
            if is_live and (free[superblock] or superblock in shared.resting):
                faults.append(f"superblock {superblock}: live, and to be taken")
            if page in self._idle and not is_live:
                faults.append(f"page {page}: idle in a superblock without holders")
            if page in self._idle and not is_known:
                faults.append(f"page {page}: idle, but no request can find it")
            places = spots[page] + is_idle + (referred > 0)
            wanted = is_live or is_idle
            if places != wanted:
                faults.append(
                    f"page {page}: {spots[page]} times free, idle {is_idle}, held {referred} times"
                )
            if is_known and (spots[page] or superblock == SCRATCH or free[superblock]):
                faults.append(f"page {page}: findable, though its contents mean nothing")
            if superblock == SCRATCH and (referred or spots[page]):
                faults.append(f"page {page} lies in the scratch superblock")
        for superblock, count in enumerate(self._held_in):
            if count != held_in[superblock]:
                faults.append(f"superblock {superblock}: {count} pages counted as held")
            bucket = self._by_held[count] if count < len(self._by_held) else {}
            if (superblock in self._spots) != (superblock in bucket):
                faults.append(f"superblock {superblock}: not where its free pages are looked for")
        faults += [f"page {page} is none of this pool's" for page in held if page >= self.num_pages]
        if {digest: page for page, digest in self._hash_of.items()} != self._page_of:
            faults.append("the two directions of the prefix map disagree")
        counted = (len(held), num_idle, sum(spots.values()))
        if counted != (self._num_held, self._num_idle, self._num_spots):
            faults.append("held, idle or free pages are counted wrongly")
        if self._num_shared != sum(count > 1 for count in held.values()):
            faults.append("shared pages are counted wrongly")
        return faults

    # -- superblocks ---------------------------------------------------------------------------

    def _pages_of(self, superblock: int) -> range:
        first = superblock * self.per_superblock
        return range(first, first + self.per_superblock)

    def _take_superblock(self, most: int, pages: list[int]) -> None:
        """Makes a superblock live, and appends up to `most` of its pages, which are held from now on."""
        shared = self.superblocks
        kept: list[int] = []
        if shared.free:
            superblock = shared.free.pop()
            fresh = list(self._pages_of(superblock))
        else:
            superblock, owner = shared.resting.popitem(last=False)
            if owner is not self:
                owner.surrender(superblock)
            fresh = []
            for page in self._pages_of(superblock):
                (kept if page in self._hash_of else fresh).append(page)
            while kept and len(fresh) < most:
                page = kept.pop(0)
                self._evict(page)
                fresh.append(page)
        taken = fresh[:most]
        pages += taken
        self._held_in[superblock] = len(taken)
        if len(fresh) > len(taken):
            self._spots[superblock] = fresh[: len(taken) - 1 : -1]
            self._num_spots += len(fresh) - len(taken)
            self._by_held[len(taken)][superblock] = None
        for page in reversed(kept):  # older than anything idle in a live superblock
            self._idle[page] = None
            self._idle.move_to_end(page, last=False)

    def _take_spots(self, most: int) -> list[int]:
        """Up to `most` free pages of the fullest superblock that has some; they are held from now on."""
        bucket = next(bucket for bucket in reversed(self._by_held) if bucket)
        superblock = next(reversed(bucket))
        spots = self._spots[superblock]
        taken = [spots.pop() for _ in range(min(most, len(spots)))]
        self._num_spots -= len(taken)
        if not spots:
            del self._spots[superblock], bucket[superblock]
        self._move(superblock, len(taken))
        return taken

    def _add_spot(self, page: int) -> None:
        superblock = page // self.per_superblock
        self._num_spots += 1
        if superblock in self._spots:
            self._spots[superblock].append(page)
        else:
            self._spots[superblock] = [page]
            self._by_held[self._held_in[superblock]][superblock] = None

    def _hold_in_live(self, page: int) -> None:
        self._move(page // self.per_superblock, 1)

    def _move(self, superblock: int, by: int) -> None:
        """Counts more or fewer held pages of a superblock."""
        before = self._held_in[superblock]
        self._held_in[superblock] = before + by
        if superblock in self._spots:
            del self._by_held[before][superblock]
            self._by_held[before + by][superblock] = None

    def _rest(self, superblock: int) -> None:
        """Lets a superblock rest, because none of its pages has a holder. Without idle pages it is free."""
        spots = self._spots.pop(superblock, ())
        if spots:
            self._num_spots -= len(spots)
            del self._by_held[0][superblock]
        if len(spots) == self.per_superblock:
            self.superblocks.free.append(superblock)
            return
        for page in self._pages_of(superblock):
            self._idle.pop(page, None)
        self.superblocks.resting[superblock] = self

    def _wake(self, superblock: int) -> None:
        """Ends a superblock's rest, because one of its idle pages gets a holder."""
        if self._held_in[superblock]:
            return
        del self.superblocks.resting[superblock]
        for page in self._pages_of(superblock):
            if page in self._hash_of:
                self._idle[page] = None
            else:
                self._add_spot(page)

    def _evict(self, page: int) -> None:
        self._num_idle -= 1
        self._drop_hash(page)

    def _drop_hash(self, page: int) -> None:
        digest = self._hash_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]
            if self.log is not None:
                self.log.removed(digest)


def shared_pages(num_superblocks: int, layout: ArenaLayout | None) -> SharedPages:
    """Returns the pages of an arena; without a layout, every superblock is a page of all layers."""
    if layout is None:
        return SharedPages(num_superblocks)
    groups = layout.groups
    return SharedPages(
        num_superblocks,
        [g.window for g in groups],
        [g.per_superblock for g in groups],
        [g.sink for g in groups],
    )


class SharedPages:
    """The pages of all groups of an arena.

    num_superblocks: the first one, of the scratch pages, counted. windows: as in `PageGroup`, of each group.
    per_superblock: pages of a superblock, of each group. sinks: first tokens that each group keeps beside its
    window, none by default. One group of whole superblocks without these.

    groups, windows, sinks: of pages for tokens. states: of pages for states, None without them. every,
    every_window: of both. Where counts or pages of each group are given, those of states come last, and may
    be left out.
    """

    def __init__(
        self,
        num_superblocks: int,
        windows: Sequence[int | None] = (None,),
        per_superblock: Sequence[int] = (1,),
        sinks: Sequence[int] | None = None,
    ) -> None:
        self.superblocks = Superblocks(num_superblocks)
        made = [PageAllocator(self.superblocks, n) for n in per_superblock]
        self._all = self.every = tuple(made)
        self.every_window = tuple(windows)
        self.states = made.pop() if windows[-1] == STATES else None
        self.groups = tuple(made)
        self.windows = tuple(windows[: len(made)])
        self.sinks = (0,) * len(made) if sinks is None else tuple(sinks[: len(made)])

    @property
    def log(self) -> PageLog | None:
        """Told what the first group stores and drops; it keeps every token."""
        return self.groups[0].log

    @log.setter
    def log(self, log: PageLog | None) -> None:
        self.groups[0].log = log

    @property
    def num_usable(self) -> int:
        """Superblocks that can be live at all. With one group: pages, as in the next three."""
        return self.superblocks.num_usable

    @property
    def num_available(self) -> int:
        """Superblocks that a group could take."""
        return self.superblocks.num_takeable

    @property
    def num_held(self) -> int:
        """Superblocks with pages that sequences hold."""
        return self.superblocks.num_live

    @property
    def num_idle(self) -> int:
        """Superblocks that hold only pages which a later request may find by their prefix."""
        return len(self.superblocks.resting)

    @property
    def by_group(self) -> tuple[GroupPages, ...]:
        """What each group has now, those of states last."""
        windows = (*self.windows, STATES)
        sinks = (*self.sinks, 0)
        return tuple(
            GroupPages(window, sink, one.num_held, one.num_shared, one.num_idle, one.num_usable)
            for window, sink, one in zip(windows, sinks, self._all, strict=False)
        )

    def fit(self, counts: Sequence[int], joined: Sequence[Sequence[int]] = ()) -> bool:
        """Whether `allocate` could hand out that many pages of each group, if `joined` were joined first.

        joined: pages of each group.
        """
        if len(counts) == 1 and not joined:
            return self.groups[0].lacks(counts[0]) <= self.superblocks.num_takeable
        takeable = self.superblocks.num_takeable
        for place, (group, count) in enumerate(zip(self._all, counts, strict=False)):
            own = group.num_own
            if joined:
                fewer, woken = group.if_joined(joined[place])
                own -= fewer
                takeable -= woken
            takeable -= -(-max(0, count - own) // group.per_superblock)
        return takeable >= 0

    def allocate(self, counts: Sequence[int], *, clear: bool = True) -> list[list[int]] | None:
        """Returns that many pages of each group, or None (and no change) if there are too few.

        clear: see `PageAllocator.allocate`.
        """
        lacking = [group.lacks(count) for group, count in zip(self._all, counts, strict=False)]
        spare = self.superblocks.num_takeable - sum(lacking)
        if spare < 0:
            return None
        found = []
        for place, (group, count) in enumerate(zip(self._all, counts, strict=False)):
            pages = group.allocate(count, spare=spare, clear=clear)
            assert pages is not None
            spare = self.superblocks.num_takeable - sum(lacking[place + 1 :])
            found.append(pages)
        return found

    def forget_all(self) -> None:
        """Empties the prefix cache."""
        for group in self._all:
            group.forget_all()

    def take_pages_to_zero(self) -> list[list[int]]:
        """Returns each group's pages of tokens handed out since the last call. See `Arena.zero`."""
        if self.states is not None:
            self.states.take_pages_to_zero()  # nothing reads them before they are written
        return [group.take_pages_to_zero() for group in self.groups]

    def audit(self, holders: Sequence[Sequence[Sequence[int]]]) -> list[str]:
        """Recomputes all counts; returns each inconsistency as text.

        holders: of each group, the pages of every sequence that holds any.
        """
        faults = [
            fault if len(self._all) == 1 else f"group {place}: {fault}"
            for place, group in enumerate(self._all)
            for fault in group.audit(holders[place])
        ]
        owners: Counter[int] = Counter(self.superblocks.free)
        owners.update(list(self.superblocks.resting))
        for place, group in enumerate(self._all):
            owners.update(
                {page // group.per_superblock for pages in holders[place] for page in pages}
            )
        faults += [
            f"superblock {superblock} has {owners[superblock]} owners"
            for superblock in range(self.num_usable + 1)
            if owners[superblock] != (superblock != SCRATCH)
        ]
        return faults
