"""Sizes of the steps that are recorded as CUDA graphs. Without torch, since plans count their memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvant.kv.geometry import Attention, LayerGeometry

MOST_ROWS = 1024
"""Most rows of a step with drafts. With more, matrix products are compute-bound and drafts do not pay."""

_PIECES = (
    *(64, 128, 160, 256, 320, 384, 480, 512, 544, 576, 608, 640),
    *range(768, 1665, 128),
)
MOST_PIECES = _PIECES[-1]
"""Most tokens of a recorded step with prompt pieces. For longer steps the device takes longer than Python
takes to launch them, so a graph saves nothing.
"""

_FEW = 128

_BESIDE_SHORT = (32, 64, 128, 256)
"""Tokens of recorded steps of answers beside short pieces."""

_SMALL_PROGRAM = 16
"""Query rows (query, head of the group) that attention multiplies in its smallest program."""


class PieceSize(NamedTuple):
    """A recorded step with pieces of prompts. longest: tokens of a sequence, at most."""

    tokens: int
    seqs: int
    longest: int


def short_piece(layers: Iterable[LayerGeometry]) -> int:
    """Returns the most tokens of a piece that attention reads in programs as small as those of one token.

    0 if there is no such piece of two tokens: the layers share too many query heads, or store latents.
    """
    groups = [
        layer.num_q_heads // layer.num_kv_heads
        for layer in layers
        if layer.num_kv_heads and layer.attention is not Attention.MLA
    ]
    has_latents = any(layer.attention is Attention.MLA for layer in layers)
    most = 0 if has_latents or not groups else _SMALL_PROGRAM // max(groups)
    return most if most > 1 else 0


def batch_sizes(most: int) -> list[int]:
    """Returns the numbers of sequences that get a graph, up to `most`, so close that padding costs little."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 2048, 32)]
    return [*(size for size in sizes if size < most), most]


def draft_counts(most: int, *, adaptive: bool) -> list[int]:
    """Returns the numbers of drafts that get graphs, descending: `most`, and if adaptive its halves to 3."""
    counts = [most] if most else []
    while adaptive and counts and counts[-1] // 2 >= 3:
        counts.append(counts[-1] // 2)
    return counts


def draft_sizes(num_drafts: int, most: int) -> list[int]:
    """Returns the numbers of sequences that get a graph with `num_drafts` drafts, up to `most`.

    A step has at most MOST_ROWS rows.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    most = min(most, MOST_ROWS // (1 + num_drafts))
    return [*(size for size in sizes if size < most), most] if most else []


def piece_sizes(most_seqs: int, most_tokens: int, short: int = 0) -> list[PieceSize]:
    """Returns the steps with prompt pieces that get a graph, ascending. short: see `short_piece`.

    Graphs for few sequences compute few rows of logits. Sizes are close where padding is expensive: a step
    of 640 tokens takes a third longer than one of 512, but products of 192 or 224 rows take as long as
    products of 256.
    """
    tokens = [*(size for size in _PIECES if size < most_tokens), min(most_tokens, MOST_PIECES)]
    found = {PieceSize(t, min(n, most_seqs, t), t) for t in tokens for n in (_FEW, most_seqs)}
    if short and most_seqs > 1:
        needed = min(most_seqs + short, most_tokens)
        sizes = [size for size in _BESIDE_SHORT if size < needed]
        found |= {
            PieceSize(t, min(t, most_seqs), short)
            for t in (*sizes, *(size for size in _BESIDE_SHORT[len(sizes) :][:1]))
            if t <= most_tokens
        }
    return sorted(found)
