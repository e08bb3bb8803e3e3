"""Gives and takes pages of an engine, as it was asked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvant.kv.identity import PageIdentity
from kvant.kv.offload.mover import HostRows
from kvant.kv.offload.moves import Bell
from kvant.kv.offload.source import Source
from kvant.kv.offload.tiers import Catalog
from kvant.kv.pool import KVPool
from kvant.kv.transfer.config import TransferConfig
from kvant.kv.transfer.convert import CodecConverter, groups_of
from kvant.kv.transfer.giver import Giver
from kvant.kv.transfer.messages import Part
from kvant.kv.transfer.taker import Taker

Takers = Callable[[HostRows, Bell], Sequence[Source]]
Give = Callable[[HostRows, Catalog], Giver]


def own_part(identity: PageIdentity, pools: Sequence[KVPool], rows: HostRows) -> Part:
    """Returns one rank's part of pages in host memory, with an empty agent's name. identity: of the part."""
    return Part(identity.fields, b"", rows.address, groups_of(pools, rows))


def converter_of(
    config: TransferConfig, pools: Sequence[KVPool], part: Part, page_size: int,
    fingerprint: str = "",
) -> CodecConverter | None:  # fmt: skip
    """Converts to this rank's part `part` of pages, if any format is to be converted.

    fingerprint: as in `CodecConverter`.
    """
    if not config.convert:
        return None
    return CodecConverter(pools, part.groups, page_size, config.convert, fingerprint)


def exchange(
    config: TransferConfig,
    identity: PageIdentity,
    pools: Sequence[KVPool],
    page_size: int,
    *,
    fingerprint: str = "",
    others: Callable[[], Sequence[Part]] = tuple,
    spread: Callable[[int, Taker], Source] = lambda _, own: own,
) -> tuple[Takers | None, Give | None]:
    """Returns peers and give for `build_tiers`. identity: of the pages in `pools`, which are rank 0's.

    fingerprint: of the model's geometry, to say what conversions lose. others: returns the parts of ranks 1
    and up, once host memory was made. spread: extends the source of that number to all ranks.
    """

    def takers(rows: HostRows, bell: Bell) -> Sequence[Source]:
        parts = [own_part(identity, pools, rows), *others()]
        converter = converter_of(config, pools, parts[0], page_size, fingerprint)
        return [
            spread(number, Taker(address, parts, rows, bell, converter))
            for number, address in enumerate(config.take)
        ]

    def give(rows: HostRows, catalog: Catalog) -> Giver:
        assert config.give is not None
        parts = [own_part(identity, pools, rows), *others()]
        return Giver(config.give, catalog, parts, page_size, rows)

    return takers if config.take else None, give if config.give is not None else None
