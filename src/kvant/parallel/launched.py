"""Ranks on one or more machines, started by torchrun or by any launcher that sets its variables.

Rank 0 serves. It puts a port and a secret into the launcher's store. Each other process reads them there,
connects twice, and starts a `rank_process` that gets the two connections. When the engine ends, the process
waits for the next engine, which has another secret.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from kvant.errors import BadValue, EngineFault, WayOut
from kvant.parallel.messages import Hello, encode, read_hello
from kvant.parallel.ranks import spawn

GATHER_SECONDS = 600.0
"""Time within which all ranks must have connected."""
RETURN_SECONDS = 120.0
"""Time for which a rank whose engine has ended waits for the next engine."""

_HELLO_SECONDS = 5.0
_PAUSE_SECONDS = 0.5
_MOST_HELLO_BYTES = 4096
_KEY = "kvant/engine"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among those of a launcher. place: its rank on this machine, and its GPU's index.

    host, port: of the launcher's store. has_store: the launcher keeps that store; else rank 0 does.
    """

    rank: int
    size: int
    place: int
    host: str
    port: int
    has_store: bool


def read_launch(environ: Mapping[str, str], size: int) -> Launch:
    """Reads torchrun's variables. size: the engine's number of ranks. Raises BadValue if they do not fit."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not environ.get(name)]
    way_out = WayOut(
        "torchrun --nnodes HOSTS --nproc-per-node GPUS -m kvant serve MODEL "
        "--tensor-parallel-size RANKS --rank-launcher torchrun"
    )
    if missing:
        raise BadValue(
            "--rank-launcher torchrun: this process was not started by torchrun",
            why=f"{', '.join(missing)} is not set",
            ways_out=(
                way_out,
                WayOut("let the engine start its ranks", ("--rank-launcher", "here")),
            ),
        )
    try:
        rank, world, place, port = (int(environ[n]) for n in (*names[:3], "MASTER_PORT"))
    except ValueError as fault:
        raise BadValue("a variable of torchrun is not a number", why=str(fault)) from None
    if world != size or size == 1:
        raise BadValue(
            f"torchrun started {world} processes for --tensor-parallel-size {size}",
            why="each process is one rank, and there are two at least",
            ways_out=(WayOut("divide the model among them", ("-tp", str(max(2, world)))),),
        )
    is_agents = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(rank, world, place, environ["MASTER_ADDR"], port, is_agents)


def _store(launch: Launch, *, is_master: bool) -> Any:
    """Opens torchrun's store or, if it has none, rank 0's store at the same address."""
    import torch.distributed as dist

    made: Any = dist  # some of its names have no types
    return made.TCPStore(
        launch.host, launch.port, is_master=is_master, wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )  # fmt: skip


class RemoteRank:
    """Rank 0's view of a rank that it did not start."""

    def __init__(self, number: int, pid: int, link: socket.socket, pulse: socket.socket) -> None:
        self.number, self.pid, self.pulse = number, pid, pulse
        self._sockets = (link.dup(), pulse.dup())
        self.link: Connection[bytes, bytes] = Connection(link.detach())

    def kill(self) -> None:
        """Closes the rank's connections, which ends it."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def wait(self, timeout: float | None = None) -> int:
        """Returns 0, since the launcher waits for the process. With a timeout, ends it and raises."""
        if timeout is None:
            return 0
        self.kill()
        raise subprocess.TimeoutExpired(f"rank {self.number}", timeout)


@dataclass(frozen=True, slots=True)
class Gathered:
    """The connections to all other ranks. address: this machine's address for them.

    meet, store: where collectives connect. known: the launcher's store, which must live as long as the engine
    if rank 0 keeps it.
    """

    joined: tuple[RemoteRank, ...]
    address: str
    meet: str
    store: Any
    known: Any


def gather(launch: Launch) -> Gathered:
    """Waits, as rank 0, until all other ranks are connected. Raises EngineFault after GATHER_SECONDS."""
    import torch.distributed as dist

    made: Any = dist
    if launch.rank != 0:
        raise EngineFault(f"an engine is rank 0, not rank {launch.rank}")
    known = _store(launch, is_master=not launch.has_store)
    own = made.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    secret = secrets.token_hex(16)
    links: dict[int, tuple[socket.socket, int]] = {}
    pulses: dict[int, socket.socket] = {}
    others = set(range(1, launch.size))
    with socket.create_server(("", 0), backlog=2 * launch.size) as listening:
        port = listening.getsockname()[1]
        known.set(_KEY, json.dumps({"port": port, "store": own.port, "secret": secret}))
        end = time.monotonic() + GATHER_SECONDS
        while missing := others - (links.keys() & pulses.keys()):
            listening.settimeout(max(0.01, end - time.monotonic()))
            try:
                found, _ = listening.accept()
            except TimeoutError:
                raise EngineFault(
                    f"ranks {sorted(missing)} did not come within {GATHER_SECONDS:.0f} s"
                ) from None
            hello = _heard(found, secret)
            if hello is None or hello.rank not in others:
                _log.warning("a connection without the secret of these ranks was refused")
                found.close()
            elif hello.is_pulse:
                pulses[hello.rank] = found
            else:
                links[hello.rank] = found, hello.pid
    addresses = {str(link.getsockname()[0]) for link, _ in links.values()}
    address = next((one for one in sorted(addresses) if not one.startswith("127.")), "127.0.0.1")
    joined = tuple(RemoteRank(n, links[n][1], links[n][0], pulses[n]) for n in sorted(others))
    return Gathered(joined, address, f"{launch.host}:{own.port}", own, known)


def _heard(found: socket.socket, secret: str) -> Hello | None:
    """Returns a connection's first message, or None if it lacks the secret or is no valid message."""
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found.settimeout(_HELLO_SECONDS)
    try:
        size = int.from_bytes(_exactly(found, 4), "big")
        hello = read_hello(_exactly(found, size)) if size <= _MOST_HELLO_BYTES else None
    except (OSError, EOFError, msgspec.DecodeError):
        return None
    found.settimeout(None)
    return hello if hello and hmac.compare_digest(hello.secret, secret) else None


