"""Counters of the tiers, as reports and metrics show them."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True)
class TierCounts:
    """One tier since its engine began. Numbers of pages unless they say bytes.

    bad: not what was stored; computed again. evicted: gave way to others. dropped: not stored, because they
    lost their owner first, or the tier could not keep up. late: requests that did not wait any longer.
    num_pages, num_bytes: held now.
    """

    stored: int = 0
    restored: int = 0
    bad: int = 0
    evicted: int = 0
    dropped: int = 0
    late: int = 0
    bytes_stored: int = 0
    bytes_restored: int = 0
    num_pages: int = 0
    num_bytes: int = 0

    def with_pages(self, num_pages: int, num_bytes: int) -> TierCounts:
        """Returns these counts, with what the tier holds now."""
        return replace(self, num_pages=num_pages, num_bytes=num_bytes)


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """host, disk, peer: of each tier; disk None without files, peer None without other engines.

    num_restores: of requests whose pages came back. num_restored_tokens: whose K and V came back.
    restore_seconds: from the begin of each copy to the device until its end. *_bytes_per_second: as measured.
    """

    host: TierCounts
    disk: TierCounts | None
    num_restores: int
    num_restored_tokens: int
    restore_seconds: float
    host_bytes_per_second: float
    disk_bytes_per_second: float
    peer: TierCounts | None = None
