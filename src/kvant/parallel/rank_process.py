"""One rank's process: `python -P -m kvant.parallel.rank_process LINK PULSE [GPU]`, started by `Ranks`.

LINK and PULSE are descriptors of inherited sockets. The link brings the settings and the shared memory of
steps (`kvant.parallel.ring`). GPU is given for ranks of torchrun only. Their rank 0 may be on another
machine, so steps arrive over the link. The rank writes to the pulse every second. If the pulse closes,
rank 0 is gone, and this process ends too.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvant.errors import EngineFault, KvantError, NotServable
from kvant.parallel.agreement import own_plan, plan_fingerprint
from kvant.parallel.messages import (
    Capture,
    Connect,
    Counted,
    CountSaturated,
    Failed,
    ForgetFiles,
    FromRank,
    KeepPages,
    Loaded,
    LoadPages,
    MeetPeer,
    Propose,
    ReadFiles,
    ReadPeer,
    StorePages,
    TouchFiles,
    WriteFiles,
    encode,
    read_start,
    read_to_rank,
)
from kvant.parallel.mirror import ZERO, Receiver, Table, read_zero
from kvant.parallel.mirror import asked as ask_of
from kvant.parallel.ring import LinkReader, RingReader
from kvant.plan.config import engine_config

if TYPE_CHECKING:
    from kvant.execution.runner import ModelRunner
    from kvant.kv.saturation import Saturated
    from kvant.parallel.rank_offload import PageParts
    from kvant.speculative.base import Proposer

PULSE_SECONDS = 1.0
SPIN_SECONDS = 100e-6
"""Seconds for which a rank on a GPU polls for its next step without a pause, to start it with rank 0."""

_log = logging.getLogger(__name__)


class _Voice:
    """Sends this rank's messages to rank 0, from any thread."""

    def __init__(self, link: Connection[bytes, bytes]) -> None:
        self._link, self._lock = link, threading.Lock()

    def say(self, message: FromRank) -> None:
        """Sends a message. Raises OSError if rank 0 is gone."""
        with self._lock:
            self._link.send_bytes(encode(message))

    def say_last(self, message: Failed) -> None:
        try:
            self.say(message)
        except OSError:
            _log.exception("rank 0 is gone")


def serve_rank(
    link: Connection[bytes, bytes], place: int | None = None, left: list[Path] | None = None
) -> None:
    """Serves as one rank until the link ends. Every error is sent as `Failed`, then raised.

    place: the GPU's index on this machine, for a rank of torchrun. left: the directory where ranks meet is
    appended, which a killed rank 0 does not remove.
    """
    voice = _Voice(link)
    try:
        _serve(link, voice, place, [] if left is None else left)
    except EOFError:
        return
    except KvantError as fault:
        voice.say_last(Failed(str(fault)))
        raise
    except Exception as fault:
        voice.say_last(Failed(repr(fault)))
        raise


def _serve(
    link: Connection[bytes, bytes], voice: _Voice, place: int | None, left: list[Path]
) -> None:
    memory = None if place is not None else reduction.recv_handle(link)
    start = read_start(link.recv_bytes())
    if place is None:
        left.append(Path(start.meet))
    config = engine_config(start.settings)
    plan = own_plan(config)
    if plan_fingerprint(plan) != start.fingerprint:
        raise EngineFault(
            f"rank {start.shard.rank} made another plan than rank 0: files or versions differ"
        )
    import torch

    from kvant.execution.proposing import load_proposer
    from kvant.models.load import load_model
    from kvant.parallel.group import LOOPBACK, RankGroup, open_store
    from kvant.parallel.watched import FollowingRunner

    torch.set_num_threads(start.num_threads)
    device = torch.device("cpu")
    if start.gpu is not None:
        device = torch.device("cuda", start.gpu if place is None else place)
        torch.cuda.set_device(device)
    group = RankGroup(start.shard, device)
    target = plan.target
    model = load_model(
        target.local.path,
        target.kv,
        target.geometry,
        plan.forward,
        device=device,
        rotary_length=plan.rotary_length,
        dummy_weights=config.dummy_weights,
        group=group,
    )
    voice.say(Loaded())
    ring: RingReader | LinkReader = LinkReader(link)
    if memory is not None:
        spin = 0.0 if start.gpu is None else SPIN_SECONDS
        ring = RingReader(memory, start.shard.rank - 1, link, spin_seconds=spin)
    assert isinstance(read_to_rank(ring.receive()), Connect), "ranks meet before they run"
    store = open_store(start.meet, start.shard.size)
    address = LOOPBACK if place is None else own_address(link.fileno())
    group.connect(store, model.hidden_size, model.dtype, address)
    runner = FollowingRunner(
        model, start.num_pages, max_num_seqs=start.max_num_seqs, layout=plan.layout
    )
    proposer = None
    if plan.draft is not None:
        proposer = load_proposer(plan, runner, dummy_weights=config.dummy_weights)

    def keep(asked: KeepPages) -> PageParts:
        from kvant.parallel.rank_offload import PageParts

        return PageParts(asked, plan, runner, start.shard, voice.say)

    with group.together():
        _run(voice, ring, runner, proposer, keep)


