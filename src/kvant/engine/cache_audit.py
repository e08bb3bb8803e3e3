"""Checks of a running engine's KV cache: scales that changed, and values beyond a layer's range."""

from __future__ import annotations

from collections.abc import Sequence

from kvant.kv.pages import SharedPages
from kvant.kv.saturation import Saturated
from kvant.kv.scale_audit import ScaleAudit
from kvant.kv.spec import Choice

SLICE_BYTES = 2 * 2**20
"""Bytes of scales checked per call. This takes a few milliseconds, which delays an arriving request."""


class CacheAudit:
    """Checks the scales of cached pages round-robin, a few pages per call, between two steps.

    The first visit notes a checksum of a page's scales. Later visits compare with it until the page is
    reused. A mismatch empties the whole prefix cache, because other pages may have been computed from the
    damaged one since its last check.
    """

    def __init__(self, shared: SharedPages, scales: ScaleAudit) -> None:
        self._shared = shared
        self._scales = scales
        self._most = max(1, SLICE_BYTES // max(1, scales.page_bytes))
        # (group, page) -> (the page's generation, the checksum of its scales).
        self._noted: dict[tuple[int, int], tuple[int, int]] = {}
        self._next = (0, 0)  # group and page where the next check begins

    def check(self) -> list[str]:
        """Checks the next pages. Returns one sentence per fault; any fault empties the prefix cache."""
        found = self._scales.restore()
        group, pages = self._slice()
        for (page, generation), total in zip(
            pages, self._scales.sums([page for page, _ in pages], group), strict=True
        ):
            noted = self._noted.get((group, page))
            if total is None:
                found.append(f"page {page} has a scale that is no number")
            elif noted is None or noted[0] != generation:
                self._noted[group, page] = generation, total
            elif noted[1] != total:
                found.append(f"page {page} has other scales than when it was written")
        if found:
            self._shared.forget_all()
            self._noted.clear()
        return found

    def accept(self) -> None:
        """Takes the current scales outside the pages as correct."""
        self._scales.accept()

    def _slice(self) -> tuple[int, list[tuple[int, int]]]:
        """Returns a group and its next cached pages, as (page, generation), as many as one call checks."""
        group, first = self._next
        if not self._scales.page_bytes:
            return group, []
        found: list[tuple[int, int]] = []
        allocator = self._shared.groups[group]
        for page in range(first, allocator.num_pages):
            if len(found) == self._most:
                self._next = group, page
                return group, found
            generation = allocator.generation_of(page)
            if generation is None:
                self._noted.pop((group, page), None)
            else:
                found.append((page, generation))
        self._next = (group + 1) % len(self._shared.groups), 0
        return group, found


def saturation_warning(found: Sequence[Saturated]) -> str:
    """Returns the warning for layers that stored values beyond their range."""
    shown = ", ".join(_layer(one) for one in found[:4])
    more = f" and {len(found) - 4} more layers" if len(found) > 4 else ""
    return (
        f"values were beyond what the KV cache holds and were stored as its largest: {shown}{more}; "
        "answers may suffer. Ways out: --kv-cache-dtype fp8_per_token_head, bfloat16 for these layers "
        "(--kv-cache-rule), or a checkpoint with calibrated scales"
    )


def _layer(one: Saturated) -> str:
    sides = ((one.k, one.spec.k, "K"), (one.v, one.spec.v, "V"))
    parts = [_side(count, choice, name) for count, choice, name in sides if count]
    return f"layer {one.layer} ({', '.join(parts)})"


def _side(count: int, choice: Choice | None, name: str) -> str:
    assert choice is not None
    return f"{count} of {name} in {choice.dtype}"
