"""Which tiers hold cached pages beside the device's pool, as asked on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvant.errors import BadValue, WayOut
from kvant.kv.memory import parse_size

_EXAMPLE = WayOut("name sizes", ("--kv-offload", "host:8GiB,disk:/var/cache/kvant:100GiB"))


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """A directory for pages, and the bytes of page files in it."""

    path: Path
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """host_bytes: of host memory. disk: behind it; None for no files."""

    host_bytes: int
    disk: DiskConfig | None = None


def parse_offload(text: str, *, asked_by: str) -> OffloadConfig:
    """Reads "host:SIZE[,disk:DIRECTORY:SIZE]". Raises BadValue."""
    host: int | None = None
    disk: DiskConfig | None = None
    for part in text.split(","):
        tier, _, rest = part.strip().partition(":")
        if tier == "host" and host is None and rest:
            host = parse_size(rest, asked_by=asked_by)
        elif tier == "disk" and disk is None:
            path, colon, size = rest.rpartition(":")
            if not path or not colon:
                raise _bad(text, asked_by, f"{part!r} is not disk:DIRECTORY:SIZE")
            disk = DiskConfig(
                Path(path).expanduser().absolute(), parse_size(size, asked_by=asked_by)
            )
        else:
            raise _bad(text, asked_by, f"{part!r} is neither host:SIZE nor disk:DIRECTORY:SIZE")
    if host is None:
        raise _bad(text, asked_by, "pages reach files through host memory, which has no size here")
    return OffloadConfig(host, disk)


def _bad(text: str, asked_by: str, why: str) -> BadValue:
    return BadValue(f"{asked_by}: {text!r} names no tiers", why=why, ways_out=(_EXAMPLE,))
