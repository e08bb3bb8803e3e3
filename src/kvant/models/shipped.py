"""Drafters that come with Kvant, by name: directories in z-lab's checkpoint format."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).parents[1] / "drafters"

SHIPPED = ("smollm2-dflash",)


def shipped_drafter(name: str) -> Path | None:
    """The directory of that name, None if Kvant ships none."""
    return _ROOT / name if name in SHIPPED else None
