"""The scheduler's arrays with one row per running sequence, and the sequences' pages.

A sequence keeps its row from admission until it ends or is preempted. The device keeps the newest
token, the length, the page table and the sampling parameters under the same row numbers
(`kvant.execution.device_state`), so a step needs only row numbers from the host.

Only the scheduler writes here and gives out pages. A launched step counts as run before it is read:
`num_computed` and `num_tokens` assume that every draft is accepted, so they may be too high by up to
`num_uncertain`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from kvant.kv.groups import most_pages, superblocks_for
from kvant.kv.offload.moves import Key
from kvant.kv.offload.tiers import Offer, PublishedPage, Tiers
from kvant.kv.pages import SCRATCH, SharedPages, page_hash
from kvant.scheduling.request import FinishReason, Sequence


class RowTable:
    """Arrays with one row per running sequence. Arrays are [num_rows] unless another shape is given.

    pages: [num_rows, num_groups * max_pages] int32, the tables of all groups side by side; entries after a
    sequence's last page, and of released pages, are the scratch page.
    num_pages: pages that each row has in every group. owner: the sequence's number, -1 for a free row.
    num_computed: tokens whose K and V are in the pages once every launched step has run.
    num_tokens: known tokens plus tokens that launched steps will produce.
    num_pending: how many of `num_tokens` launched steps will produce.
    num_uncertain: drafts in launched steps, which may be rejected.
    is_followed: whether a finite token followed the prompt, so that its pages may be shared.
    max_tokens: the limit on prompt and answer together. num_prompt: tokens of the prompt.
    needs_host: the next token depends on rules or log-probabilities that the host computes.
    sampling: [num_rows, 4], `SamplingParams.numbers`. seeds: seeds of sampled tokens.
    log: (row, first column, page ids) of every change of `pages`, once `start_log` was called.
    """

    def __init__(self, num_rows: int, max_pages: int, num_groups: int = 1) -> None:
        self.num_groups, self.max_pages = num_groups, max_pages
        self.pages: NDArray[np.int32] = np.full(
            (num_rows, num_groups * max_pages), SCRATCH, dtype=np.int32
        )
        self.num_pages = np.zeros(num_rows, np.int64)
        self.owner = np.full(num_rows, -1, np.int64)
        self.num_computed = np.zeros(num_rows, np.int64)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_uncertain = np.zeros(num_rows, np.int64)
        self.num_pending = np.zeros(num_rows, np.int64)
        self.is_followed = np.zeros(num_rows, np.bool_)
        self.max_tokens = np.zeros(num_rows, np.int64)
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.needs_host = np.zeros(num_rows, np.bool_)
        self.sampling = np.tile(np.array([0.0, np.inf, 1.0, 0.0]), (num_rows, 1))
        self.seeds = np.zeros(num_rows, np.int64)
        self.log: list[tuple[int, int, Items[int]]] | None = None
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def is_greedy(self) -> NDArray[np.bool_]:
        """[num_rows] bool, true where the temperature is 0."""
        found: NDArray[np.bool_] = self.sampling[:, 0] == 0.0
        return found

    @property
    def num_rows(self) -> int:
        return len(self.owner)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def start_log(self) -> None:
        """Starts to log changes of `pages`. The log's reader must empty it."""
        self.log = []

    def take_row(self, sequence: Sequence, num_cached_tokens: int) -> int:
        """Gives a sequence a row. num_cached_tokens: tokens whose K and V its first pages already hold."""
        row = self._free_rows.pop()
        request, params = sequence.request, sequence.request.params
        self.owner[row] = sequence.number
        self.num_computed[row] = num_cached_tokens
        self.num_tokens[row] = len(sequence.token_ids)
        self.num_uncertain[row] = self.num_pending[row] = 0
        self.is_followed[row] = False
        self.max_tokens[row] = request.max_total_tokens
        self.num_prompt[row] = sequence.num_prompt_tokens
        self.needs_host[row] = sequence.needs_host
        self.sampling[row] = params.numbers
        self.seeds[row] = request.seed
        return row

    def write(self, row: int, start: int, pages: Items[int], group: int = 0) -> None:
        """Sets a row's page ids of a group from column `start` on, and with one group its `num_pages`."""
        if self.num_groups == 1:
            self.num_pages[row] = start + len(pages)
        self.overwrite(row, start, pages, group)

    def overwrite(self, row: int, start: int, pages: Items[int], group: int = 0) -> None:
        """Replaces some of a row's page ids of a group, from column `start` on."""
        start += group * self.max_pages
        end = start + len(pages)
        if len(pages) == 1:
            self.pages[row, start] = pages[0]  # ten times as fast as a slice
        else:
            self.pages[row, start:end] = pages
        if self.log is not None:
            self.log.append((row, start, pages))

    def free_row(self, row: int) -> None:
        """Frees a row. Its page ids are cleared, so no later owner can see them."""
        self.pages[row] = SCRATCH
        self.num_pages[row] = 0
        self.owner[row] = -1
        self._free_rows.append(row)

    def page_table(
        self, rows: NDArray[np.int64], num_pages: int, group: int = 0
    ) -> NDArray[np.int32]:
        """Returns a copy [len(rows), num_pages] of some rows' first page ids in a group."""
        first = group * self.max_pages
        return self.pages[rows, first : first + num_pages]

    def count_launched(
        self,
        rows: NDArray[np.int64],
        counts: NDArray[np.int64],
        samples: NDArray[np.bool_],
        max_drafts: NDArray[np.int64] | None,
    ) -> None:
        """Counts a launched step as run. All arrays are [n], one entry per row of the step.

        counts: tokens without drafts. samples: whether the step produces a token after them. max_drafts: the
        most drafts, None for a step without any.
        """
        if max_drafts is None:
            self.num_computed[rows] += counts
            self.num_tokens[rows] += samples
            self.num_pending[rows] += samples
        else:
            found = np.where(samples, 1 + max_drafts, 0)
            self.num_computed[rows] += counts + max_drafts
            self.num_tokens[rows] += found
            self.num_pending[rows] += found
            self.num_uncertain[rows] += max_drafts

    def count_read(
        self,
        rows: NDArray[np.int64],
        samples: NDArray[np.bool_],
        max_drafts: NDArray[np.int64] | None,
        missing: NDArray[np.int64] | None,
    ) -> None:
        """Corrects the counts of a step that was read. missing: [n], tokens counted but not produced."""
        if max_drafts is None:
            self.num_pending[rows] -= samples
        else:
            self.num_pending[rows] -= np.where(samples, 1 + max_drafts, 0)
            self.num_uncertain[rows] -= max_drafts
        if missing is not None:
            self.num_computed[rows] -= missing
            self.num_tokens[rows] -= missing


