"""Pages of another engine for a divided model: each rank reads its parts from the rank of the same number.

Rank 0 asks the other engine's rank 0 where pages lie. A page has the same index in the host memory of all
ranks, so the answer holds for every part. A page counts as read once every rank has its part. If one part is
missing or bad, the page counts as missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvant.kv.offload.moves import Key
from kvant.kv.offload.source import Prompt, Wanted
from kvant.kv.transfer.taker import Taker
from kvant.parallel.messages import MeetPeer, ReadPeer
from kvant.parallel.offload import emptied, joined, taken
from kvant.parallel.ranks import Ranks


class RankedPeer:
    """The `Source` of all ranks. own: rank 0's, which finds pages for all. number: of the other engine.

    `read` raises RankLost.
    """

    def __init__(self, number: int, own: Taker, ranks: Ranks) -> None:
        self._number, self._own, self._ranks = number, own, ranks
        self._size = 1 + len(ranks.pids)
        self._met = ""  # the instance that the other ranks know
        self._reads: dict[Key, dict[int, tuple[bytes | None, float]]] = {}
        self._bad: dict[int, int] = {}

    @property
    def tier(self) -> str:
        return self._own.tier

    @property
    def num_bad(self) -> int:
        return self._own.num_bad + sum(self._bad.values())

    @property
    def is_ready(self) -> bool:
        return self._own.is_ready

    @property
    def is_probing(self) -> bool:
        return self._own.is_probing

    def has(self, key: Key) -> bool:
        return self._own.has(key)

    def probe(
        self, number: int, pages: Sequence[Wanted], windows: Sequence[int | None], prompt: Prompt
    ) -> None:
        self._own.probe(number, pages, windows, prompt)

    def take_probed(self) -> list[int]:
        return self._own.take_probed()

    def read(self, reads: Iterable[tuple[Key, int]]) -> None:
        giver = self._own.giver
        if giver is not None and giver.instance != self._met:
            self._ranks.send(MeetPeer(self._number, giver.others))
            self._met = giver.instance
        sent, placed = [], self._own.placed(reads)
        for key, page, place in placed:
            self._reads[key] = {}
            if place is not None and place.instance == self._met:
                sent.append((*key, page, place.page, place.checksum))
            else:
                self._reads[key] = {rank: (None, 0.0) for rank in range(1, self._size)}
        if sent:
            self._ranks.send(ReadPeer(self._number, sent))
        self._own.read_placed(placed)

    def take_read(self) -> list[tuple[Key, bytes | None, float]]:
        for rank, told in emptied(self._ranks.told.peers[self._number]):
            self._bad[rank] = told.num_bad
            for group, digest, total, seconds in told.reads:
                self._reads[Key(group, digest)][rank] = total, seconds
        for key, total, seconds in self._own.take_read():
            self._reads[key][0] = total, seconds
        return [
            (
                key,
                joined(parts[rank][0] for rank in range(self._size)),
                max(seconds for _, seconds in parts.values()),
            )
            for key, parts in taken(self._reads, self._size)
        ]

    def touch(self, keys: Sequence[Key]) -> None:
        self._own.touch(keys)

    def forget(self, key: Key) -> None:
        self._own.forget(key)
