"""Ranks that torchrun starts: its variables, the meeting with its secret, and two hosts as two agents."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from kvant.errors import BadValue, EngineFault
from kvant.parallel import launched as module
from kvant.parallel.launched import Launch, RemoteRank, gather, read_launch
from kvant.parallel.messages import Hello, encode
from kvant.parallel.ring import LinkReader, LinkSender
from tests.server.harness import Server, build_model, events

GIVEN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "29500",
}  # fmt: skip


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_the_variables_of_torchrun_are_read_or_refused_with_a_way_out() -> None:
    assert read_launch(GIVEN, 4) == Launch(1, 4, 0, "host", 29500, False)
    assert read_launch({**GIVEN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, 4).has_store
    with pytest.raises(BadValue, match="RANK, MASTER_PORT is not set"):
        read_launch({n: v for n, v in GIVEN.items() if n not in ("RANK", "MASTER_PORT")}, 4)
    with pytest.raises(BadValue, match="not a number"):
        read_launch({**GIVEN, "RANK": "one"}, 4)
    with pytest.raises(BadValue, match="4 processes for --tensor-parallel-size 2") as caught:
        read_launch(GIVEN, 2)
    assert read_launch(GIVEN, int(caught.value.ways_out[0].arguments[1])).size == 4
    with pytest.raises(BadValue, match="two at least"):
        read_launch({**GIVEN, "WORLD_SIZE": "1"}, 1)


def _told(port: int) -> dict[str, Any]:
    known: Any = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return json.loads(known.get(module._KEY))  # type: ignore[no-any-return]


def _knock(port: int, data: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port))
    made.sendall(data)
    return made


def test_ranks_meet_by_the_secret_and_strangers_are_refused() -> None:
    port = _free_port()
    found: list[module.Gathered] = []
    zero = Launch(0, 3, 0, "127.0.0.1", port, False)
    waiting = threading.Thread(target=lambda: found.append(gather(zero)))
    waiting.start()
    told = _told(port)
    strangers = [
        _knock(told["port"], (1 << 31).to_bytes(4, "big")),
        _knock(told["port"], (3).to_bytes(4, "big") + b"abc"),
    ]
    for hello in (Hello("wrong", 1, False, 1), Hello(told["secret"], 7, False, 1)):
        data = encode(hello)
        strangers.append(_knock(told["port"], len(data).to_bytes(4, "big") + data))
    for one in strangers:
        assert one.recv(1) == b""  # it was closed
        one.close()
    ends = {}
    for rank in (2, 1):
        connected = module._connected(Launch(rank, 3, 0, "127.0.0.1", port, False), told)
        assert connected is not None
        ends[rank] = connected
    waiting.join(20)
    (gathered,) = found
    assert [one.number for one in gathered.joined] == [1, 2]
    assert gathered.address == "127.0.0.1"
    sender = LinkSender()
    links = [one.link for one in gathered.joined]
    assert sender.send(b"x" * 100_000, links) is None
    for one in gathered.joined:
        reader = LinkReader(_connection(ends[one.number][0]))
        assert reader.receive() == b"x" * 100_000
        ends[one.number][1].sendall(b".")
        assert one.pulse.recv(1) == b"."
    gathered.joined[1].kill()
    assert ends[2][1].recv(1) == b""
    assert sender.send(b"y", links) == 1
    assert module._connected(zero, {**told, "port": _free_port()}) is None
    _close(gathered.joined, ends)


def _connection(end: socket.socket) -> Any:
    from multiprocessing.connection import Connection

    return Connection(os.dup(end.fileno()))


def _close(joined: tuple[RemoteRank, ...], ends: dict[int, tuple[socket.socket, ...]]) -> None:
    for one in joined:
        one.kill()
        one.link.close()
        one.pulse.close()
    for pair in ends.values():
        for end in pair:
            end.close()


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GATHER_SECONDS", 0.2)
    with pytest.raises(EngineFault, match=r"ranks \[1, 2\] did not come"):
        gather(Launch(0, 3, 0, "127.0.0.1", _free_port(), False))
    with pytest.raises(EngineFault, match="an engine is rank 0"):
        gather(Launch(1, 3, 0, "127.0.0.1", _free_port(), False))
    assert module.join(Launch(1, 3, 0, "127.0.0.1", _free_port(), False)) == 1


@dataclass(frozen=True)
class Network:
    """A namespace of the kernel that is connected to this one's network by two addresses."""

    name: str
    here: str
    there: str

    def set(self, state: str) -> None:
        """Connects both with "up", and loses what is sent between them with "down"."""
        _run("ip", "link", "set", f"{self.name}a", state)


