"""Bytes to pages to tokens: the arithmetic that plan, pool and reports share."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvant.errors import BadValue
from kvant.kv.groups import LONGEST, ArenaLayout, longest_sequence
from kvant.kv.spec import KVPlan

UTILIZATION = 0.9
"""Default share of a device's memory to use."""

SCRATCH_PAGES = 1
"""Pages that are allocated but never hold a request's tokens."""

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}b": size for unit, size in _UNITS.items() if unit not in ("", "b")}
_UNITS |= {f"{u}ib": 2 ** (10 * power) for power, u in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a device's memory is divided, in bytes; None if a needed value is unknown.

    reserve_bytes: memory left free. workspace_bytes: what steps need beside weights and pages,
    if that is counted. draft_bytes: everything the drafter takes, its weights and its share of the pages.
    kv_bytes: the target's pages, and those of states. num_pages counts the scratch page; capacity_tokens does
    not. With groups of pages, num_pages are superblocks, kv_bytes counts the drafter's pages and draft_bytes
    does not, and capacity_tokens is the longest sequence that fits alone.
    missing_bytes: bytes that are missing for one page, 0 if it fits.
    """

    total_bytes: int | None
    weights_bytes: int | None
    reserve_bytes: int | None
    workspace_bytes: int
    draft_bytes: int
    kv_bytes: int | None
    num_pages: int | None
    capacity_tokens: int | None
    missing_bytes: int = 0

    @property
    def beyond_bytes(self) -> int:
        """Bytes by which the sum exceeds the device's memory; 0 if that or the weights are unknown."""
        if self.total_bytes is None or self.weights_bytes is None:
            return 0
        beside = self.workspace_bytes + self.draft_bytes
        return max(0, self.weights_bytes + beside + (self.kv_bytes or 0) - self.total_bytes)


def plan_memory(
    total_bytes: int | None,
    weights_bytes: int | None,
    target: KVPlan,
    *,
    draft: KVPlan | None = None,
    draft_weights_bytes: int = 0,
    workspace_bytes: int = 0,
    utilization: float = UTILIZATION,
    kv_cache_bytes: int | None = None,
    layout: ArenaLayout | None = None,
    piece: int = 1,
) -> MemoryPlan:
    """Divides `utilization` of `total_bytes`, or gives the pages exactly `kv_cache_bytes` if it is set.

    Target and drafter share page ids, so one page costs the sum of both. The drafter's bytes are
    subtracted before the capacity is computed. layout: of an arena with groups of pages, which holds the
    drafter's too. piece: tokens of a prompt in one step at most.
    """
    reserve = None if total_bytes is None else int(total_bytes * (1 - utilization))
    budget = kv_cache_bytes
    if budget is None and total_bytes is not None and weights_bytes is not None:
        assert reserve is not None
        budget = total_bytes - weights_bytes - reserve - workspace_bytes - draft_weights_bytes
    draft_page = 0 if draft is None else draft.page_bytes
    if budget is None:
        return MemoryPlan(
            total_bytes,
            weights_bytes,
            reserve,
            workspace_bytes,
            draft_weights_bytes,
            None,
            None,
            None,
        )
    page, fewest = target.page_bytes + draft_page, SCRATCH_PAGES + 1
    if layout is not None:
        page, fewest, draft_page = layout.superblock_bytes, SCRATCH_PAGES + len(layout.groups), 0
    pages = num_pages(budget, page)
    needed = page * fewest
    capacity = max(0, pages - SCRATCH_PAGES) * target.page_size
    if layout is not None:
        capacity = longest_sequence(layout, pages, piece)
    return MemoryPlan(
        total_bytes=total_bytes,
        weights_bytes=weights_bytes,
        reserve_bytes=reserve,
        workspace_bytes=workspace_bytes,
        draft_bytes=draft_weights_bytes + pages * draft_page,
        kv_bytes=pages * (page - draft_page),
        num_pages=pages,
        capacity_tokens=capacity,
        missing_bytes=max(0, needed - budget),
    )


def num_pages(budget_bytes: int, page_bytes: int) -> int:
    """Returns how many whole pages a budget holds, with the scratch page; 0 if no other page fits beside it.

    A model without any KV needs no pages.
    """
    if page_bytes == 0:
        return 0
    pages = max(0, budget_bytes) // page_bytes
    return pages if pages > SCRATCH_PAGES else 0


def parse_size(text: str, *, asked_by: str) -> int:
    """Returns bytes from "2GiB", "80 GB", "1048576"; powers of 1024 with an i, of 1000 without."""
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found.group(2).lower()) if found else None
    if found is None or unit is None:
        raise BadValue(
            f"{asked_by}: {text!r} is no size",
            why="write a number and a unit, such as 2GiB, 512MiB or 80GB",
        )
    size = int(float(found.group(1)) * unit)
    if size <= 0:
        raise BadValue(f"{asked_by}: {text!r} is nothing", why="the size must be above zero")
    return size


def format_tokens(count: int) -> str:
    """Returns a number of tokens for people; "any" where every layer has a window and each length fits."""
    return "any" if count >= LONGEST else f"{count:,}"


def size_argument(num_bytes: int) -> str:
    """Returns a size that `parse_size` reads, rounded up to whole units of which it has ten or more."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= 10 * size:
            return f"{-(-num_bytes // size)}{unit}"
    return str(num_bytes)


def format_size(num_bytes: float) -> str:
    """Returns a size for people: "2.00 GiB", "512 B"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
