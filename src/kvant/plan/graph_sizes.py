"""Sizes of the steps that are recorded as CUDA graphs. Without torch, since plans count their memory."""

from __future__ import annotations

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


def piece_sizes(most_seqs: int, most_tokens: int) -> list[tuple[int, int]]:
    """Returns (tokens, sequences) of the steps with prompt pieces that get a graph, ascending.

    Graphs for few sequences compute few rows of logits. Sizes are close where padding is expensive: a step
    of 640 tokens takes a third longer than one of 512, but products of 192 or 224 rows take as long as
    products of 256.
    """
    tokens = [*(size for size in _PIECES if size < most_tokens), min(most_tokens, MOST_PIECES)]
    return sorted({(t, min(n, most_seqs, t)) for t in tokens for n in (_FEW, most_seqs)})
