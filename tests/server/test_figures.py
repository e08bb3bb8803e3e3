"""The larger figures, each with the number it is held to. Slow; they print what they measured."""

from __future__ import annotations

import json
import os
import random
import signal
import string
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.engine.tiny_chat import FILLING_VOCAB
from tests.server import light_client, slow_client
from tests.server.harness import MODEL_LEN, Server, events
from tests.server.test_disconnect import LONG, _send
from tests.server.test_speculation import NGRAM

pytestmark = pytest.mark.slow


def test_500_random_disconnects_each_give_their_pages_back(server: Server) -> None:
    chance = random.Random(500)
    engine, usable = server.engine_pid(), server.metric("kvant:pages_usable")
    worst = 0.0
    for _ in range(500):
        sock = _send(server, {**LONG, "stream": chance.random() < 0.5})
        time.sleep(chance.choice((0.0, 0.01, 0.05)))
        sock.close()
        worst = max(worst, server.wait_idle(5))
    print(f"500 disconnects: worst {worst * 1000:.0f} ms")
    assert worst <= 1.0
    assert server.engine_pid() == engine
    assert server.metric("kvant:pages_usable") == usable


def _dflash(directory: Path) -> dict[str, object]:
    """A drafter that has learnt nothing: its drafts fall, its pages are written, read and given back."""
    from tests.speculative.pair import Drafter, config  # with torch

    drafter = Drafter(
        config(vocab_size=FILLING_VOCAB, mask_token_id=0, max_position_embeddings=MODEL_LEN)
    )
    drafter.save(directory)
    return {"method": "dflash", "model": str(directory), "adaptive": False}


@pytest.mark.parametrize("drafting", ["plain", "ngram", "dflash"])
def test_abort_storms_leave_every_page_with_its_owners(
    model: Path, drafting: str, tmp_path: Path
) -> None:
    """Sixteen clients leave half a second after they came, twenty times; one prefix, small chunks."""
    more: tuple[str, ...] = ()
    if drafting != "plain":
        asked = NGRAM if drafting == "ngram" else _dflash(tmp_path / "draft")
        more = ("--speculative-config", json.dumps(asked))
    flags = (
        "--max-num-seqs", "32", "--max-num-batched-tokens", "64", "--max-num-queued-reqs", "32",
        "--kv-cache-memory", "16MiB", *more,
    )  # fmt: skip
    with Server(model, flags, is_real=True) as server:
        engine, usable = server.engine_pid(), server.metric("kvant:pages_usable")
        chance = random.Random(13)
        slowest, cached = 0.0, 0
        for _ in range(20):
            socks = []
            for client in range(16):
                prompt = [5] * chance.choice((16, 100, 400)) + [6 + client]
                body = {
                    **LONG, "prompt": prompt, "max_tokens": 3000, "stream": client % 2 == 0,
                    "n": 1 + client % 2,
                }  # fmt: skip
                socks.append(_send(server, body))
            time.sleep(0.5)
            stays = server.complete([5] * 400, max_tokens=1).json["usage"]
            cached += stays["prompt_tokens_details"]["cached_tokens"]
            for sock in socks:
                sock.close()
            slowest = max(slowest, server.wait_idle(5))
            audits = server.metric("kvant:page_audits_total")
            ended = time.monotonic() + 5
            while server.metric("kvant:page_audits_total") == audits:
                assert time.monotonic() < ended, "an idle engine audits its pages"
                time.sleep(0.05)
        print(
            f"abort storms, {drafting}: pages back after at most {slowest * 1000:.0f} ms; {cached} cached"
        )
        assert slowest <= 1.0
        assert cached > 20 * 100, "the prefix was shared while they left"
        assert server.metric("kvant:page_audit_faults_total") == 0
        assert server.metric("kvant:requests_aborted_total") >= 20 * 16
        if drafting != "plain":
            assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 0
        assert server.engine_pid() == engine
        assert server.metric("kvant:pages_usable") == usable