def _exactly(found: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = found.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def join(launch: Launch) -> int:
    """Serves as a rank of one engine after another. Returns the exit code when no further engine comes."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        return _join(launch)
    finally:
        signal.signal(signal.SIGTERM, before)


def _join(launch: Launch) -> int:
    seen, served, end = "", False, time.monotonic() + GATHER_SECONDS
    known: Any = None
    while time.monotonic() < end:
        told = None
        with contextlib.suppress(Exception):  # torch's exceptions of stores have no common base
            known = known or _store(launch, is_master=False)
            if known.check([_KEY]):
                told = known.get(_KEY).decode()
        if told is None:
            known = None
        # The address of an engine that has ended may still be in the store.
        sockets = None if told in (None, seen) else _connected(launch, json.loads(told))
        if told is None or sockets is None:
            time.sleep(_PAUSE_SECONDS)
            continue
        seen = told
        child = spawn(*sockets, launch.place)
        for one in sockets:
            one.close()
        try:
            child.wait()
        finally:
            child.kill()
        served, end = True, time.monotonic() + RETURN_SECONDS
    _log.warning("rank %d: no engine came", launch.rank)
    return 0 if served else 1


def _connected(
    launch: Launch, told: Mapping[str, Any]
) -> tuple[socket.socket, socket.socket] | None:
    """Opens the two connections to rank 0. Returns None if it does not listen."""
    made: list[socket.socket] = []
    try:
        for is_pulse in (False, True):
            one = socket.create_connection((launch.host, told["port"]), _HELLO_SECONDS)
            made.append(one)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.settimeout(None)
            hello = encode(Hello(told["secret"], launch.rank, is_pulse, os.getpid()))
            one.sendall(len(hello).to_bytes(4, "big") + hello)
    except OSError:
        for one in made:
            one.close()
        return None
    return made[0], made[1]
