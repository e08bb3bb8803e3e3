"""Pages of several groups in one list of numbers."""

from __future__ import annotations

from collections.abc import Sequence

GROUP = 1 << 32
"""What a number counts for each group before a page's."""


def listed(pages: Sequence[Sequence[int]]) -> list[int]:
    """Pages of each group. The first group's scratch page is 0, which stands for no page."""
    return [page + group * GROUP for group, some in enumerate(pages) for page in some]
