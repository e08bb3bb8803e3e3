"""Where pages lie in memory: groups of layers, and one arena for all of them.

Layers form groups by what they keep: every token, or the last W tokens. A page of a group holds `page_size`
tokens of all its layers, codes and scales. Wide rows of a layer (`spec.WideRows`) keep the last tokens and
some first ones, in a group beside the one of the layer. States of recurrent layers are one group more, the
last one: a page holds all states of one sequence.

The arena is cut into superblocks of equal size. A superblock holds pages of one group while any of them is
used, so groups share memory without a fixed ratio. It is a whole multiple of each group's page: page `p` of
a group is one piece that begins at `p * page_bytes`, and the ids of a group range over the whole arena.

A single group has the arena for itself. There, the pages of each layer lie side by side: neighbouring
pages of one layer are read together, and small pieces far apart cost up to 10 % of attention's speed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from kvant.kv.spec import KVPlan, LayerSpec, Role

ALIGNMENT = 16
"""Bytes that every page and every plane in it begins at a multiple of."""

STATES_ALIGNMENT = 64
"""Bytes that every page begins at a multiple of beside states, whose kernels load whole lines."""

MOST_WASTE = 0.03
"""Share of a superblock that may be padding."""

STATES = 0
"""`PageGroup.window` of states: a sequence has one page of them."""

LONGEST = 1 << 30
"""More tokens than any sequence has."""

_MOST_PAGES = 256
"""Pages of the largest kind in a superblock, as far as `_cut` searches."""


class Owner(NamedTuple):
    """A layer of the target or of the drafter, by its index, or that layer's wide rows."""

    role: Role
    layer: int
    is_wide: bool = False


class _Kept(NamedTuple):
    """What a group keeps: the last `window` tokens, None for all, and the first `sink` ones."""

    window: int | None
    sink: int = 0

    @property
    def order(self) -> tuple[float, int]:
        return (-math.inf if self.window is None else -self.window, self.sink)


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers whose pages are allocated and released together.

    window: tokens that they keep; None for all, STATES for states. pieces: where each layer's bytes begin
    and end in a page.
    offsets: by layer, where each of its planes begins in a page, in the order of `LayerSpec.planes`, or of
    its states' planes.
    used_bytes: of a page, without padding at its end. page_bytes: with it. per_superblock: pages of a
    superblock. sink: first tokens that they keep beside the window.
    """

    window: int | None
    pieces: Mapping[Owner, tuple[int, int]]
    offsets: Mapping[Owner, tuple[int, ...]]
    used_bytes: int
    page_bytes: int
    per_superblock: int
    sink: int = 0

    def most_pages(self, num_tokens: int, piece: int, page_size: int) -> int:
        """As the function `most_pages`."""
        return most_pages(self.window, num_tokens, piece, page_size, self.sink)


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """How an arena is cut.

    groups: at least one; first the one that keeps every token, if there is one; that of states last.
    """

    page_size: int
    superblock_bytes: int
    groups: tuple[PageGroup, ...]

    @property
    def of_tokens(self) -> tuple[PageGroup, ...]:
        """The groups whose pages hold tokens."""
        return tuple(group for group in self.groups if group.window != STATES)

    @property
    def of_states(self) -> PageGroup | None:
        """The group of states, if there is one."""
        return next((group for group in self.groups if group.window == STATES), None)

    def group_of(self, owner: Owner) -> int:
        """The group of a layer that owns storage for tokens."""
        return next(i for i, group in enumerate(self.of_tokens) if owner in group.offsets)

    def holds(self, role: Role) -> bool:
        """Whether it has pages of this model's layers."""
        return any(owner[0] is role for group in self.groups for owner in group.pieces)

    @property
    def waste(self) -> float:
        """The largest share of a superblock that is padding."""
        used = min(group.per_superblock * group.used_bytes for group in self.groups)
        return 1 - used / self.superblock_bytes if self.superblock_bytes else 0.0


