"""How a layer's attention is split: shapes of programs, and host-side bounds on the number of items.

The device assigns work to programs (`workmap`), because the lengths are there. Numbers here are bounds,
and programs past the last item return. Nothing here needs a device, torch or Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from kvant.attention.launching import Shape
from kvant.attention.need import FIXED_SPLIT

NEVER_SPLIT = 1 << 24
"""Minimum tiles per item that no sequence reaches, so items are never split."""

MOST_JOINED = 16
"""Maximum query rows per sequence and KV head that the attention kernel joins without another launch."""

FEWEST_JOINED = 64
"""Minimum sequences times KV heads for that. With fewer, a long sequence has over a hundred items, and
many programs join them faster than one.
"""

LONGEST_JOINED = 2048
"""Maximum window that the attention kernel joins with fewer: such a sequence never has that many items."""

LEAST_WIDE = 8
"""Minimum tiles of an item of the kernel for many rows if sequences have different numbers of queries."""

MOST_SCANNED = 128
"""Maximum sequences among which every program finds its work itself."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The launches of one layer's attention in one step.

    tokens: number of queries. heads: of K and V; group: query heads per KV head. blocks: maximum number of
    blocks of query rows. items: programs per KV head. target, least: as in `workmap.tiles_per_split`. fixed:
    items end at fixed places, every `least` tiles. parts: items leave float32 partial results. direct: an
    item that has its rows alone writes the output itself; false if the joining kernel must rotate all outputs
    back. join: rows, rounded up to a power of two, that the attention kernel joins itself; 0 leaves parts to
    `combine`. skewed: sequences have unlike numbers of queries, and one may have most of the items. listed:
    the work map is written once for all layers, because there are too many sequences to scan.
    """

    shape: Shape
    tokens: int
    num_seqs: int
    heads: int
    group: int
    blocks: int
    items: int
    target: int
    least: int
    fixed: bool
    parts: bool
    direct: bool
    join: int
    listed: bool
    skewed: bool

    @property
    def combines(self) -> bool:
        """Whether a second launch joins the parts."""
        return self.parts and not self.join

    @property
    def early(self) -> bool:
        """Whether programs find their work while the kernel before, which wrote no lengths, still runs."""
        return not (self.listed or self.fixed)

    @property
    def parts_joined_at_once(self) -> tuple[int, int]:
        """Items of a row that `combine` joins at once, and its warps."""
        if self.fixed or (self.items <= 8 * self.blocks and not self.skewed):
            return 8, 1  # fixed items are joined in one order in every batch
        return (32, 1) if self.items <= 64 * self.blocks else (64, 2)


@lru_cache(maxsize=1024)  # layers have equal cuts, and so do most steps
def cut_step(
    shape: Shape,
    *,
    tokens: int,
    num_seqs: int,
    max_seqlen_q: int,
    heads: int,
    group: int,
    multiprocessors: int,
    rotated: bool,
    joins: bool = True,
    wide: bool = False,
    fixed_seqlen_kv: int | None = None,
    window: int = 0,
) -> Cut:
    """Returns the cut of a step; arguments named like fields of `Cut` mean the same.

    rotated: V is stored rotated. joins: the attention kernel can join parts.
    wide: use the kernel for many rows. fixed_seqlen_kv: the longest length
    if items must end at fixed positions, for batch invariance; None if they may end anywhere.
    window: tokens that a query sees, 0 for all.
    """
    blocks = min(
        num_seqs * -(-max_seqlen_q * group // shape.rows),
        tokens * group // shape.rows + min(num_seqs, tokens),
        tokens * -(-group // shape.rows),
    )
    # For example, sequences that decode one token beside pieces of prompts.
    uneven = tokens < num_seqs * max_seqlen_q
    if wide and uneven:
        target = max(1, shape.programs * multiprocessors // heads)
    else:
        aimed_at = wide_items_aimed_at if wide else items_aimed_at
        target = aimed_at(shape, blocks, multiprocessors, heads)
    fixed = fixed_seqlen_kv is not None
    if fixed_seqlen_kv is not None:
        least = max(1, FIXED_SPLIT // shape.tile)
        items = blocks * -(-fixed_seqlen_kv // (least * shape.tile))
        splits = items > blocks
    else:
        splits = blocks * heads < 4 * shape.programs * multiprocessors
        least = (LEAST_WIDE if wide and uneven else shape.least) if splits else NEVER_SPLIT
        items = blocks + target if splits else blocks
    rows = max_seqlen_q * group
    # In an uneven step one program would join all parts of a long sequence, of several queries.
    few = (
        joins
        and not (wide or fixed or uneven)
        and 0 < rows <= MOST_JOINED
        and num_seqs <= MOST_SCANNED
    )
    short = num_seqs * heads >= FEWEST_JOINED or 0 < window <= LONGEST_JOINED
    join = 1 << (rows - 1).bit_length() if few and short else 0
    direct = wide or join > 0 or not rotated
    return Cut(
        shape=shape,
        tokens=tokens,
        num_seqs=num_seqs,
        heads=heads,
        group=group,
        blocks=blocks,
        items=items,
        target=target,
        least=least,
        fixed=fixed,
        parts=splits or not direct,
        direct=direct,
        join=join,
        listed=num_seqs > MOST_SCANNED and shape.rows == 16 and not wide,
        skewed=uneven and shape.rows == 16,
    )


def items_aimed_at(shape: Shape, blocks: int, multiprocessors: int, heads: int) -> int:
    """Returns how many items to make besides one per row block, so that programs fill whole rounds.

    blocks: maximum number of row blocks of the step.
    """
    slots = max(1, shape.programs * multiprocessors // heads)
    if blocks >= 2 * slots:
        return max(1, blocks // 2)  # enough for all: only rows twice as long as most are cut
    if shape.rows > 16:
        return max(1, -(-blocks // slots) * slots - blocks)
    rounds = min(range(-(-blocks // slots), 5), key=lambda n: _waited_for(n, blocks, slots))
    if rounds * slots < 2 * blocks:
        return max(1, min(slots, blocks - 1))  # equal sequences stay whole, a long one is cut
    return rounds * slots - blocks


def _waited_for(rounds: int, blocks: int, slots: int) -> float:
    """Returns the time of equal blocks in `rounds` rounds of programs; 1 is a whole block in one round."""
    items = rounds * slots // blocks
    return -(-items * blocks // slots) / items * (1 + 0.1 * (rounds - 1))


def wide_items_aimed_at(shape: Shape, blocks: int, multiprocessors: int, heads: int) -> int:
    """Returns the number of all items of a step of `blocks` row blocks, for the kernel for many rows."""
    slots = shape.programs * multiprocessors
    each = blocks * heads

    def time(splits: int) -> float:
        """Returns time in units of one program without splits; joining costs about 3 % per part."""
        return ceil(each * splits / slots) / splits * (1 + 0.03 * splits)

    splits = max(slots // each, min(range(1, 9), key=time))
    # If blocks fill the device, only items longer than a program's fair share are split. A captured step has
    # fewer blocks than it has room for; split into this number, each block would be halved.
    return blocks * splits if splits > 1 else max(1, slots // heads)


def heads_joined_at_once(tokens: int, query_heads: int) -> int:
    """Returns the query heads per program of `combine`: many heads, since each program reads all lengths."""
    heads = 1
    while tokens * query_heads // heads > 2048 and query_heads % (2 * heads) == 0:
        heads *= 2
    return heads