def _run(
    voice: _Voice,
    ring: RingReader | LinkReader,
    runner: ModelRunner,
    proposer: Proposer | None,
    keep: Callable[[KeepPages], PageParts],
) -> None:
    """Runs every step and command that rank 0 sends, and moves this rank's parts of pages."""
    receiver = Receiver()
    parts: PageParts | None = None
    while True:
        match read_to_rank(ring.receive()):
            case np.ndarray() as sent if sent[0] == ZERO:
                pages = read_zero(sent)
                runner.zero(pages)
                if proposer is not None:
                    proposer.zero(pages[0])
            case np.ndarray() as sent:
                schedule, drafts = receiver.step(sent)
                if schedule.pages_to_zero:
                    runner.zero(schedule.pages_to_zero)
                runner.launch(schedule, receiver.table, drafts)
            case Table() as table:
                receiver.take(table)
            case Propose(asks):
                runner.propose([ask_of(ask) for ask in asks])
            case CountSaturated():
                # Rank 0 counts for the drafter, which every rank holds whole.
                read = runner.pool.count_saturated()
                threading.Thread(target=_answer, args=(voice, read), daemon=True).start()
            case KeepPages() as asked:
                parts = keep(asked)
            case (
                StorePages() | LoadPages() | ReadFiles() | WriteFiles() | TouchFiles()
                | ForgetFiles() | MeetPeer() | ReadPeer()
            ) as asked:  # fmt: skip
                assert parts is not None, "tiers are made before pages move"
                parts.do(asked)
            case Capture(seqs, tokens, length, drafts):
                try:
                    runner.capture(seqs, tokens, length, drafts)
                except NotServable as fault:  # rank 0 meets the same obstacle and tells the user
                    _log.warning("%s", fault)


def _answer(voice: _Voice, read: Callable[[], tuple[Saturated, ...]]) -> None:
    """Sends counts once the device has them, while this rank goes on with the next step.

    Tells rank 0 and ends the process if the device fails: rank 0 would wait for the counts for ever.
    """
    try:
        counts = tuple((one.spec.geometry.index, one.k, one.v) for one in read())
    except Exception as fault:
        _log.exception("values beyond their range cannot be counted")
        voice.say_last(Failed(repr(fault)))
        os._exit(1)
    with suppress(OSError):  # rank 0 is gone: the pulse ends this process
        voice.say(Counted(counts))


def _pulse(pulse: socket.socket, left: Sequence[Path]) -> None:
    """Writes to the pulse every second; ends the process when rank 0 is gone. left: see `serve_rank`."""
    try:
        while True:
            pulse.send(b".")
            if select.select([pulse], [], [], PULSE_SECONDS)[0] and not pulse.recv(1):
                break
    except OSError:
        pass
    for directory in left:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def own_address(fd: int) -> str:
    """Returns this machine's address on a TCP connection, which stays open. fd: its descriptor."""
    with socket.socket(fileno=os.dup(fd)) as known:
        return str(known.getsockname()[0])


def main(link: int, pulse: int, place: int | None = None) -> int:
    """Serves as a rank over inherited sockets. Returns the exit code."""
    logging.basicConfig(stream=sys.stderr, format=f"kvant rank {os.getpid()}: %(message)s")
    left: list[Path] = []
    beating = threading.Thread(target=_pulse, args=(socket.socket(fileno=pulse), left), daemon=True)
    beating.start()
    try:
        serve_rank(Connection(link), place, left)
    except KvantError:
        return 1  # rank 0 was told
    except Exception:
        _log.exception("a rank ends")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