def most_pages(
    window: int | None, num_tokens: int, piece: int, page_size: int, sink: int = 0
) -> int:
    """Returns the most pages that a sequence of `num_tokens` tokens holds at once in a group.

    piece: tokens that one step adds at most. They and the window of the first of them may begin within a
    page and end within another one. sink: first tokens that are kept too.
    """
    if window == STATES:
        return min(1, num_tokens)
    pages = -(-num_tokens // page_size)
    if window is None:
        return pages
    return min(pages, -(-(window + piece - 2) // page_size) + 1 + -(-sink // page_size))


def superblocks_for(pages: Sequence[int], per_superblock: Sequence[int]) -> int:
    """Superblocks that these numbers of pages of each group take."""
    return sum(-(-count // size) for count, size in zip(pages, per_superblock, strict=True))


def longest_sequence(layout: ArenaLayout, num_superblocks: int, piece: int) -> int:
    """Tokens of the longest sequence that fits alone, at most LONGEST. piece: see `most_pages`."""
    sizes = [group.per_superblock for group in layout.groups]
    if len(sizes) == 1 and layout.groups[0].window is None:
        return max(0, num_superblocks - 1) * sizes[0] * layout.page_size
    low, high = 0, LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        pages = [g.most_pages(middle, piece, layout.page_size) for g in layout.groups]
        if superblocks_for(pages, sizes) < num_superblocks:
            low = middle
        else:
            high = middle - 1
    return low


def sequences_that_fit(
    layout: ArenaLayout, num_superblocks: int, num_tokens: int, piece: int
) -> int:
    """Sequences of `num_tokens` tokens that hold pages at once while one of them computes its prompt.

    piece: tokens of a prompt in one step at most.
    """
    size = layout.page_size
    sizes = [group.per_superblock for group in layout.groups]
    held = [group.most_pages(num_tokens, 1, size) for group in layout.groups]
    more = [
        group.most_pages(num_tokens, piece, size) - pages
        for group, pages in zip(layout.groups, held, strict=True)
    ]
    low, high = 0, num_superblocks * max(sizes)
    while low < high:
        middle = (low + high + 1) // 2
        pages = [middle * n + extra for n, extra in zip(held, more, strict=True)]
        if superblocks_for(pages, sizes) < num_superblocks:
            low = middle
        else:
            high = middle - 1
    return low


def bytes_per_token_at(plan: KVPlan, num_tokens: int) -> float:
    """Bytes per token of a sequence of this length: the rows that layers keep, and pages of wide rows."""
    sizes = (
        kept_tokens(plan, layer, num_tokens) * layer.bytes_per_token
        + wide_bytes_at(layer, plan.page_size, num_tokens)
        for layer in plan.layers
    )
    return sum(sizes) / num_tokens


def bits_per_value_at(plan: KVPlan, num_tokens: int) -> float:
    """Bits per kept value of a sequence of this length, scales and wide rows included."""
    values = sum(
        kept_tokens(plan, layer, num_tokens) * layer.bytes_per_token_16bit for layer in plan.layers
    )
    return 16 * bytes_per_token_at(plan, num_tokens) * num_tokens / values


def depends_on_length(plan: KVPlan, num_tokens: int = LONGEST) -> bool:
    """Whether a sequence of this length has other bytes per token than a short one."""
    return plan.has_wide_rows or any(
        kept_tokens(plan, layer, num_tokens) < num_tokens for layer in plan.layers
    )


def kept_tokens(plan: KVPlan, layer: LayerSpec, num_tokens: int) -> int:
    """Tokens of a decoding sequence of this length whose rows a layer keeps, without its wide rows.

    A layer with a window keeps whole pages of it, and every token beside recurrent states.
    """
    window = None if plan.has_states else _kept(plan, layer)
    if window is None:
        return num_tokens
    return min(num_tokens, most_pages(window, num_tokens, 1, plan.page_size) * plan.page_size)


def wide_bytes_at(layer: LayerSpec, page_size: int, num_tokens: int) -> int:
    """Bytes of the pages of a layer's wide rows for a sequence of this length; 0 without wide rows."""
    if layer.wide is None or layer.wide_spec is None:
        return 0
    rows = layer.wide
    pages = most_pages(rows.recent, num_tokens, 1, page_size, rows.sink)
    return pages * page_size * layer.wide_spec.bytes_per_token


def lay_out(
    target: KVPlan,
    draft: KVPlan | None = None,
    *,
    windows: bool = True,
    longest: int | None = None,
    states: bool = False,
) -> ArenaLayout:
    """Lays out the pages of a plan, and of a drafter that shares them.

    windows: put layers with windows, and wide rows, into groups of their own; else there is one group. The
    drafter's layers join the groups of their windows: its queries stand where the target's next ones do.
    longest: tokens of a sequence; a window that is not shorter keeps all. states: lay out the target's
    states, too.
    """
    members: dict[_Kept, list[tuple[Owner, LayerSpec]]] = {}
    for plan in (target,) if draft is None else (target, draft):
        for spec in plan.layers:
            if spec.k is None:
                continue
            window = _kept(plan, spec) if windows else None
            if window is not None and longest is not None and window >= longest:
                window = None
            owner = Owner(plan.role, spec.geometry.index)
            members.setdefault(_Kept(window), []).append((owner, spec))
            if spec.wide is not None:
                wide = _Kept(spec.wide.recent, spec.wide.sink) if windows else _Kept(None)
                assert spec.wide_spec is not None
                members.setdefault(wide, []).append((owner._replace(is_wide=True), spec.wide_spec))
    kept = sorted(members, key=lambda one: one.order)
    kept = kept or ([] if states else [_Kept(None)])
    made = [_page(target.page_size, members.get(one, ())) for one in kept]
    if states:
        kept.append(_Kept(STATES))
        made.append(_page_of_states(target))
    alignment = STATES_ALIGNMENT if states else ALIGNMENT
    size, counts = _cut(tuple(used for _, _, used in made), alignment)
    return ArenaLayout(
        target.page_size,
        size,
        tuple(
            PageGroup(
                window=one.window,
                sink=one.sink,
                pieces=ends,
                offsets=offsets,
                used_bytes=used,
                page_bytes=size // count,
                per_superblock=count,
            )
            for one, (ends, offsets, used), count in zip(kept, made, counts, strict=True)
        ),
    )


def _kept(plan: KVPlan, spec: LayerSpec) -> int | None:
    """Tokens of a layer that some layer still reads: its own window, and those of layers that share it.

    A query that looks both ways sees as far back as one that looks back only.
    """
    most = 0
    for reader in plan.layers:
        if reader is spec or reader.geometry.shared_with == spec.geometry.index:
            window = reader.geometry.window
            if window is None:
                return None
            most = max(most, window)
    return most


def _page(
    page_size: int, members: Sequence[tuple[Owner, LayerSpec]]
) -> tuple[dict[Owner, tuple[int, int]], dict[Owner, tuple[int, ...]], int]:
    """`PageGroup.pieces`, `PageGroup.offsets`, and the bytes of a page.

    Planes of scales are small. They lie behind the layer's codes and do not move these off the borders of
    cache lines.
    """
    pieces: dict[Owner, tuple[int, int]] = {}
    found: dict[Owner, tuple[int, ...]] = {}
    at = 0
    for owner, spec in members:
        first, starts = at, [0] * len(spec.planes)
        for is_codes in (True, False):
            for place, (label, plane) in enumerate(spec.planes):
                if label.endswith(".codes") is is_codes:
                    starts[place] = at
                    size = page_size * spec.geometry.num_kv_heads * plane.row_bytes
                    at += -(-size // ALIGNMENT) * ALIGNMENT
        pieces[owner], found[owner] = (first, at), tuple(starts)
    return pieces, found, at


def _page_of_states(
    plan: KVPlan,
) -> tuple[dict[Owner, tuple[int, int]], dict[Owner, tuple[int, ...]], int]:
    """As `_page`, for the states of one sequence."""
    pieces: dict[Owner, tuple[int, int]] = {}
    found: dict[Owner, tuple[int, ...]] = {}
    at = 0
    for spec in plan.layers:
        if spec.states:
            first, starts = at, []
            for plane in (plane for state in spec.states for plane in state.plane_bytes):
                starts.append(at)
                at += -(-plane // ALIGNMENT) * ALIGNMENT
            owner = Owner(plan.role, spec.geometry.index)
            pieces[owner], found[owner] = (first, at), tuple(starts)
    return pieces, found, at


@cache
def _cut(used: tuple[int, ...], alignment: int = ALIGNMENT) -> tuple[int, tuple[int, ...]]:
    """Returns the smallest superblock with at most MOST_WASTE of padding in any group, and its pages of each.

    used: bytes of a page of each group. If no such size is found, the one with the least padding.
    """
    if len(used) == 1:
        return used[0], (1,)
    largest = max(used)
    best: tuple[float, int, tuple[int, ...]] | None = None
    # Few counts first: more make the search many times longer, and one mix in a thousand needs them.
    for away, most in itertools.product((2, 16), range(1, _MOST_PAGES + 1)):
        near = [_counts_near(most * largest, one, away) for one in used]
        for counts in itertools.product(*near):
            unit = alignment * math.lcm(*counts)
            least = max(n * one for n, one in zip(counts, used, strict=True))
            size = -(-least // unit) * unit
            waste = 1 - min(n * one for n, one in zip(counts, used, strict=True)) / size
            if best is None or waste < best[0]:
                best = waste, size, counts
        if best is not None and best[0] <= MOST_WASTE:
            break
    assert best is not None
    return best[1], best[2]


def _counts_near(size: int, one: int, most_away: int) -> list[int]:
    """Numbers of pages of `one` byte count that fill about `size`, at most `most_away` above or below it."""
    middle = max(1, round(size / one))
    away = min(most_away, int(middle * MOST_WASTE))
    return list(range(max(1, middle - max(1, away)), middle + away + 1))
