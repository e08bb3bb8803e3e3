"""Numbers of sequences for which steps are recorded; without torch, as memory is planned with them."""

from __future__ import annotations

MOST_ROWS = 1024
"""Rows of a step with drafts: at more, products are bound by arithmetic, and drafts do not pay."""

_PIECES = (
    *(64, 128, 160, 256, 320, 384, 480, 512, 544, 576, 608, 640),
    *range(768, 1665, 128),
)
MOST_PIECES = _PIECES[-1]
"""Tokens of a recorded step with pieces of prompts: with more, the device takes longer over a step
than Python takes to launch it.
"""

_FEW = 128


def batch_sizes(most: int) -> list[int]:
    """Numbers of sequences that get a graph: close enough that padding costs little."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 2048, 32)]
    return [*(size for size in sizes if size < most), most]


def draft_counts(most: int, *, adaptive: bool) -> list[int]:
    """Numbers of drafts that steps are recorded for: all; adaptive: also half as many, while that is
    3 or more.
    """
    counts = [most] if most else []
    while adaptive and counts and counts[-1] // 2 >= 3:
        counts.append(counts[-1] // 2)
    return counts


def draft_sizes(num_drafts: int, most: int) -> list[int]:
    """The same for steps with drafts, whose rows count."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    most = min(most, MOST_ROWS // (1 + num_drafts))
    return [*(size for size in sizes if size < most), most] if most else []


def piece_sizes(most_seqs: int, most_tokens: int) -> list[tuple[int, int]]:
    """(tokens, sequences) of steps with pieces of prompts that get a graph, the smaller first.

    Where there are few sequences, few rows of logits are computed. Close where padding costs much: a step
    of 640 tokens takes a third longer than one of 512, but products of 192 or 224 rows are no faster than of
    256.
    """
    tokens = [*(size for size in _PIECES if size < most_tokens), min(most_tokens, MOST_PIECES)]
    return sorted({(t, min(n, most_seqs, t)) for t in tokens for n in (_FEW, most_seqs)})
