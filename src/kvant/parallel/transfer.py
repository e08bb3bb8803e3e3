"""Pages of another engine for a divided model: each rank reads its parts from the rank of the same number.

Rank 0 asks the other engine's rank 0 where pages lie. A page has the same index in the host memory of all
ranks, so the answer holds for every part. A page counts as read once every rank has its part. If one part is
missing or bad, the page counts as missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvant.kv.offload.moves import Key
from kvant.kv.transfer.taker import Taker
from kvant.parallel.messages import MeetPeer, ReadPeer
from kvant.parallel.offload import RankedSource, emptied
from kvant.parallel.ranks import Ranks


class RankedPeer(RankedSource[Taker]):
    """The `Source` of all ranks that reads another engine's pages. number: of the other engine.

    `read` raises RankLost.
    """

    def __init__(self, number: int, own: Taker, ranks: Ranks) -> None:
        super().__init__(own, ranks)
        self._number = number
        self._met = ""  # the instance that the other ranks know

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

    def touch(self, keys: Sequence[Key]) -> None:
        self._own.touch(keys)

    def forget(self, key: Key) -> None:
        self._own.forget(key)

    def _take_messages(self) -> None:
        for rank, message in emptied(self._ranks.inbox.peers[self._number]):
            self._note_reads(rank, message)
