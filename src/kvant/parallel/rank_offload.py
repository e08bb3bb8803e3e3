"""Another rank's part of each page in host memory and files. Rank 0 decides (`kvant.parallel.offload`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvant.execution.runner import ModelRunner
from kvant.kv.identity import PageIdentity
from kvant.kv.offload.build import make_mover
from kvant.kv.offload.files import FileQueue
from kvant.kv.offload.mover import pieces_of
from kvant.kv.offload.moves import Bell, Key, Move, part_of
from kvant.kv.offload.page_files import PageFiles
from kvant.kv.offload.pool_identity import layout_of_pages, scales_beside_pages
from kvant.kv.offload.sessions import pinned_names
from kvant.models.sharding.shard import Shard
from kvant.parallel.messages import (
    FilesDone,
    ForgetFiles,
    FromRank,
    KeepPages,
    KeepsPages,
    LoadPages,
    MeetPeer,
    PagesMoved,
    ReadFiles,
    ReadPeer,
    StorePages,
    TouchFiles,
    WriteFiles,
)
from kvant.plan.plan import Plan

if TYPE_CHECKING:
    from kvant.kv.transfer.messages import Part
    from kvant.parallel.rank_transfer import GivenMemory, PeerParts

FromRank0 = (
    StorePages | LoadPages | ReadFiles | WriteFiles | TouchFiles | ForgetFiles | MeetPeer | ReadPeer
)


class PageParts:
    """Moves this rank's parts of pages on rank 0's commands; a thread reports finished work to rank 0.

    say: sends a message to rank 0, from any thread. The constructor raises DoesNotFit or NotServable if the
    memory or the directory cannot be used.
    """

    def __init__(
        self, asked: KeepPages, plan: Plan, runner: ModelRunner, shard: Shard,
        say: Callable[[FromRank], None],
    ) -> None:  # fmt: skip
        config, layout, bell = plan.request.offload, plan.layout, Bell()
        assert config is not None
        per_superblock = [1] if layout is None else [g.per_superblock for g in layout.groups]
        self._rank, self._say, self._bell = shard.rank, say, bell
        host_bytes = config.host_bytes // shard.size
        self._mover = make_mover(pieces_of(runner.pools), per_superblock, host_bytes, bell)
        self._files, identity, part = None, None, None
        self._peers: list[PeerParts] = []
        self._given: GivenMemory | None = None
        if asked.identity is not None:
            identity = replace(
                PageIdentity(**asked.identity),
                scales=scales_beside_pages(runner.pools),
                layout=layout_of_pages(
                    runner.pools, plan.target.kv.page_size, shard.rank, shard.size
                ),
            )
            if (disk := config.disk) is not None:
                files = PageFiles(disk.path, identity, disk.num_bytes, pinned=pinned_names)
                self._files = FileQueue(files, bell, self._mover.row)
            part = self._exchange(identity, plan, runner)
        say(KeepsPages(None if identity is None else identity.fields, part))
        threading.Thread(target=self._tell, name="kvant-tell", daemon=True).start()

    def _exchange(self, identity: PageIdentity, plan: Plan, runner: ModelRunner) -> Part | None:
        """Prepares to give and take parts. Returns this rank's part for other engines, None without any."""
        if (config := plan.request.transfer) is None:
            return None
        from kvant.kv.transfer.exchange import converter_of, own_part
        from kvant.parallel.rank_transfer import GivenMemory, PeerParts

        rows = self._mover.rows
        part = own_part(identity, runner.pools, rows)
        converter = converter_of(config, runner.pools, part, plan.target.kv.page_size)
        self._peers = [
            PeerParts(number, self._rank, identity, rows, converter, self._say)
            for number in range(len(config.take))
        ]
        if config.give is not None:
            self._given = GivenMemory(rows)
            part.agent = self._given.agent
        return part

    def do(self, asked: FromRank0) -> None:
        """Starts one command of rank 0, ordered after all steps that were launched so far."""
        match asked:
            case StorePages(job, moves):
                self._mover.store(job, [Move(*move) for move in moves])
                return
            case LoadPages(job, moves):
                rank = self._rank
                self._mover.load(job, [Move(*m[:3], part_of(m[3], rank)) for m in moves])
                return
            case MeetPeer(number, parts):
                self._peers[number].meet(parts)
                return
            case ReadPeer(number):
                self._peers[number].read(asked)
                return
        files = self._files
        assert files is not None, "rank 0 has files, and this rank has none"
        match asked:
            case ReadFiles(reads):
                files.read((Key(group, digest), page) for group, digest, page in reads)
            case WriteFiles(writes):
                files.write(
                    (Key(group, digest), page, part_of(total, self._rank))
                    for group, digest, page, total in writes
                )
            case TouchFiles(keys):
                files.touch([Key(*key) for key in keys])
            case ForgetFiles(keys):
                for key in keys:
                    files.forget(Key(*key))
                if not keys:
                    files.forget_own()

    def _tell(self) -> None:
        """Reports work that other threads finished, until rank 0 is gone."""
        try:
            while True:
                self._bell.wait(60.0)
                for done in self._mover.take():
                    self._say(
                        PagesMoved(
                            done.job, done.checksums, done.num_bytes, done.seconds, done.fault
                        )
                    )
                if self._files is not None:
                    self._tell_files(self._files)
        except OSError:
            return

    def _tell_files(self, files: FileQueue) -> None:
        reads = [(*key, total, seconds) for key, total, seconds in files.take_read()]
        writes = [(*key, is_written) for key, is_written in files.take_written()]
        if reads or writes:
            self._say(FilesDone(tuple(reads), tuple(writes), files.num_bad))