MOST_AT_ONCE = 256
"""A sequence with this many pages or more may free them later, while the device works."""


class HeldPages:
    """The scheduler's pages and rows: allocates, shares by equal prefix, caches and frees them.

    prefix_caching: whether pages are shared by their contents. max_num_seqs: the most sequences that hold
    pages at once. max_piece: the most prompt tokens in one step. tiers: hold evicted pages. Its methods write
    a sequence's `held`, `row`, `state_page`, `num_cached_tokens` and hashes.
    """

    def __init__(
        self,
        shared: SharedPages,
        *,
        page_size: int,
        max_num_seqs: int,
        max_model_len: int,
        max_piece: int,
        prefix_caching: bool,
        tiers: Tiers | None = None,
    ) -> None:
        self.shared = shared
        self.tiers = tiers
        self._page_size = page_size
        self._max_piece = max_piece
        self._prefix_caching = prefix_caching
        count = len(shared.groups)
        self.table = RowTable(max_num_seqs, self.count_for(max_model_len), count)
        self._windows = [(g, w) for g, w in enumerate(shared.windows) if w is not None]
        self._sink_pages = [self.count_for(sink) for sink in shared.sinks]
        self._first_kept = np.zeros((count, max_num_seqs), np.int64)
        self._leaving: list[list[list[int]]] = []  # pages by group, see `release`

    def count_for(self, num_tokens: int) -> int:
        """Returns the number of pages for `num_tokens` tokens."""
        return -(-num_tokens // self._page_size)

    def fits_alone(self, num_tokens: int) -> bool:
        """Returns whether the pool can hold a sequence of `num_tokens` tokens if no other one runs."""
        needed = [
            most_pages(window, num_tokens, self._max_piece, self._page_size, sink)
            for window, sink in zip(self.shared.windows, self.shared.sinks, strict=True)
        ]
        sizes = [group.per_superblock for group in self.shared.groups]
        if self.shared.states is not None:
            needed, sizes = [*needed, 1], [*sizes, self.shared.states.per_superblock]
        return superblocks_for(needed, sizes) <= self.shared.num_usable

    # -- allocation ----------------------------------------------------------------------------

    def admit(
        self,
        sequence: Sequence,
        found: list[list[int]],
        first_piece: int,
        *,
        spare: int,
        state: int | None = None,
    ) -> bool:
        """Gives a sequence a row and pages. Returns False, and changes nothing, if there is no room.

        Groups that keep every token get pages for every known token. Groups with a window get pages for the
        first piece, but there must be room for all pages they will hold. found: cached pages of the first
        tokens by group, which the sequence shares. first_piece: its number of tokens. spare: pages of each
        group that must stay free. state: page of a kept state, which must not be evicted for this sequence.
        """
        fresh, joined = self._wanted(sequence, found, first_piece, spare, state)
        if fresh is None:
            return False
        num_found = len(found[0])
        start = num_found * self._page_size
        states = self.shared.states
        for allocator, pages in zip(self.shared.groups, joined, strict=False):
            allocator.join(pages)
        if states is not None:
            states.join(joined[-1])
        taken = self.shared.allocate(fresh)
        assert taken is not None
        if states is not None:
            states.release(joined[-1])
            (sequence.state_page,) = taken.pop()
        sequence.held = [old + new for old, new in zip(found, taken, strict=True)]
        sequence.row = row = self.table.take_row(sequence, start)
        for place, pages in enumerate(sequence.held):
            self.table.write(row, 0, pages, place)
            num_behind = num_found - len(joined[place])
            self._first_kept[place, row] = self._sink_pages[place] + num_behind
        self._count_pages(sequence)
        sequence.num_remembered_pages = num_found
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = start
        return True

    def has_room(
        self, sequence: Sequence, found: list[list[int]], first_piece: int, *, spare: int
    ) -> bool:
        """Returns whether `admit` would succeed."""
        return self._wanted(sequence, found, first_piece, spare)[0] is not None

    def _wanted(
        self,
        sequence: Sequence,
        found: list[list[int]],
        first_piece: int,
        spare: int,
        state: int | None = None,
    ) -> tuple[list[int] | None, list[list[int]]]:
        """Returns how many pages of each group `admit` allocates (None without room), and shared page ids."""
        num_found = len(found[0])
        columns = self.count_for(sequence.num_tokens) - num_found
        joined = [[page for page in pages if page != SCRATCH] for pages in found]
        start = num_found * self._page_size
        fresh = [columns] * len(found)
        checked = [columns + spare] * len(found)
        for group, window in self._windows:
            fresh[group] = self.count_for(start + first_piece) - num_found
            most = most_pages(
                window, sequence.num_tokens, self._max_piece, self._page_size,
                self.shared.sinks[group],
            )  # fmt: skip
            most = max(fresh[group], min(columns, most - len(joined[group])))
            checked[group] = most + spare
        if self.shared.states is not None:
            fresh, checked = [*fresh, 1], [*checked, 1]
            joined = [*joined, [] if state is None else [state]]
        return (fresh if self.shared.fit(checked, joined) else None), joined

    def extend(self, sequence: Sequence, count: int) -> bool:
        """Allocates `count` more pages for a running sequence; False, unchanged, if too few are free."""
        wanted = int(self.table.num_pages[sequence.row]) + count
        return self.reach(sequence, wanted * self._page_size)

    def extend_all(self, sequences: Items[Sequence]) -> bool:
        """Allocates one more page for each sequence. Returns False, unchanged, if too few are free."""
        groups = range(len(self.shared.groups))
        if len(groups) == 1:
            lacking = [sequences]
        else:  # a sequence may lack a page in a group with a window only
            has = self.table.num_pages
            lacking = [[s for s in sequences if len(s.held[g]) <= has[s.row]] for g in groups]
        taken = self.shared.allocate([len(some) for some in lacking])
        if taken is None:
            return False
        for place in groups:
            for sequence, page in zip(lacking[place], taken[place], strict=True):
                pages = sequence.held[place]
                self.table.write(sequence.row, len(pages), (page,), place)
                pages.append(page)
        if len(groups) > 1:
            for sequence in sequences:
                self._count_pages(sequence)
        return True

    def reach(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocates pages until a sequence's first `num_tokens` tokens have one in every group.

        Returns False, and changes nothing, if too few pages are free.
        """
        wanted = self.count_for(num_tokens)
        missing = [max(0, wanted - len(pages)) for pages in sequence.held]
        if not any(missing):
            return True
        taken = self.shared.allocate(missing)
        if taken is None:
            return False
        self._append(sequence, taken)
        return True

    def has_spare(self, count: int) -> bool:
        """Returns whether `count` more pages of each group could be allocated."""
        return self.shared.fit([count] * len(self.shared.groups))

    def trim(self, sequences: Items[Sequence], rows: NDArray[np.int64]) -> None:
        """Releases pages of running sequences that no later token reads, since their group has a window.

        rows: [n] int64, rows of `sequences`. Pages that are needed again if drafts are rejected stay. The
        device runs steps in order, so a launched step reads its pages before a later step overwrites them for
        another sequence.
        """
        table = self.table
        for group, window in self._windows:
            first = table.num_computed[rows] - table.num_uncertain[rows] - window + 1
            first //= self._page_size
            for place in np.flatnonzero(first > self._first_kept[group, rows]).tolist():
                self._trim(sequences[place], group, int(first[place]))

    def _trim(self, sequence: Sequence, group: int, end: int) -> None:
        row, pages = sequence.row, sequence.held[group]
        start = int(self._first_kept[group, row])
        allocator = self.shared.groups[group]
        for index in range(start, min(end, len(pages))):
            page = pages[index]
            if page == SCRATCH:
                continue
            if self._prefix_caching and allocator.generation_of(page) is None:
                self._remember_early(sequence, group, index)
            allocator.release((page,))
            pages[index] = SCRATCH
        self.table.overwrite(row, start, [SCRATCH] * (min(end, len(pages)) - start), group)
        self._first_kept[group, row] = end

    def _remember_early(self, sequence: Sequence, group: int, index: int) -> None:
        """Offers a page to the cache before the sequence releases it.

        Until a finite token has followed the prompt, the page gets a private name that no lookup finds.
        """
        self._hash(sequence, index + 1)
        digest = sequence.prefix_hashes[index + 1]
        allocator, page = self.shared.groups[group], sequence.held[group][index]
        if self.table.is_followed[sequence.row]:
            if allocator.remember(page, digest):
                sequence.own_hashes.append(digest)
            return
        name = digest + sequence.number.to_bytes(8, "little")
        if allocator.remember(page, name):
            sequence.unconfirmed.append((group, name, digest))

    def _append(self, sequence: Sequence, taken: Items[list[int]]) -> None:
        for place, fresh in enumerate(taken):
            if fresh:
                pages = sequence.held[place]
                self.table.write(sequence.row, len(pages), fresh, place)
                pages += fresh
        self._count_pages(sequence)

    def _count_pages(self, sequence: Sequence) -> None:
        if len(sequence.held) > 1:
            self.table.num_pages[sequence.row] = min(len(pages) for pages in sequence.held)

    def release(self, sequence: Sequence, *, may_wait: bool = False) -> None:
        """Frees a sequence's pages and row.

        may_wait: MOST_AT_ONCE pages or more may be freed later by `take_leaving`, while the device works.
        """
        row = sequence.row
        self._forget_unconfirmed(sequence)
        leaving = [[page for page in pages if page != SCRATCH] for pages in sequence.held]
        self._first_kept[:, row] = 0
        self._leaving.append(leaving)
        if not may_wait or sum(map(len, leaving)) < MOST_AT_ONCE:
            self.take_leaving()
        self.table.free_row(row)
        if self.shared.states is not None:
            self.shared.states.release((sequence.state_page,))
        sequence.held = []
        sequence.row = sequence.state_page = -1
        sequence.num_remembered_pages = 0

    def take_leaving(self) -> None:
        """Frees the pages that `release` left for later."""
        for leaving in self._leaving:
            for group, pages in zip(self.shared.groups, leaving, strict=True):
                group.release(pages)
        self._leaving.clear()

    # -- the prefix cache ----------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> list[list[int]]:
        """Returns cached pages of a sequence's longest cached prefix, by group. The last token is excluded.

        Every group must hold the pages that the next token reads; the scratch page stands for pages before a
        window. Empty for a prompt whose log-probabilities are still to be computed.
        """
        groups = self.shared.groups
        if not self._prefix_caching:
            return [[] for _ in groups]
        most = (sequence.num_tokens - 1) // self._page_size
        self._hash(sequence, most)
        if sequence.lacks_prompt_logprobs:
            return [[] for _ in groups]
        hashes = sequence.prefix_hashes[1 : most + 1]
        if not self._windows:
            return [group.match(hashes) for group in groups]
        full = [g for g, window in enumerate(self.shared.windows) if window is None]
        matched = {g: groups[g].match(hashes) for g in full}
        cut = min((len(pages) for pages in matched.values()), default=most)
        cut = self._cut_by_windows(cut, hashes, self._is_found)
        found = []
        for place, (group, window) in enumerate(zip(groups, self.shared.windows, strict=True)):
            if window is None:
                found.append(matched[place][:cut])
                continue
            pages = [SCRATCH] * cut
            for index in self._pages_read(place, window, cut):
                page = group.find(hashes[index])
                assert page is not None, "a page that `_lacking` found is gone"
                pages[index] = page
            found.append(pages)
        return found

    def _pages_read(self, group: int, window: int, cut: int) -> list[int]:
        """Returns indices of the pages, among a group's first `cut`, that later tokens read; in order."""
        first = self._first_page_read(cut, window)
        return [*range(min(self._sink_pages[group], first)), *range(first, cut)]

    def find_restorable(
        self, sequence: Sequence, has: Callable[[Key], bool]
    ) -> tuple[int, list[Key]]:
        """Returns the length, in pages, of the longest prefix that device and tiers hold together, and the
        keys of its pages that the device lacks, in the order of the tokens.

        has: whether a tier has a page. Call after `find_prefix`, which hashes the pages.
        """
        most = (sequence.num_tokens - 1) // self._page_size
        if not self._prefix_caching or sequence.lacks_prompt_logprobs:
            return 0, []
        hashes = sequence.prefix_hashes[1 : most + 1]
        if not self._windows:
            return self._with_state(*self._restorable(hashes, has), hashes, has)

        def is_there(group: int, digest: bytes) -> bool:
            return self._is_found(group, digest) or has(Key(group, digest))

        windows = self.shared.windows
        full = [g for g, window in enumerate(windows) if window is None]
        cut = next(
            (i for i, digest in enumerate(hashes) if not all(is_there(g, digest) for g in full)),
            len(hashes),
        )
        cut = self._cut_by_windows(cut, hashes, is_there)
        lacking = []
        read = [
            range(cut) if window is None else self._pages_read(group, window, cut)
            for group, window in enumerate(windows)
        ]
        for index, group in sorted((i, g) for g, places in enumerate(read) for i in places):
            if not self._is_found(group, hashes[index]):
                lacking.append(Key(group, hashes[index]))
        return cut, lacking

    def _restorable(
        self, hashes: Items[bytes], has: Callable[[Key], bool]
    ) -> tuple[int, list[Key]]:
        """Runs `find_restorable` for groups without windows."""
        finds = [group.find for group in self.shared.groups]
        lacking: list[Key] = []
        if len(finds) == 1:
            (find,) = finds
            for index, digest in enumerate(hashes):
                if find(digest) is None:
                    key = Key(0, digest)
                    if not has(key):
                        return index, lacking
                    lacking.append(key)
            return len(hashes), lacking
        for index, digest in enumerate(hashes):
            keys = [Key(group, digest) for group, find in enumerate(finds) if find(digest) is None]
            if keys and not all(map(has, keys)):
                return index, lacking
            lacking += keys
        return len(hashes), lacking

    def _with_state(
        self, cut: int, lacking: list[Key], hashes: Items[bytes], has: Callable[[Key], bool]
    ) -> tuple[int, list[Key]]:
        """Shortens the prefix of `_restorable` to the last page with a state on the device or in a tier.

        Adds the key of the state if the device lacks it. Without recurrent states nothing changes.
        """
        states, group = self.shared.states, len(self.shared.groups)
        if states is None:
            return cut, lacking
        for end in range(cut, 0, -1):
            state = Key(group, hashes[end - 1])
            is_here = states.find(state.digest) is not None
            if is_here or has(state):
                wanted = set(hashes[:end])
                lacking = [key for key in lacking if key.digest in wanted]
                return end, lacking if is_here else [*lacking, state]
        return 0, []

    def present(self, sequence: Sequence, cut: int) -> list[int]:
        """Returns the cached pages of the first group among the sequence's first `cut` pages."""
        group = self.shared.groups[0]
        pages = [group.find(digest) for digest in sequence.prefix_hashes[1 : cut + 1]]
        return [page for page in pages if page is not None]

    def hash_some(self, sequence: Sequence, most: int) -> bool:
        """Hashes up to `most` more pages of a waiting sequence. Returns whether it may be looked up now.

        That is so if all its pages were hashed before, or at most half of `most` in total have to be.
        """
        whole = (sequence.num_tokens - 1) // self._page_size
        known = len(sequence.prefix_hashes) - 1
        if not self._prefix_caching or known >= whole:
            return True
        self._hash(sequence, min(whole, known + most))
        return whole <= most // 2  # too few to take a step of their own

    def published_of(self, sequence: Sequence, keys: Items[Key]) -> list[PublishedPage | None]:
        """Returns what is published of each page to external indexers; None for pages kept from them."""
        if self.shared.log is None or sequence.request.salt:
            return [None] * len(keys)
        place_of = {digest: i for i, digest in enumerate(sequence.prefix_hashes)}
        return [
            None if key.group else self._published(sequence, place_of[key.digest] - 1)
            for key in keys
        ]

    def _is_found(self, group: int, digest: bytes) -> bool:
        return self.shared.groups[group].find(digest) is not None

    def _cut_by_windows(
        self, cut: int, hashes: Items[bytes], is_there: Callable[[int, bytes], bool]
    ) -> int:
        """Returns the longest prefix, in pages up to `cut`, whose pages every group with a window holds.

        Only pages that the next token reads count. is_there: whether a group has the page of a hash.
        """
        while cut and self._windows:
            shorter = max(
                self._lacking(g, window, hashes, cut, is_there) for g, window in self._windows
            )
            if not shorter:
                break
            cut = min(cut - 1, shorter - 1)
        return cut

    def _first_page_read(self, cut: int, window: int) -> int:
        """Returns the index of the first page that the token after `cut` pages reads."""
        return max(0, cut * self._page_size - window + 1) // self._page_size

    def _lacking(
        self, group: int, window: int, hashes: Items[bytes], cut: int,
        is_there: Callable[[int, bytes], bool],
    ) -> int:  # fmt: skip
        """Returns 1 + the index of the last page that the group lacks for a prefix of `cut` pages, else 0."""
        for index in reversed(self._pages_read(group, window, cut)):
            if not is_there(group, hashes[index]):
                return index + 1
        return 0

    def are_mostly_computed(self, sequence: Sequence, known: int, others: Items[Sequence]) -> bool:
        """Returns whether one of `others` is computing most of the tokens that this sequence has to run.

        known: how many of its first pages are cached already.
        """
        if not others or not self._prefix_caching or sequence.lacks_prompt_logprobs:
            return False
        hashes, left = sequence.prefix_hashes, sequence.num_tokens - known * self._page_size
        common = max(_num_common(hashes, other.prefix_hashes) for other in others) - 1
        return (common - known) * self._page_size * 2 > left

    def remember(self, sequence: Sequence, num_tokens: int) -> None:
        """Offers the full pages of a sequence's first `num_tokens` tokens to the cache.

        The pages must have been computed, and a finite token must have followed the prompt.
        """
        if not self._prefix_caching:
            return
        for group, name, digest in sequence.unconfirmed:
            if self.shared.groups[group].rename(name, digest):
                sequence.own_hashes.append(digest)
        sequence.unconfirmed.clear()
        full, known = num_tokens // self._page_size, sequence.num_remembered_pages
        self._hash(sequence, full)
        for index in range(known, full):
            digest = sequence.prefix_hashes[index + 1]
            is_new: list[int] = []
            for place, pages in enumerate(sequence.held):
                page = pages[index]
                if page != SCRATCH and self.shared.groups[place].remember(page, digest):
                    is_new.append(place)
            if is_new:
                sequence.own_hashes.append(digest)
                log = self.shared.groups[0].log  # only the first group's pages are published
                if is_new[0] == 0 and log is not None and not sequence.request.salt:
                    log.stored(digest, *self._published(sequence, index))
        sequence.num_remembered_pages = max(full, sequence.num_remembered_pages)
        if self.tiers is not None and full:
            self._offer(self.tiers, sequence, 0 if self.tiers.is_full else known, full)

    def _published(self, sequence: Sequence, index: int) -> PublishedPage:
        """Returns what is published of a page: its parent's hash and its tokens."""
        first, last = index * self._page_size, (index + 1) * self._page_size
        parent = sequence.prefix_hashes[index] if index else None
        return PublishedPage(parent, tuple(sequence.token_ids[first:last]))

    def _offer(self, tiers: Tiers, sequence: Sequence, first: int, full: int) -> None:
        """Offers the sequence's cached pages from `first` to `full` to the tiers, and their kept states.

        Groups with a window offer only pages that the sequence still holds.
        """
        keys: list[Key] = []
        lacking: list[tuple[Key, int, int]] = []
        for index in range(first, full):
            for place, pages in enumerate(sequence.held):
                key = Key(place, sequence.prefix_hashes[index + 1])
                if pages[index] == SCRATCH:
                    continue
                keys.append(key)
                if not tiers.in_host(key):
                    page = self.shared.groups[place].find(key.digest)
                    generation = (
                        None if page is None else self.shared.groups[place].generation_of(page)
                    )
                    if page is not None and generation is not None:
                        lacking.append((key, page, generation))
        states = self.shared.states
        if states is not None:
            for index in range(first, full):
                key = Key(len(self.shared.groups), sequence.prefix_hashes[index + 1])
                page = states.find(key.digest)
                generation = None if page is None else states.generation_of(page)
                if page is not None and generation is not None:
                    keys.append(key)
                    if not tiers.in_host(key):
                        lacking.append((key, page, generation))
        published = self.published_of(sequence, [key for key, _, _ in lacking])
        tiers.touch(keys)
        tiers.offer(
            Offer(key, page, generation, one)
            for (key, page, generation), one in zip(lacking, published, strict=True)
        )

    def forget(self, sequence: Sequence, reason: FinishReason) -> None:
        """Removes pages from the cache that the sequence may have filled with wrong values.

        reason: why the sequence ended; see `Scheduler.finish`.
        """
        if reason is FinishReason.NUMERICAL_ERROR:
            for group, pages in zip(self.shared.groups, sequence.held, strict=False):
                group.forget(pages)
        if reason in (FinishReason.NUMERICAL_ERROR, FinishReason.CANCELLED):
            for digest in sequence.own_hashes:
                for group in self.shared.groups:
                    group.forget(group.match((digest,)))
            self._forget_unconfirmed(sequence)
            if self.tiers is not None:
                is_spoilt = reason is FinishReason.NUMERICAL_ERROR
                self.tiers.forget(sequence.prefix_hashes[1:] if is_spoilt else sequence.own_hashes)

    def _forget_unconfirmed(self, sequence: Sequence) -> None:
        for group, name, _ in sequence.unconfirmed:
            allocator = self.shared.groups[group]
            allocator.forget(allocator.match((name,)))
        sequence.unconfirmed.clear()

    def _hash(self, sequence: Sequence, count: int) -> None:
        """Extends a sequence's chain of hashes to its first `count` pages."""
        hashes, page_size = sequence.prefix_hashes, self._page_size
        for index in range(len(hashes) - 1, count):
            tokens = sequence.token_ids[index * page_size : (index + 1) * page_size]
            hashes.append(page_hash(hashes[-1], tokens))

    # -- checking ------------------------------------------------------------------------------

    def audit(self, holders: Items[Sequence]) -> list[str]:
        """Checks pages, counts and rows of all sequences with pages. Returns one sentence per fault."""
        table = self.table
        owned = [
            [[page for page in s.held[place] if page != SCRATCH] for s in holders]
            for place in range(len(self.shared.groups))
        ]
        for leaving in self._leaving:
            for own, pages in zip(owned, leaving, strict=False):
                own.append(pages)
        if self.shared.states is not None:
            owned.append([[s.state_page] for s in holders])
        if self.tiers is not None:
            owned = [own + moved for own, moved in zip(owned, self.tiers.held(), strict=True)]
        faults = self.shared.audit(owned)
        if self.tiers is not None:
            faults += self.tiers.audit()
        rows = [sequence.row for sequence in holders]
        if len(set(rows)) != len(rows):
            faults.append("two sequences share a row of the page table")
        if len(rows) + table.num_free_rows != table.num_rows:
            faults.append("rows of the page table were lost")
        for sequence in holders:
            row = sequence.row
            number = sequence.number
            computed = int(table.num_computed[row] - table.num_uncertain[row])
            for place, held in enumerate(sequence.held):
                pages = table.page_table(np.array([row]), table.max_pages, place)[0].tolist()
                if pages[: len(held)] != held or any(pages[len(held) :]):
                    faults.append(f"request {number}: its row differs from its pages")
                window = self.shared.windows[place]
                first = 0 if window is None else max(0, computed - window + 1) // self._page_size
                if SCRATCH in held[first:] or SCRATCH in held[: self._sink_pages[place]]:
                    faults.append(f"request {number}: lacks a page that its next token reads")
                if self.count_for(computed) > len(held):
                    faults.append(f"request {number}: more tokens computed than its pages hold")
            if table.owner[row] != number or table.num_pages[row] != min(map(len, sequence.held)):
                faults.append(f"request {number}: its row belongs to another sequence")
            if table.num_tokens[row] - table.num_pending[row] != sequence.num_tokens:
                faults.append(f"request {number}: its row counts other tokens than it has")
        return faults


def _num_common(a: list[bytes], b: list[bytes]) -> int:
    """Returns the length of the common prefix of two hash chains, where equal hashes imply equal prefixes."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
