"""Engines around a fake model that give and take pages, and a process that has one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from kvant.engine.engine import Engine
from kvant.kv.identity import PageIdentity
from kvant.kv.offload.build import build_tiers
from kvant.kv.offload.mover import HostRows
from kvant.kv.offload.moves import Bell
from kvant.kv.offload.policy import BreakEven
from kvant.kv.offload.tiers import Catalog, Tiers
from kvant.kv.pages import CacheIdentity, SharedPages
from kvant.kv.transfer.config import Address
from kvant.kv.transfer.giver import Giver
from kvant.kv.transfer.messages import GroupRows, Part
from kvant.kv.transfer.taker import Taker
from kvant.sampling.sampling_params import SamplingParams
from tests.engine.fakes import RememberingRunner, make_engine

PAGE = 4
NUM_PAGES = 64
HOST_PAGES = 400
IDENTITY = PageIdentity("w", "stored", "f", "s", "r", "l", "none", "")


def prompt(number: int, length: int = 40) -> list[int]:
    return [(7 * number + 5 * j * j + j) % 90 + 4 for j in range(length)]


def free_address() -> Address:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", int(found.getsockname()[1]))


def exchanging(
    give: Address | None = None,
    take: Address | None = None,
    identity: PageIdentity = IDENTITY,
    num_ranks: int = 1,
) -> tuple[Engine, RememberingRunner]:
    """A fake model whose pages others take, or that takes those of another. num_ranks: that it names."""

    def parts(rows: HostRows) -> list[Part]:
        groups = [GroupRows(None, rows.row_bytes[0], rows.stride(0), [])]
        return [Part(identity.fields, b"", rows.address, groups)] * num_ranks

    def giver(rows: HostRows, catalog: Catalog) -> Giver:
        assert give is not None
        return Giver(give, catalog, parts(rows), PAGE, rows)

    def takers(rows: HostRows, bell: Bell) -> Sequence[Taker]:
        assert take is not None
        return [Taker(take, parts(rows), rows, bell)]

    def tiers(shared: SharedPages, runner: RememberingRunner) -> Tiers:
        pieces = [[runner.stored.view(torch.uint8).view(NUM_PAGES, -1)]]
        return build_tiers(
            shared, pieces, HOST_PAGES * 8 * PAGE, policy=BreakEven(PAGE, latency=-1e9),
            give=None if give is None else giver, peers=None if take is None else takers,
        )  # fmt: skip

    engine, runner = make_engine(num_pages=NUM_PAGES, page_size=PAGE, offload=tiers)
    engine.refit(CacheIdentity("pages", None, identity.digest.hex()))
    return engine, runner


def settle(engine: Engine) -> None:
    """Until no page is on its way."""
    end = time.monotonic() + 20
    while engine.is_moving:
        engine.move(0.01)
        assert time.monotonic() < end
    engine.audit()


def run(engine: Engine, tokens: Sequence[int], num_tokens: int = 6, salt: str = "") -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    number = engine.submit(tokens, params, salt=salt)
    found: list[int] = []
    while engine.has_work:
        for piece in engine.step():
            if piece.result is not None and piece.number == number:
                found = list(piece.result.token_ids)
        engine.audit()
    settle(engine)
    return found


class GivingProcess:
    """A process whose engine computed some prompts and gives their pages."""

    def __init__(self, address: Address, num_prompts: int = 3) -> None:
        root = Path(__file__).parents[3]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(address.port), str(num_prompts)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def stop(self) -> None:
        """Makes it hang."""
        self._process.send_signal(signal.SIGSTOP)


def _main() -> None:
    engine, _ = exchanging(give=Address("127.0.0.1", int(sys.argv[1])))
    for number in range(int(sys.argv[2])):
        run(engine, prompt(number), num_tokens=1)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    _main()
