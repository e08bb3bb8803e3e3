"""The allocator's promises: no page twice, all come back, counts add up, hashes never mix."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvant.kv.pages import (
    SCRATCH,
    CacheIdentity,
    PageAllocator,
    SharedPages,
    Superblocks,
    page_hash,
    root_hash,
)

PAGE_SIZE = 4


def root(salt: str = "", model: str = "m", revision: str | None = None, plan: str = "p") -> bytes:
    return root_hash(CacheIdentity(model, revision, plan), salt=salt)


def chain(parent: bytes, tokens: list[int], page_size: int) -> list[bytes]:
    """Hashes of the full pages of `tokens`."""
    hashes = [parent]
    for start in range(0, len(tokens) - page_size + 1, page_size):
        hashes.append(page_hash(hashes[-1], tokens[start : start + page_size]))
    return hashes[1:]


class PagesUnderLoad(RuleBasedStateMachine):
    """Random sequences come, share, grow, fill pages and go; a plain model of ownership runs beside."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(12)
        self.held: list[list[int]] = []
        self.contents: dict[int, tuple[int, ...]] = {}  # what the test wrote into each held page
        self.hash_of_contents: dict[tuple[int, ...], bytes] = {}
        self.zeroed: set[int] = set()

    @rule(count=st.integers(0, 13))
    def begin(self, count: int) -> None:
        available = self.allocator.num_available
        pages = self.allocator.allocate(count)
        if count > available:
            assert pages is None
            assert self.allocator.num_available == available
            return
        assert pages is not None
        assert len(pages) == count
        taken = {page for sequence in self.held for page in sequence}
        assert len(set(pages)) == count, "a page was handed out twice in one call"
        assert not taken & set(pages), "a page was handed out while it is held"
        assert SCRATCH not in pages
        assert set(self.allocator.take_pages_to_zero()) == set(pages), "a new page must be cleared"
        for page in pages:
            self.contents.pop(page, None)
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.tuples(*[st.integers(0, 2)] * PAGE_SIZE))
    def fill(self, data: st.DataObject, tokens: tuple[int, ...]) -> None:
        sequence = data.draw(st.sampled_from(self.held))
        fresh = [page for page in sequence if page not in self.contents]
        if fresh:
            self.contents[fresh[0]] = tokens
            self.allocator.remember(fresh[0], page_hash(root(), tokens))

    @rule(tokens=st.tuples(*[st.integers(0, 2)] * PAGE_SIZE))
    def join(self, tokens: tuple[int, ...]) -> None:
        found = self.allocator.match([page_hash(root(), tokens)])
        available, (_, woken) = self.allocator.num_available, self.allocator.if_joined(found)
        self.allocator.join(found)
        assert self.allocator.num_available == available - woken
        for page in found:
            assert self.contents[page] == tokens, "a hash led to other contents"
        if found:
            self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.allocator.release(self.held.pop(index))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end_in_disgrace(self, data: st.DataObject) -> None:
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.allocator.forget(pages)
        self.allocator.release(pages)
        for page in pages:
            found = (
                [self.allocator.match([page_hash(root(), self.contents[page])])]
                if (page in self.contents)
                else []
            )
            assert [page] not in found, "a forgotten page was found"

    @rule()
    def forget_all(self) -> None:
        self.allocator.forget_all()
        assert self.allocator.num_idle == 0

    @invariant()
    def adds_up(self) -> None:
        assert self.allocator.audit(self.held) == []
        held = {page for sequence in self.held for page in sequence}
        assert self.allocator.num_held == len(held)
        assert self.allocator.num_available == 11 - len(held)

    def teardown(self) -> None:
        for pages in self.held:
            self.allocator.release(pages)
        assert self.allocator.num_available == self.allocator.num_usable == 11
        everything = self.allocator.allocate(11)
        assert everything is not None
        assert sorted(everything) == list(range(1, 12)), "not all pages came back"
        assert self.allocator.audit([everything]) == []


TestPagesUnderLoad = PagesUnderLoad.TestCase
TestPagesUnderLoad.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

_texts = st.text(max_size=4)
_roots = st.tuples(_texts, _texts, st.none() | _texts, _texts)


