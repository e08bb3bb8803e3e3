"""Two CPU replicas under Ray: prefixes, a killed replica, scaling, ranks, and Serve's own ingress.

Ray lives in any environment that also has Kvant's packages: `pip install 'kvant[ray]'`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.harness import Server, build_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="the extra ray is not installed"
    ),
]
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0
START = 400.0
FLAGS = (
    "--device", "cpu", "--ray", "--ray-address", "local", "--max-num-seqs", "4",
    "--kv-cache-memory", "4MiB",
)  # fmt: skip
BACK_SECONDS = 200.0
"""A bound for cores that do other work too."""


@dataclass
class Cluster(Server):
    """`kvant serve --ray`. Its replicas are actors of a cluster that ends with it."""

    is_real: bool = True

    def health(self) -> dict[str, Any]:
        return self.get("/health").json  # type: ignore[no-any-return]

    def wait_for(self, count: int, seconds: float = BACK_SECONDS) -> float:
        """Waits until `count` replicas answer. Returns the seconds that it took."""
        began = time.monotonic()
        while self.health()["ready"] != count:
            assert time.monotonic() - began < seconds, self.health()
            time.sleep(0.1)
        return time.monotonic() - began

    def replica_pids(self) -> list[int]:
        return [pid for pid in _descendants(self.process.pid) if "KvantReplica" in _command(pid)]


def _descendants(pid: int) -> list[int]:
    """Returns the processes below `pid`, so that tests end no process of another Ray cluster."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        parents[int(text.split()[0])] = int(text.rpartition(")")[2].split()[1])
    found, rest = [], [pid]
    while rest:
        parent = rest.pop()
        children = [child for child, its in parents.items() if its == parent]
        found += children
        rest += children
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = build_model(tmp_path_factory.mktemp("model"))
    with Cluster(model, (*FLAGS, "--num-replicas", "2"), start_seconds=START) as found:
        yield found


