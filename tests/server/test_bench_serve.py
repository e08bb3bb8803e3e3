"""`kvant bench serve`: it counts what clients saw, also from a server that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvant.errors import BadValue
from kvant.measure.http_stream import parse_target
from kvant.measure.servers import parse_servers, ratios, run_all, table
from kvant.measure.serving import Load, Round, run
from tests.cli.command import kvant
from tests.server.harness import Server

LOAD = Load(rate=20, seconds=0.5, input=3, output=4, vocabulary=400)
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def test_a_server_under_load_with_aborts_loses_no_page(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    ran = kvant(
        "bench", "serve", f"http://127.0.0.1:{server.port}", "--rate", "10", "--rate", "20",
        "--seconds", "1.5", "--input", "20", "--output", "24", "--aborts", "0.5",
        "--vocabulary", "250", "--api-key=only-for-this-server", "--out", out,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "only-for-this-server" not in out.read_text()
    found = json.loads(out.read_text())
    (measured,) = found["servers"]
    assert [one["load"]["rate"] for one in measured["rounds"]] == [10, 20]
    for one in measured["rounds"]:
        outcomes = one["outcomes"]
        assert sum(outcomes.values()) == one["requests"] > 0
        assert outcomes["failed"] == 0, one["failures"]
        assert outcomes["completed"] * 24 <= one["output_tokens"]
        assert one["server"]["kvant:page_audits_total"] >= 1
        assert one["server"]["kvant:page_audit_faults_total"] == 0
    assert sum(one["outcomes"]["aborted"] for one in measured["rounds"]) > 0
    assert sum(one["outcomes"]["completed"] for one in measured["rounds"]) > 0


def test_events_cut_anywhere_between_chunks_are_read_whole() -> None:
    said = b"".join(
        b"data: %s\n\n" % json.dumps(one).encode()
        for one in [*({"choices": [{"text": "a"}]} for _ in range(4)),
                    {"choices": [], "usage": {"completion_tokens": 4}}]
    ) + b": ping\n\ndata: [DONE]\n\n"  # fmt: skip

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for start in range(0, len(said), 7):
            part = said[start : start + 7]
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    found = under(answer)
    assert found.outcomes["completed"] == found.requests > 0
    assert found.output_tokens == 4 * found.requests
    assert found.ttft is not None
    assert found.itl is not None
    assert 0 < found.ttft.p50 <= found.ttft.p99 <= found.ttft.most


def test_time_a_token_counts_tokens_where_events_carry_several() -> None:
    """Three events of four tokens each, 0.06 s apart: 0.12 s for the eleven tokens after the first."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for text in ({"choices": [{"text": "a b c d"}]},) * 3:
            said = b"data: %s\n\n" % json.dumps(text).encode()
            writer.write(b"%x\r\n%s\r\n" % (len(said), said))
            await writer.drain()
            await asyncio.sleep(0.06)
        said = b'data: {"choices": [], "usage": {"completion_tokens": 12}}\n\n'
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(said), said))

    found = under(answer, replace(LOAD, output=12))
    assert found.outcomes["completed"] == found.requests > 0
    assert found.tpot is not None
    assert found.itl is not None
    assert 0.1 / 11 < found.tpot.p50 < 0.2 / 11
    assert found.itl.p50 > 0.05


def test_servers_get_the_same_prompts_and_none_gets_one_twice() -> None:
    """Or they would not be measured by the same load, or a prefix cache would answer for one."""
    prompts: list[str] = []
    others: list[str] = []
    seen: list[tuple[str, float]] = []

    async def both(url: str) -> None:
        await beside(broken, partial(offered, url), others)

    async def offered(url: str, other: str) -> None:
        loads = [replace(LOAD, rate=rate, input=30) for rate in (40.0, 60.0)]
        servers = parse_servers([f"one={url}", f"two={other}"], "m")
        async for server, found in run_all(servers, loads, warm_up_requests=2, seed=0):
            seen.append((server.name, found.load.rate))

    async def broken(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"0\r\n\r\n")

    asyncio.run(beside(broken, both, prompts))
    assert seen == [("one", 40), ("two", 40), ("one", 60), ("two", 60)]
    assert len(prompts) > 30
    assert len(set(prompts)) == len(prompts)
    assert sorted(prompts) == sorted(others)


