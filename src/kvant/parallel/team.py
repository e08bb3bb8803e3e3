"""Builds the ranks of one engine, as rank 0: starts the other ranks, then connects to them."""

from __future__ import annotations

import os

import torch

from kvant.errors import NotServable, WayOut
from kvant.models.loaded import LoadedModel
from kvant.models.sharding.shard import Shard
from kvant.parallel.agreement import plan_fingerprint
from kvant.parallel.group import LOOPBACK, RankGroup, open_store
from kvant.parallel.launched import gather, read_launch
from kvant.parallel.messages import Connect, Start
from kvant.parallel.ranks import Joined, Ranks
from kvant.parallel.runner import RankedRunner
from kvant.plan.config import EngineConfig, EngineOptions
from kvant.plan.plan import Plan


class Team:
    """The ranks of an engine that is being built. group: rank 0's collectives.

    num_pages: superblocks of every rank's pool.
    """

    def __init__(self, config: EngineConfig, planned: Plan, num_pages: int) -> None:
        size, gpu = planned.num_ranks, None
        device = torch.device("cpu")
        if not planned.request.on_cpu:
            gpu = torch.cuda.current_device()
            device = torch.device("cuda", gpu)
        launched = config.settings.build(EngineOptions).rank_launcher == "torchrun"
        if gpu is not None and not launched:
            _check_count(size, gpu)
        self.group = RankGroup(Shard(0, size), device)
        self._num_pages = num_pages
        self._limits, self._layout = planned.limits, planned.layout
        self._ranks = Ranks(self.group.abort, self.group.close)
        self._address, meet = LOOPBACK, str(self._ranks.directory)
        joined: tuple[Joined, ...] = ()
        if launched:
            self._gathered = found = gather(read_launch(os.environ, size))
            self._address, meet, joined = found.address, found.meet, found.joined
            self._store = found.store
        else:
            self._store = open_store(meet, size)
        self._ranks.start(
            [
                Start(
                    config.settings, Shard(rank, size), plan_fingerprint(planned), num_pages,
                    self._limits.max_num_seqs, None if gpu is None else gpu + rank,
                    meet, torch.get_num_threads(),
                )
                for rank in range(1, size)
            ],
            joined,
        )  # fmt: skip

    def meet(self, model: LoadedModel) -> RankedRunner:
        """Waits for the other ranks, connects, and returns rank 0's runner. Raises RankLost.

        model: rank 0's loaded part.
        """
        self._ranks.wait_loaded()
        self._ranks.send(Connect())
        self.group.connect(self._store, model.hidden_size, model.dtype, self._address)
        return RankedRunner(
            model, self._num_pages, self._ranks, self.group,
            max_num_seqs=self._limits.max_num_seqs, layout=self._layout,
        )  # fmt: skip


def _check_count(size: int, first: int) -> None:
    """Raises NotServable if this machine has too few GPUs. first: the index of rank 0's GPU."""
    count = torch.cuda.device_count() - first
    if count < size:
        raise NotServable(
            f"--tensor-parallel-size {size} needs {size} GPUs",
            why=f"torch sees {count} from this process's first one on",
            ways_out=(WayOut("run on one device", ("--tensor-parallel-size", "1")),),
        )