def _chat(server: Server, opening: str, turns: int) -> int:
    """The prompt's cached tokens."""
    messages = [{"role": "system", "content": opening}]
    messages += [{"role": "user", "content": "Say yes."}] * turns
    answer = server.post(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 2, "temperature": 0}
    )
    assert answer.status == 200, answer.body
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_conversation_stays_with_the_replica_that_knows_it(cluster: Cluster) -> None:
    openings = [f"{name}: " + "you answer with one word. " * 20 for name in "abcdef"]
    first = [_chat(cluster, opening, 1) for opening in openings]
    later = [_chat(cluster, opening, turn) for turn in (2, 3) for opening in openings]
    assert max(first) == 0
    assert min(later) > 100
    text = cluster.get("/metrics").body.decode()
    found = re.findall(r'^vllm:prompt_tokens_total\{replica="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    assert len({name for name, value in found if float(value)}) == 2, "one replica had all"


@dataclass
class Outcome:
    streams: bool
    began: float
    events: int = 0
    first: float = 0.0
    told: float = 0.0
    ended: float = 0.0
    done: bool = False
    fault: str = ""
    others: list[str] = field(default_factory=list)


def _ask(server: Server, outcome: Outcome, prompt: str) -> None:
    connection = server.connect()
    body = {
        "prompt": prompt, "max_tokens": 500 if outcome.streams else 50, "temperature": 0,
        "ignore_eos": True, "stream": outcome.streams,
    }  # fmt: skip
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        connection.sock.settimeout(SECONDS)
        response = connection.getresponse()
        outcome.first = time.monotonic()
        if response.status != 200:
            outcome.fault = response.read().decode()
        elif not outcome.streams:
            outcome.done = bool(json.loads(response.read())["choices"])
        else:
            while line := response.readline():
                if b'"error"' in line:
                    outcome.told, outcome.fault = time.monotonic(), line.decode()
                elif b"[DONE]" in line:
                    outcome.done = True
                elif line.startswith(b"data"):
                    outcome.events += 1
    except (OSError, ValueError) as fault:
        outcome.fault = repr(fault)
    finally:
        outcome.ended = time.monotonic()
        connection.close()


def test_a_killed_replica_loses_nothing_that_had_not_begun(cluster: Cluster) -> None:
    cluster.wait_for(2)
    outcomes: list[Outcome] = []
    stop = threading.Event()

    def load(number: int) -> None:
        turn = 0
        while not stop.is_set():
            outcome = Outcome(streams=(turn + number) % 2 == 0, began=time.monotonic())
            outcomes.append(outcome)
            _ask(cluster, outcome, f"client {number} asks {turn}")
            turn += 1

    threads = [threading.Thread(target=load, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(4)
        victim = cluster.replica_pids()[0]
        (engine,) = (p for p in _descendants(victim) if "engine_process" in _command(p))
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        while cluster.health()["ready"] == 2:
            assert time.monotonic() - killed < 15, "the loss is not seen"
            time.sleep(0.05)
        assert cluster.get("/health").status == 200  # the other one serves
        back = cluster.wait_for(2) + 0.0
    finally:
        stop.set()
        for thread in threads:
            thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    told = [one for one in outcomes if one.fault]
    assert all(one.streams and one.events and "replica_lost" in one.fault for one in told), told
    assert all(0 < one.told - killed < 2 for one in told)
    assert all(one.done for one in outcomes)
    open_then = [one for one in outcomes if one.began < killed < one.ended]
    assert len(open_then) >= 6
    assert told, "no stream ran on the killed replica"
    assert not Path(f"/proc/{engine}").exists(), "the engine of the killed replica is left"
    print(f"\ntold within {max(one.told - killed for one in told):.3f} s, back after {back:.1f} s")


def test_a_dead_engine_is_asked_around_while_its_replica_restarts_it(cluster: Cluster) -> None:
    cluster.wait_for(2)
    (engine, *_) = (
        p for one in cluster.replica_pids() for p in _descendants(one)
        if "engine_process" in _command(p)
    )  # fmt: skip
    os.kill(engine, signal.SIGKILL)
    for turn in range(8):
        assert cluster.complete(f"while it restarts {turn}", max_tokens=4).status == 200
    cluster.wait_for(2)


def test_a_stored_response_is_found_from_anywhere(cluster: Cluster) -> None:
    made = [cluster.post("/v1/responses", {"input": f"n {n}", "max_output_tokens": 2}).json["id"]
            for n in range(4)]  # fmt: skip
    for id in made * 2:
        assert cluster.get(f"/v1/responses/{id}").json["id"] == id
    assert cluster.get("/v1/responses/resp_none").error["code"] == "response_not_found"


def test_a_drain_lets_a_stream_end_and_leaves_nothing(tmp_path: Path) -> None:
    """One replica of two ranks, in one placement group of two cores."""
    flags = (*FLAGS, "--replica-cpus", "2", "--tensor-parallel-size", "2")
    with Cluster(build_model(tmp_path), flags, start_seconds=START) as one:
        pids = [one.process.pid, *_descendants(one.process.pid)]
        assert sum("rank_process" in _command(pid) for pid in pids) == 1
        with one.open_stream(max_tokens=200) as response:
            response.readline()
            one.process.send_signal(signal.SIGTERM)
            rest = response.read()
        assert rest.rstrip().endswith(b"data: [DONE]")
        assert b'"error"' not in rest
        assert one.process.wait(60) == 0
        end = time.monotonic() + 20
        while left := [p for p in pids if Path(f"/proc/{p}").exists() and _command(p)]:
            assert time.monotonic() < end, [_command(pid) for pid in left]
            time.sleep(0.2)


def test_replicas_follow_the_load_within_their_bounds(tmp_path: Path) -> None:
    flags = (*FLAGS, "--num-replicas", "1", "--max-num-replicas", "2",
             "--target-ongoing-requests", "1")  # fmt: skip
    with Cluster(build_model(tmp_path), flags, start_seconds=START) as one:
        assert one.health()["ready"] == 1
        stop = threading.Event()
        seen: list[int] = []

        def load(number: int) -> None:
            while not stop.is_set():
                _ask(one, Outcome(streams=True, began=0.0), f"load {number}")

        threads = [threading.Thread(target=load, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        try:
            end = time.monotonic() + SECONDS + 60
            while 2 not in seen:
                assert time.monotonic() < end, "no second replica came"
                seen.append(one.health()["ready"])
                time.sleep(0.5)
            time.sleep(5)
            seen.append(one.health()["ready"])
        finally:
            stop.set()
            for thread in threads:
                thread.join(SECONDS)
        assert max(seen) == 2


@contextmanager
def _served(model: Path, directory: Path) -> Iterator[int]:
    """The port of the application of deploy/ray/kvant.yaml with a tiny model, in a cluster of its own."""
    given = yaml.safe_load((ROOT / "deploy" / "ray" / "kvant.yaml").read_text())
    (app,) = given["applications"]
    app["args"] |= {
        "model": str(model), "num_replicas": 1, "max_num_replicas": 1, "device": "cpu",
        "kv_cache_memory": "4MiB",
    }  # fmt: skip
    port = 18000 + os.getpid() % 2000
    code = (
        "import json, sys, time, importlib, ray\nfrom ray import serve\n"
        "given = json.loads(sys.argv[1]); (app,) = given['applications']\n"
        "module, name = app['import_path'].split(':')\n"
        "ray.init('local')\n"
        "serve.start(http_options={'host': '127.0.0.1', 'port': int(sys.argv[2])})\n"
        "built = getattr(importlib.import_module(module), name)(app['args'])\n"
        "serve.run(built, name=app['name'], route_prefix=app['route_prefix'])\n"
        "print('SERVES', flush=True)\nsys.stdin.read()\nserve.shutdown(); ray.shutdown()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(given), str(port)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "SERVES" in line:
                break
        else:
            raise AssertionError("".join(lines))
        drain = threading.Thread(target=process.stdout.read, daemon=True)
        drain.start()
        yield port
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        drain.join(10)
        process.stdout.close()


def test_the_application_file_serves_through_rays_own_proxy(tmp_path: Path) -> None:
    model = build_model(tmp_path)
    with _served(model, tmp_path) as port:
        found = Server(model, port=port)
        assert found.get("/health").json["ready"] == 1
        name = found.get("/v1/models").json["data"][0]["id"]
        assert found.complete("abc", max_tokens=4, model=name).status == 200
        with found.open_stream(max_tokens=20) as response:
            assert response.read().rstrip().endswith(b"data: [DONE]")
        assert found.get("/v1/nothing").status == 404
        assert found.send("GET", "/health", headers={"Host": "evil.example"}).status == 403