def test_the_first_servers_times_are_shown_over_the_others() -> None:
    """One that sends an event each 200 ms beside one that does each 40 ms."""

    def answer(seconds: float) -> Answer:
        async def written(writer: asyncio.StreamWriter) -> None:
            writer.write(HEAD)
            for one in [{"choices": [{"text": "a"}]}] * 4 + [{"usage": {"completion_tokens": 4}}]:
                await asyncio.sleep(seconds)
                said = b"data: %s\n\n" % json.dumps(one).encode()
                writer.write(b"%x\r\n%s\r\n" % (len(said), said))
            writer.write(b"0\r\n\r\n")

        return written

    slow, fast = parse_servers(["slow=http://127.0.0.1:1", "fast=http://127.0.0.1:2"])
    found = [(slow, under(answer(0.2))), (fast, under(answer(0.04)))]
    shown = ratios(found).splitlines()
    assert shown[0].startswith("| slow over | requests/s | TTFT p50 ")
    name, rate, *times = shown[-1].strip("| ").split(" | ")
    assert (name, rate) == ("fast", "20")
    assert len(times) == 5
    assert all(1.5 < float(time) < 12 for time in times), times
    assert table(found).count("| 3/4 |") == 2
    assert ratios(found[:1]) == ""


def test_servers_are_told_apart_by_name() -> None:
    plain, named = parse_servers(["http://host:1/v1?a=b", "x=http://host:1"])
    assert (plain.name, named.name) == ("host:1", "x")
    with pytest.raises(BadValue, match="two servers are called host:1"):
        parse_servers(["http://host:1", "http://host:1"])


def test_refusals_and_cut_answers_are_told_apart() -> None:
    async def busy(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}")

    async def broken(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"5\r\ndata:")

    refused = under(busy)
    assert refused.outcomes["refused"] == refused.requests > 0
    cut = under(broken)
    assert cut.outcomes["failed"] == cut.requests > 0
    assert cut.failures


def test_a_server_that_is_not_there_is_the_users_to_mend() -> None:
    ran = kvant("bench", "serve", "http://127.0.0.1:1", "--seconds", "0.1")
    assert ran.code == 2
    assert ran.err.startswith("kvant: error: 127.0.0.1:1 names no model")
    assert "Traceback" not in ran.err


def test_what_is_no_url_is_refused_by_name() -> None:
    with pytest.raises(BadValue, match="127\\.0\\.0\\.1 is no server"):
        parse_target("127.0.0.1")
    assert parse_target("http://host:8000/v1/").base == ""
    assert parse_target("https://host/other/v1").base == "/other"
    assert parse_target("https://host/").authority == "host:443"
    assert parse_target("http://[::1]:8000").authority == "[::1]:8000"


def under(answer: Answer, load: Load = LOAD) -> Round:
    """The load against a server that answers every POST so, and has no metrics."""
    found: list[Round] = []

    async def offered(url: str) -> None:
        found.append(await run(parse_target(url), "m", load, seed=1))

    asyncio.run(beside(answer, offered, []))
    return found[0]


async def beside(
    answer: Answer, offered: Callable[[str], Awaitable[None]], prompts: list[str]
) -> None:
    """`offered` with the URL of a server that answers every POST so; its prompts are added."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        else:
            length = int(head.lower().split(b"content-length:")[1].split()[0])
            prompts.append(str(json.loads(await reader.readexactly(length))["prompt"]))
            await answer(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        await offered(f"http://127.0.0.1:{port}")