def test_10000_canaries_never_answer_with_a_token_of_anybody_else(model: Path) -> None:
    """Each request may use one token of its own; 64 at once, one in twenty leaves early."""
    requests, clients = 10_000, 64
    flags = ("--max-num-seqs", "64", "--max-num-queued-reqs", "64")
    with Server(model, flags, is_real=True) as server:
        letters = {
            token: server.post("/detokenize", {"tokens": [token]}).json["prompt"]
            for token in server.post("/tokenize", {"prompt": string.ascii_letters}).json["tokens"]
        }
        assert len(set(letters.values())) == 52
        numbers = iter(range(requests))
        foreign: list[str] = []
        counts = {"answered": 0, "left": 0}
        lock = threading.Lock()

        def client(chance: random.Random) -> None:
            connection = server.connect()
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    break
                token = chance.choice(list(letters))
                size = chance.randrange(1, 9)
                own: dict[str, object] = chance.choice(
                    (
                        {"allowed_token_ids": [token], "ignore_eos": True},
                        {"logit_bias": {str(token): 100}, "ignore_eos": True},
                        {"guided_regex": letters[token] + f"{{{size}}}"},
                    )
                )
                body = {
                    **own, "prompt": [chance.choice(list(letters)) for _ in range(8)],
                    "max_tokens": size, "n": chance.choice((1, 1, 2)),
                    "temperature": chance.choice((0, 1)), "min_p": chance.choice((0, 0.1)),
                    "frequency_penalty": chance.choice((0, 1)),
                }  # fmt: skip
                if chance.random() < 0.05:
                    _send(server, {**body, "max_tokens": 500}).close()
                    counts["left"] += 1
                    continue
                sent = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/completions", json.dumps(body), sent)
                response = connection.getresponse()
                answer = json.loads(response.read())
                if response.status == 429:
                    time.sleep(0.01)
                    continue
                for choice in answer["choices"]:
                    if choice["text"] != letters[token] * size:
                        foreign.append(choice["text"])
                counts["answered"] += 1
            connection.close()

        threads = [
            threading.Thread(target=client, args=(random.Random(seed),)) for seed in range(clients)
        ]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"canaries: {counts}, {len(foreign)} foreign, {time.monotonic() - started:.0f} s")
        assert foreign == []
        assert counts["answered"] > 0.8 * requests
        server.wait_idle(5)


def test_32_requests_survive_kill_9(model: Path) -> None:
    with Server(model, ("--max-num-seqs", "32"), is_real=True) as server:
        bodies: list[bytes] = []
        statuses: list[int] = []
        ends: list[float] = []
        more = {"max_tokens": 4000, "ignore_eos": True}

        def stream() -> None:
            with server.open_stream(**more) as response:
                bodies.append(response.read())
            ends.append(time.monotonic())

        def call() -> None:
            statuses.append(server.complete("abc", **more).status)
            ends.append(time.monotonic())

        threads = [threading.Thread(target=target) for target in [stream] * 16 + [call] * 16]
        for thread in threads:
            thread.start()
        while server.metric("kvant:num_requests_running") < 32:
            time.sleep(0.01)
        killed = time.monotonic()
        os.kill(server.engine_pid(), signal.SIGKILL)
        while server.get("/health").status == 200:
            time.sleep(0.005)
        unhealthy = time.monotonic() - killed
        for thread in threads:
            thread.join(30)
        while server.get("/ready").status != 200:
            time.sleep(0.02)
        back = time.monotonic() - killed
        told = max(ends) - killed
        print(f"kill -9: health 503 {unhealthy:.2f} s, last told {told:.2f} s, back {back:.1f} s")
        assert len(ends) == 32
        assert statuses == [503] * 16
        assert all(events(body)[-1]["error"]["code"] == "engine_died" for body in bodies)
        assert unhealthy <= 1.0
        assert told <= 2.0
        assert server.complete("abc", max_tokens=2).status == 200