@given(a=_roots, b=_roots, tokens=st.lists(st.integers(0, 2**31), min_size=PAGE_SIZE, max_size=12))
def test_pages_of_different_salt_model_revision_or_plan_never_have_the_same_hash(
    a: tuple[str, str, str | None, str], b: tuple[str, str, str | None, str], tokens: list[int]
) -> None:
    first = chain(root(*a), tokens, PAGE_SIZE)
    second = chain(root(*b), tokens, PAGE_SIZE)
    assert (first == second) == (a == b)
    if a != b:
        assert not set(first) & set(second)


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.integers(0, 7))
def test_one_other_token_changes_the_hash_of_its_page_and_of_every_later_one(
    tokens: list[int], place: int
) -> None:
    other = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
    before, after = chain(root(), tokens, PAGE_SIZE), chain(root(), other, PAGE_SIZE)
    changed = [a != b for a, b in zip(before, after, strict=True)]
    assert changed == [page >= place // PAGE_SIZE for page in range(2)]


def test_a_page_that_is_not_full_has_no_hash() -> None:
    assert chain(root(), [1, 2, 3], PAGE_SIZE) == []
    assert len(chain(root(), [1, 2, 3, 4, 5], PAGE_SIZE)) == 1


def filled(allocator: PageAllocator, tokens: list[int]) -> tuple[list[int], list[bytes]]:
    hashes = chain(root(), tokens, PAGE_SIZE)
    pages = allocator.allocate(len(hashes))
    assert pages is not None
    for page, digest in zip(pages, hashes, strict=True):
        assert allocator.remember(page, digest)
    return pages, hashes


def test_contents_survive_their_owner_until_the_page_is_needed() -> None:
    allocator = PageAllocator(5)
    pages, hashes = filled(allocator, list(range(12)))
    allocator.release(pages)
    assert allocator.match(hashes) == pages
    assert allocator.num_available == 4
    taken = allocator.allocate(2)  # one never used, then one that was kept
    assert taken is not None
    assert allocator.match(hashes) == pages[:2], (
        "the end of a sequence must go before its beginning"
    )
    assert allocator.audit([taken]) == []


def test_the_sequence_unused_for_longest_is_recycled_first() -> None:
    allocator = PageAllocator(4)
    old, old_hashes = filled(allocator, [0] * PAGE_SIZE)
    young, young_hashes = filled(allocator, [1] * PAGE_SIZE)
    allocator.release(old)
    allocator.release(young)
    allocator.join(old)  # used again: now the other one is the oldest
    allocator.release(old)
    assert allocator.allocate(2) is not None
    assert allocator.match(old_hashes) == old
    assert allocator.match(young_hashes) == []


def test_the_same_contents_written_twice_are_found_once_and_both_pages_come_back() -> None:
    allocator = PageAllocator(4)
    first, hashes = filled(allocator, [7] * PAGE_SIZE)
    second = allocator.allocate(1)
    assert second is not None
    assert not allocator.remember(second[0], hashes[0])
    allocator.release(second)
    allocator.release(first)
    assert allocator.match(hashes) == first
    assert allocator.num_available == 3
    assert allocator.audit([]) == []


def test_giving_back_twice_is_caught() -> None:
    allocator = PageAllocator(3)
    pages = allocator.allocate(1)
    assert pages is not None
    allocator.release(pages)
    with pytest.raises(AssertionError, match="given back twice"):
        allocator.release(pages)


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda a: a.superblocks.free.append(a.superblocks.free[0]), "2 owners"),
        (lambda a: a.superblocks.free.pop(), "0 owners"),
        (lambda a: a.superblocks.free.append(1), "to be taken"),
        (lambda a: a._ref_counts.__setitem__(1, 2), "reference count 2"),
        (lambda a: a.superblocks.free.append(SCRATCH), "superblock 0"),
        (lambda a: a._page_of.clear(), "two directions"),
        (lambda a: a._idle.__setitem__(3, None), "no request can find it"),
    ],
)
def test_the_audit_sees_damage(damage: object, finding: str) -> None:
    shared = SharedPages(5)
    allocator = shared.groups[0]
    pages, _ = filled(allocator, [1] * PAGE_SIZE)
    assert shared.audit([[pages]]) == []
    assert callable(damage)
    damage(allocator)
    assert any(finding in fault for fault in shared.audit([[pages]]))


SIZES = (3, 1, 2)
"""Pages of a superblock, of each group."""


