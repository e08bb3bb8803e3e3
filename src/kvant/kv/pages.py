"""Page ownership: ids, reference counts and prefix hashes. No tensors; the pool holds the bytes.

A page is always in exactly one state:

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
    """The hash before a sequence's first page. Sequences with different roots never share a page, even
    with equal tokens.
    """
    digest = hashlib.sha256(b"kvant prefix 1")
    revision = "" if identity.revision is None else f"@{identity.revision}"
    for part in (salt, identity.model, revision, identity.plan):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))  # no two lists encode alike
        digest.update(encoded)
    return digest.digest()


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of one full page: SHA-256 over the hash of the page before it and its own tokens."""
    return hashlib.sha256(parent + _packer(len(tokens))(*tokens)).digest()


@cache
def _packer(count: int) -> Callable[..., bytes]:
    """Return a packer of `count` int64 in native byte order."""
    return Struct(f"={count}q").pack


class PageAllocator:
    """Hands out pages 1 .. num_pages - 1 of a pool.

    num_pages: pages of the pool, the scratch page counted. Everything is O(1) a page except `audit`.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._ref_counts = [0] * num_pages
        self._free = list(range(num_pages - 1, SCRATCH, -1))  # a stack: lowest id first
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest unused first
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._to_zero: list[int] = []
        self._generations = [0] * num_pages  # how often each was handed out

    @property
    def num_usable(self) -> int:
        """Pages that can be held at all."""
        return self._num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_usable - self.num_available

    @property
    def num_idle(self) -> int:
        """Pages without a holder that a later request may find by their prefix."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages with reference count 1, or None (and no change) if there are too few.

        All must be zeroed, see `take_pages_to_zero`. Idle pages are taken last, longest unused first.
        """
        if count > self.num_available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._drop_hash(page)
            self._ref_counts[page] = 1
            self._generations[page] += 1
            pages.append(page)
        self._to_zero += pages
        return pages

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest known prefix of `hashes`. Changes nothing; see `join`."""
        found: list[int] = []
        for digest in hashes:
            page = self._page_of.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def generation_of(self, page: int) -> int | None:
        """Return how often a page was handed out. While this is constant, so are its contents.

        None for a page that no request can find.
        """
        return self._generations[page] if page in self._hash_of else None

    def num_idle_among(self, pages: Iterable[int]) -> int:
        """Return how many of these pages `join` would take from the available ones."""
        return sum(page in self._idle for page in pages)

    def join(self, pages: Iterable[int]) -> None:
        """Add one reference to each page that `match` found."""
        for page in pages:
            assert page in self._hash_of, f"page {page} has no contents to join"
            self._idle.pop(page, None)
            self._ref_counts[page] += 1

    def remember(self, page: int, digest: bytes) -> bool:
        """Make a full, written page findable. False if these contents are known as another page."""
        assert self._ref_counts[page] > 0, f"page {page} has no holder"
        assert page not in self._hash_of, f"page {page} is known already"
        if digest in self._page_of:
            return False
        self._page_of[digest] = page
        self._hash_of[page] = digest
        return True

    def forget(self, pages: Iterable[int]) -> None:
        """Make these pages unfindable, because their contents are not trusted. Holders keep them."""
        for page in pages:
            self._drop_hash(page)
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def release(self, pages: Sequence[int]) -> None:
        """Release one reference to each page of a sequence, in the sequence's order.

        The end of the sequence becomes idle before its beginning, so it is recycled first: a page is
        useless without the pages before it.
        """
        for page in reversed(pages):
            count = self._ref_counts[page] - 1
            assert count >= 0, f"page {page} was given back twice"
            self._ref_counts[page] = count
            if count:
                continue
            if page in self._hash_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def forget_all(self) -> None:
        """Empty the prefix cache."""
        self.forget(list(self._hash_of))

    def take_pages_to_zero(self) -> list[int]:
        """Return pages handed out since the last call; the pool clears them before any write."""
        pages, self._to_zero = self._to_zero, []
        return pages

    def audit(self, holders: Iterable[Sequence[int]]) -> list[str]:
        """Recompute all counts; return each inconsistency as text, [] if there is none.

        holders: the pages of every sequence that holds any.
        """
        faults: list[str] = []
        held = Counter(page for pages in holders for page in pages)
        free, idle = Counter(self._free), set(self._idle)
        for page in range(self._num_pages):
            count, referred = self._ref_counts[page], held[page]
            if count != referred:
                faults.append(f"page {page}: reference count {count}, {referred} sequences hold it")
            places = free[page] + (page in idle) + (referred > 0)
            if places != (0 if page == SCRATCH else 1):
                faults.append(
                    f"page {page}: {free[page]} times free, idle {page in idle}, held {referred} times"
                )
            if page in self._hash_of and (free[page] or page == SCRATCH):
                faults.append(f"page {page}: findable, though its contents mean nothing")
            if page in idle and page not in self._hash_of:
                faults.append(f"page {page}: idle, but no request can find it")
        faults += [
            f"page {page} is none of this pool's" for page in held if page >= self._num_pages
        ]
        if {digest: page for page, digest in self._hash_of.items()} != self._page_of:
            faults.append("the two directions of the prefix map disagree")
        return faults

    def _drop_hash(self, page: int) -> None:
        digest = self._hash_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]
