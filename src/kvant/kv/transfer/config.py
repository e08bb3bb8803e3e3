"""With which engines pages are exchanged, as asked on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvant.errors import BadValue, WayOut
from kvant.kv.dtype import Follow, KVDtype
from kvant.kv.names import parse_format

_EXAMPLES = (
    WayOut("let others read pages", ("--kv-transfer", "give:127.0.0.1:5700")),
    WayOut("read pages of another engine", ("--kv-transfer", "take:127.0.0.1:5700")),
)


class Address(NamedTuple):
    """Where an engine answers questions about its pages."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """give: where others may ask for pages; None for nowhere. take: engines that are asked.

    convert: formats of their pages that are converted to the engine's own; empty: pages of other formats
    are refused.
    """

    give: Address | None
    take: tuple[Address, ...]
    convert: frozenset[KVDtype] = frozenset()


def parse_transfer(text: str, convert: str | None, *, asked_by: str) -> TransferConfig:
    """Reads "give:HOST:PORT" and "take:HOST:PORT,..", and names of formats. Raises BadValue."""
    give: Address | None = None
    take: list[Address] = []
    for part in text.split(","):
        way, _, where = part.strip().partition(":")
        host, colon, port = where.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise _bad(text, asked_by, f"{part!r} is neither give:HOST:PORT nor take:HOST:PORT")
        address = Address(host.removeprefix("[").removesuffix("]"), int(port))
        if way == "take" and address not in take:
            take.append(address)
        elif way == "give" and give is None:
            give = address
        else:
            raise _bad(text, asked_by, f"{part!r} is not another give: or take:")
    return TransferConfig(give, tuple(take), _formats(convert, take))


def _formats(convert: str | None, take: list[Address]) -> frozenset[KVDtype]:
    by = "--kv-transfer-convert"
    if convert is None:
        return frozenset()
    if not take:
        raise BadValue(
            f"{by} {convert} has nothing to convert",
            why="only an engine that takes pages converts them",
            ways_out=(_EXAMPLES[1],),
        )
    found: set[KVDtype] = set()
    for name in convert.split(","):
        pair = parse_format(name.strip(), asked_by=by)
        if isinstance(pair.k, Follow) or isinstance(pair.v, Follow):
            raise BadValue(
                f"{by}: {name.strip()!r} names no stored format",
                why="the other engine's formats are named as they are stored",
                ways_out=(WayOut("name them", (by, "bfloat16")),),
            )
        found |= {pair.k, pair.v}
    return frozenset(found)


def _bad(text: str, asked_by: str, why: str) -> BadValue:
    return BadValue(f"{asked_by}: {text!r} names no engines", why=why, ways_out=_EXAMPLES)