def test_400_trickling_connections_are_ended_and_others_hardly_notice(model: Path) -> None:
    """For a minute 200 that trickle headers and 200 that trickle bodies; each reconnects when it is cut."""
    with Server(model, ("--body-timeout", "14"), is_real=True) as server:
        connection = server.connect()
        body = json.dumps({"prompt": "abc", "max_tokens": 1, "temperature": 0})

        def latencies(seconds: float) -> list[float]:
            found = []
            ended = time.monotonic() + seconds
            while time.monotonic() < ended:
                started = time.monotonic()
                sent = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/completions", body, sent)
                response = connection.getresponse()
                response.read()
                assert response.status == 200
                found.append(time.monotonic() - started)
                time.sleep(0.01)
            return sorted(found)

        latencies(3)
        before = latencies(20)
        command = (sys.executable, "-S", slow_client.__file__, str(server.port), "200", "60")
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        during = latencies(60)
        assert client.stdout is not None
        found = json.loads(client.stdout.read())
        client.stdout.close()
        assert client.wait() == 0
        connection.close()

        def at(sorted_: list[float], share: float) -> float:
            return sorted_[int(len(sorted_) * share)] * 1000

        print(
            f"slow-loris: {found}; p50 {at(before, 0.5):.1f} -> {at(during, 0.5):.1f} ms, "
            f"p99 {at(before, 0.99):.1f} -> {at(during, 0.99):.1f} ms"
        )
        for kind in found.values():
            assert kind["closed"] >= 200
            assert kind["longest"] <= 15
        assert at(during, 0.99) <= 2 * at(before, 0.99)


def test_overload_keeps_the_queue_exact_and_refuses_at_once(model: Path) -> None:
    """Twenty times as many clients as places, for a minute."""
    flags = ("--max-num-seqs", "4", "--max-num-queued-reqs", "4")
    with Server(model, flags, is_real=True) as server:
        seconds, clients = 60, 160
        command = (sys.executable, "-S", light_client.__file__)
        memory = _resident(server)
        client = subprocess.Popen(
            [*command, str(server.port), str(clients), str(seconds), "0.5"],
            stdout=subprocess.PIPE,
            text=True,
        )
        most = 0.0
        while client.poll() is None:
            names = ("kvant:num_requests_running", "kvant:num_requests_waiting")
            most = max(most, sum(server.metric(name) for name in names))
            time.sleep(1.0)
        assert client.stdout is not None
        found = json.loads(client.stdout.read())
        client.stdout.close()
        counts, refused = found["counts"], found["refused"]
        grown = _resident(server) / memory - 1
        print(
            f"overload: {counts}, 429 in ms: p50 {refused['p50'] * 1000:.1f}, p99 "
            f"{refused['p99'] * 1000:.1f}, worst {refused['worst'] * 1000:.0f}; held {most:.0f}, "
            f"memory {grown:+.1%}"
        )
        assert set(counts) == {"200", "429"}
        assert most == 8
        assert refused["p99"] <= 0.05
        assert grown < 0.05
        server.wait_idle(5)


def _resident(server: Server) -> int:
    """Bytes of the API process."""
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


def test_a_text_of_5_mb_does_not_hold_up_the_others(server: Server) -> None:
    lags: list[float] = []
    done = threading.Event()

    def ask() -> None:
        connection = server.connect()
        while not done.is_set():
            started = time.monotonic()
            connection.request("GET", "/version")
            connection.getresponse().read()
            lags.append(time.monotonic() - started)
            time.sleep(0.002)
        connection.close()

    asking = threading.Thread(target=ask)
    asking.start()
    started = time.monotonic()
    answer = server.complete("the quick brown fox jumps, " * 200_000)
    took = time.monotonic() - started
    done.set()
    asking.join()
    print(f"5 MB of text: refused after {took:.1f} s, worst lag {max(lags) * 1000:.0f} ms")
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert max(lags) < 0.05