class GroupsUnderLoad(RuleBasedStateMachine):
    """Sequences take pages of several groups together, share them, drop early ones, and go."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = SharedPages(9, (None, 8, 4), SIZES)
        self.held: list[list[list[int]]] = []
        self.known: dict[tuple[int, int], int] = {}
        self.next = 0

    def _most(self) -> int:
        """Superblocks that no held page lies in."""
        live = {
            page // size
            for sequence in self.held
            for pages, size in zip(sequence, SIZES, strict=True)
            for page in pages
        }
        return 8 - len(live)

    @rule(counts=st.tuples(*[st.integers(0, 7)] * 3))
    def begin(self, counts: tuple[int, ...]) -> None:
        before = [(len(g._idle), g.num_idle) for g in self.shared.groups], self.shared.num_available
        fits = self.shared.fit(counts)
        pages = self.shared.allocate(counts)
        assert (pages is not None) == fits
        if pages is None:
            assert before == (
                [(len(g._idle), g.num_idle) for g in self.shared.groups],
                self.shared.num_available,
            )
            assert sum(-(-n // size) for n, size in zip(counts, SIZES, strict=True)) > 0
            return
        assert [len(some) for some in pages] == list(counts)
        for place, some in enumerate(pages):
            taken = {page for sequence in self.held for page in sequence[place]}
            assert not taken & set(some)
            assert len(set(some)) == len(some)
        zeroed = self.shared.take_pages_to_zero()
        assert [sorted(some) for some in zeroed] == [sorted(some) for some in pages]
        self.held.append(pages)

    @rule(counts=st.tuples(*[st.integers(0, 30)] * 3))
    def all_that_is_free_can_be_had(self, counts: tuple[int, ...]) -> None:
        spare = [
            group.num_own + group.per_superblock * self._most() for group in self.shared.groups
        ]
        assert self.shared.fit(counts) <= all(
            n <= most for n, most in zip(counts, spare, strict=True)
        )
        assert [group.num_available for group in self.shared.groups] == spare
        for place in range(3):
            alone = [0, 0, 0]
            alone[place] = spare[place]
            assert self.shared.fit(alone)
            alone[place] += 1
            assert not self.shared.fit(alone)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.held))
        for place, pages in enumerate(sequence):
            group = self.shared.groups[place]
            for page in pages:
                if group.generation_of(page) is None:
                    self.next += 1
                    assert group.remember(page, self.next.to_bytes(8, "little"))
                    self.known[place, page] = self.next
                    break

    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        found: list[list[int]] = [[], [], []]
        for (place, page), number in self.known.items():
            if self.shared.groups[place].find(number.to_bytes(8, "little")) == page:
                found[place].append(page)
        found = [
            data.draw(st.lists(st.sampled_from(some), unique=True, max_size=3)) if some else []
            for some in found
        ]
        counts = data.draw(st.tuples(*[st.integers(0, 5)] * 3))
        fits = self.shared.fit(counts, found)
        for group, some in zip(self.shared.groups, found, strict=True):
            group.join(some)
        self.held.append(found)
        assert self.shared.fit(counts) == fits

    @precondition(lambda self: self.held)
    @rule(data=st.data(), place=st.integers(0, 2))
    def drop_the_first(self, data: st.DataObject, place: int) -> None:
        pages = data.draw(st.sampled_from(self.held))[place]
        if pages:
            self.shared.groups[place].release([pages.pop(0)])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), spoilt=st.booleans())
    def end(self, data: st.DataObject, spoilt: bool) -> None:
        sequence = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        for group, pages in zip(self.shared.groups, sequence, strict=True):
            if spoilt:
                group.forget(pages)
            group.release(pages)

    @rule()
    def forget_all(self) -> None:
        self.shared.forget_all()
        assert self.shared.num_idle == 0
        self.known.clear()

    @invariant()
    def adds_up(self) -> None:
        holders = [[sequence[place] for sequence in self.held] for place in range(3)]
        assert self.shared.audit(holders) == []
        assert self.shared.num_available == self._most()

    def teardown(self) -> None:
        for sequence in self.held:
            for group, pages in zip(self.shared.groups, sequence, strict=True):
                group.release(pages)
        assert self.shared.num_available == 8


TestGroupsUnderLoad = GroupsUnderLoad.TestCase
TestGroupsUnderLoad.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_group_takes_the_superblock_that_another_one_no_longer_uses() -> None:
    shared = SharedPages(3, (None, 4), (1, 4))
    whole, recent = shared.groups
    found = shared.allocate([1, 3])
    assert found is not None
    assert shared.allocate([1, 0]) is None
    assert recent.remember(found[1][0], b"x")
    recent.release(found[1])
    assert recent.num_idle == 1
    assert shared.allocate([1, 0]) is not None
    assert recent.num_idle == 0
    assert recent.find(b"x") is None
    assert whole.num_held == 2


def test_free_pages_of_the_fullest_superblock_go_first() -> None:
    allocator = PageAllocator(Superblocks(4), 4)
    pages = allocator.allocate(8)
    assert pages is not None
    allocator.release([pages[0], pages[1], pages[4]])
    assert allocator.allocate(1) == [pages[4]]
    assert allocator.allocate(2) is not None
    assert allocator.superblocks.num_live == 2


def test_the_scratch_page_is_the_pools() -> None:
    from kvant.kv.pool import SCRATCH_PAGE

    assert SCRATCH == SCRATCH_PAGE
