"""Gives and takes pages of an engine, as it was asked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvant.kv.identity import PageIdentity
from kvant.kv.offload.mover import HostRows
from kvant.kv.offload.moves import Bell
from kvant.kv.offload.tiers import Catalog
from kvant.kv.pool import KVPool
from kvant.kv.transfer.config import TransferConfig
from kvant.kv.transfer.convert import CodecConverter, groups_of
from kvant.kv.transfer.giver import Giver, formats_of
from kvant.kv.transfer.taker import Taker

Takers = Callable[[HostRows, Bell], Sequence[Taker]]
Give = Callable[[HostRows, Catalog], Giver]


def exchange(
    config: TransferConfig, identity: PageIdentity, pools: Sequence[KVPool], page_size: int
) -> tuple[Takers | None, Give | None]:
    """What `build_tiers` takes as peers and give. identity: of the pages in `pools`."""

    def takers(rows: HostRows, bell: Bell) -> Sequence[Taker]:
        groups, converter = groups_of(pools, rows), None
        if config.convert:
            converter = CodecConverter(pools, groups, page_size, config.convert)
        formats = sorted(formats_of(groups))
        return [Taker(address, identity, rows, bell, converter, formats) for address in config.take]

    def give(rows: HostRows, catalog: Catalog) -> Giver:
        assert config.give is not None
        groups, size = groups_of(pools, rows), rows.bytes.numel()
        return Giver(config.give, catalog, identity, groups, page_size, rows.address, size, rows)

    return takers if config.take else None, give if config.give is not None else None
