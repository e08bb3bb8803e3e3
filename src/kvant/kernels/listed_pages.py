"""Encodes page ids of several groups as one list of numbers."""

from __future__ import annotations

from collections.abc import Sequence

GROUP = 1 << 32
"""Factor on the group's index in an encoded page id."""


def listed(pages: Sequence[Sequence[int]]) -> list[int]:
    """Encodes page ids per group. 0, the first group's scratch page, means no page."""
    return [page + group * GROUP for group, some in enumerate(pages) for page in some]