@pytest.fixture
def network() -> Iterator[Network]:
    """A network of its own for a second host; only root may make one."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root makes networks, with ip")
    name, third = f"kvant{os.getpid() % 100_000}", os.getpid() % 250
    made = Network(name, f"10.213.{third}.1", f"10.213.{third}.2")
    within = ("ip", "netns", "exec", name)
    try:
        try:
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", f"{name}a", "type", "veth", "peer", f"{name}b", "netns", name)
        except subprocess.CalledProcessError as fault:
            pytest.skip(f"this machine allows no networks: {fault}")
        _run("ip", "addr", "add", f"{made.here}/30", "dev", f"{name}a")
        _run(*within, "ip", "addr", "add", f"{made.there}/30", "dev", f"{name}b")
        made.set("up")
        _run(*within, "ip", "link", "set", f"{name}b", "up")
        _run(*within, "ip", "link", "set", "lo", "up")
        yield made
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Agents(Server):
    """`kvant serve` by two agents of torchrun, each of which stands for a host of one rank.

    network: of the second host; None if both share one. Then it also has a directory, an environment and
    files of the model of its own.
    """

    network: Network | None = None

    def start(self) -> None:
        port = _free_port()
        self.agents = []
        for node in (0, 1):
            before: tuple[str, ...] = ()
            cwd: Path | None = None
            more: dict[str, str] = {}
            model, master = self.model, "127.0.0.1"
            if self.network is not None:
                master = self.network.here
                cwd = self.model.parent / f"host{node}"
                cwd.mkdir()
                more = {"HOME": str(cwd), "XDG_CACHE_HOME": str(cwd / "cache")}
                if node:
                    before = ("ip", "netns", "exec", self.network.name)
                    model = Path(shutil.copytree(self.model, cwd / "copied"))
            command = [
                *before, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                "--node-rank", str(node), "--nproc-per-node", "1",
                "--master-addr", master, "--master-port", str(port),
                "-m", "kvant", "serve", str(model), "--port", "0", *self.flags,
            ]  # fmt: skip
            self.agents.append(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **more},
                )
            )  # fmt: skip
        self.process = self.agents[0]
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.agents[1].stdout is not None
        self.drain = threading.Thread(target=self.agents[1].stdout.read, daemon=True)
        self.drain.start()

    def __exit__(self, *about: Any) -> None:
        other = self.agents[1]
        other.terminate()
        super().__exit__(*about)
        try:
            other.wait(20)
        except subprocess.TimeoutExpired:
            other.kill()
            other.wait()
        self.drain.join(5)
        assert other.stdout is not None
        other.stdout.close()

    def pid_of(self, agent: int, name: str) -> int:
        found, rest = [], [self.agents[agent].pid]
        while rest:
            pid = rest.pop()
            for task in Path(f"/proc/{pid}/task").iterdir():
                rest += map(int, (task / "children").read_text().split())
            if name in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
        (pid,) = found
        return pid


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("real_processes")
def test_two_hosts_answer_as_one_device_and_a_lost_rank_comes_back(tmp_path: Path) -> None:
    model = build_model(tmp_path)
    flags = ("--device", "cpu", "--max-num-seqs", "4", "--kv-cache-memory", "4MiB")
    with Server(model, flags, start_seconds=300) as one:
        golden = one.complete("xyz", max_tokens=8).json["choices"]
    both = (*flags, "-tp", "2", "--rank-launcher", "torchrun")
    with Agents(model, both, start_seconds=300) as two:
        assert two.complete("xyz", max_tokens=8).json["choices"] == golden
        for agent, name in ((1, "rank_process"), (0, "engine_process")):
            pid = two.pid_of(agent, name)
            with two.open_stream(max_tokens=4000) as response:
                begun = response.readline()
                os.kill(pid, signal.SIGKILL)
                killed = time.monotonic()
                assert "error" in events(begun + response.read())[-1]
                assert time.monotonic() - killed < 10
            while two.get("/health").status != 200:
                assert time.monotonic() - killed < 300
                time.sleep(0.5)
            assert two.complete("xyz", max_tokens=8).json["choices"] == golden


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("real_processes")
def test_hosts_of_two_networks_answer_as_one_device_and_survive_a_cut(
    tmp_path: Path, network: Network
) -> None:
    model = build_model(tmp_path)
    flags = ("--device", "cpu", "--max-num-seqs", "4", "--kv-cache-memory", "4MiB")
    with Server(model, flags, start_seconds=300) as one:
        golden = one.complete("xyz", max_tokens=8).json["choices"]
    hosts = Agents(model, (*flags, "-tp", "2", "--rank-launcher", "torchrun"), start_seconds=300)
    hosts.network = network
    with hosts as two:
        assert two.complete("xyz", max_tokens=8).json["choices"] == golden
        with two.open_stream(max_tokens=4000) as response:
            begun = response.readline()
            network.set("down")
            cut = time.monotonic()
            assert "error" in events(begun + response.read())[-1]
            told = time.monotonic() - cut
        assert told < 12  # 10 on a machine that is not busy
        network.set("up")
        while two.get("/health").status != 200:
            assert time.monotonic() - cut < 300
            time.sleep(0.5)
        sys.stderr.write(f"told after {told:.1f} s, back after {time.monotonic() - cut:.1f} s\n")
        assert two.complete("xyz", max_tokens=8).json["choices"] == golden
