"""The front over replicas that are functions: retries, cut streams, health, draining. Ray is not needed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvant.cluster import front as module
from kvant.cluster.asking import Asked, Head, Part, ReplicaLost, Taken
from kvant.cluster.front import Front
from kvant.server.api_error import ApiError, overloaded, unavailable
from kvant.server.config import ServerConfig

JSON = ((b"content-type", b"application/json"),)
STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"),)
Answer = Callable[[Asked], AsyncGenerator[Part, None]]


def whole(status: int = 200, body: object = None) -> Answer:
    async def answer(asked: Asked) -> AsyncGenerator[Part, None]:
        data = {"echo": asked.body.decode()} if body is None else body
        yield Head(status, JSON)
        yield json.dumps(data).encode()

    return answer


def failing(fault: ApiError) -> Answer:
    return whole(fault.status, fault.body)


async def lost(_asked: Asked) -> AsyncGenerator[Part, None]:
    raise ReplicaLost("killed")
    yield b""


def streaming(*events: bytes, cut: bool = False) -> Answer:
    async def answer(_asked: Asked) -> AsyncGenerator[Part, None]:
        yield Head(200, STREAM)
        for event in events:
            yield event
        if cut:
            raise ReplicaLost("killed")

    return answer


@dataclass
class Replicas:
    """answers: by name. asked: names in the order in which they were asked."""

    answers: dict[str, Answer]
    asked: list[str] = field(default_factory=list)
    closed: int = 0

    async def ask(self, asked: Asked) -> AsyncGenerator[Part, None]:
        rank = {name: (name != asked.prefer, name in asked.avoid, name) for name in self.answers}
        if not rank:
            await asyncio.Event().wait()  # as Ray does without a replica
        name = min(rank, key=lambda one: (rank[one][1], rank[one][0], rank[one][2]))
        yield Taken(name)
        if asked.path == "/health":
            yield Head(200, JSON)
            yield b'{"status":"ready"}'
            return
        self.asked.append(name)
        try:
            async for part in self.answers[name](asked):
                yield part
        finally:
            self.closed += 1


@dataclass
class Seen:
    status: int
    headers: dict[bytes, bytes]
    body: bytes
    is_whole: bool

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def send(
    front: Front,
    method: str,
    path: str,
    body: object = None,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    leave: asyncio.Event | None = None,
    on_body: Callable[[], Awaitable[None]] | None = None,
) -> Seen:
    sent: list[Any] = []
    data = b"" if body is None else json.dumps(body).encode()
    first = [{"type": "http.request", "body": data, "more_body": False}]
    left = leave or asyncio.Event()

    async def receive() -> Any:
        if first:
            return first.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def take(message: Any) -> None:
        sent.append(message)
        if on_body and message.get("body"):
            await on_body()

    scope = {
        "type": "http", "method": method, "path": path, "query_string": b"",
        "headers": [(b"host", b"localhost"), *JSON, *headers],
    }  # fmt: skip
    await front.app(scope, receive, take)
    if not sent:
        return Seen(0, {}, b"", False)
    rest = [m for m in sent[1:] if m["type"] == "http.response.body"]
    return Seen(
        sent[0]["status"],
        dict(sent[0]["headers"]),
        b"".join(m.get("body", b"") for m in rest),
        bool(rest) and not rest[-1].get("more_body", False),
    )


def make(replicas: Replicas, **config: Any) -> Front:
    return Front(ServerConfig(served_names=("m",), **config), replicas.ask, 2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.3)
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(module, "_STATE_SECONDS", 0.2)


def complete(front: Front, path: str = "/v1/completions", **more: Any) -> Seen:
    return asyncio.run(send(front, "POST", path, {"prompt": "p"}, **more))


def test_an_answer_passes_through_with_the_body_that_was_sent() -> None:
    replicas = Replicas({"a": whole()})
    seen = complete(make(replicas))
    assert (seen.status, seen.json) == (200, {"echo": '{"prompt": "p"}'})
    assert seen.is_whole


@pytest.mark.parametrize(
    "first",
    [lost, failing(unavailable("m", code="engine_restarting")),
     failing(unavailable("m", code="draining")), failing(overloaded("m", retry_after=2))],
)  # fmt: skip
def test_what_had_not_begun_is_asked_of_another_replica(first: Answer) -> None:
    replicas = Replicas({"a": first, "b": whole()})
    front = make(replicas)
    seen = complete(front)
    assert (seen.status, replicas.asked[-1]) == (200, "b")
    metrics = asyncio.run(send(front, "GET", "/metrics")).body.decode()
    assert "kvant:front_retries_total 1.0" in metrics.splitlines()


def test_an_answer_that_is_not_a_stream_is_retried_even_half_way() -> None:
    async def half(_asked: Asked) -> AsyncGenerator[Part, None]:
        yield Head(200, JSON)
        yield b'{"half":'
        raise ReplicaLost("killed")

    calls = iter((half, whole()))

    def answer(asked: Asked) -> AsyncGenerator[Part, None]:
        return next(calls)(asked)

    seen = complete(make(Replicas({"a": answer})))
    assert seen.json == {"echo": '{"prompt": "p"}'}


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/completions", b"data: [DONE]\n\n"),
        ("/v1/chat/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", None),
        ("/v1/responses", None),
    ],
)
def test_a_stream_that_began_ends_with_an_event_of_its_form(path: str, last: bytes | None) -> None:
    event = b'event: x\ndata: {"sequence_number":41}\n\n'
    replicas = Replicas({"a": streaming(event, cut=True), "b": whole()})
    seen = complete(make(replicas), path)
    assert replicas.asked == ["a"]  # a part was shown: no other replica may go on
    assert seen.status == 200
    assert seen.is_whole
    assert seen.body.startswith(event)
    told = seen.body.removeprefix(event)
    if last is not None:
        error, done = told.split(b"\n\n", 1)
        assert done == last
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "replica_lost"
        return
    name, data = told.strip().split(b"\n")
    assert name == b"event: error"
    found = json.loads(data.removeprefix(b"data: "))
    assert found["type"] == "error"
    if path == "/v1/responses":
        assert found["sequence_number"] == 42
    else:
        assert found["error"]["message"]


def test_a_full_server_is_said_after_every_replica_was_asked_once() -> None:
    full = failing(overloaded("m", retry_after=7))
    replicas = Replicas({"a": full, "b": full, "c": full})
    seen = complete(make(replicas))
    assert (seen.status, seen.json["error"]["code"]) == (429, "server_full")
    assert sorted({*replicas.asked}) == ["a", "b", "c"]
    assert len(replicas.asked) <= 4


def test_a_stored_response_is_found_where_it_lies() -> None:
    missing = failing(ApiError(404, "m", code="response_not_found"))
    replicas = Replicas({"a": missing, "b": whole(200, {"id": "r"})})
    front = make(replicas)
    assert asyncio.run(send(front, "GET", "/v1/responses/r")).json == {"id": "r"}
    replicas.answers["b"] = missing
    assert asyncio.run(send(front, "GET", "/v1/responses/r")).status == 404


def test_a_request_that_kills_its_replicas_is_not_asked_for_ever() -> None:
    replicas = Replicas({"a": lost})
    seen = complete(make(replicas))
    assert (seen.status, seen.json["error"]["code"]) == (503, "no_replica")
    assert replicas.asked == ["a"] * module.MOST_LOSSES
    died = Replicas({"a": failing(unavailable("m", code="engine_died"))})
    assert complete(make(died)).json["error"]["code"] == "engine_died"
    assert len(died.asked) == module.MOST_LOSSES


def test_an_engine_that_restarts_is_waited_for() -> None:
    answers = iter([*[failing(unavailable("m", code="engine_restarting"))] * 4, whole()])

    def answer(asked: Asked) -> AsyncGenerator[Part, None]:
        return next(answers)(asked)

    assert complete(make(Replicas({"a": answer}))).status == 200


def test_without_any_replica_the_answer_is_503_and_says_so() -> None:
    front = make(Replicas({}))
    seen = complete(front)
    assert (seen.status, seen.json["error"]["code"]) == (503, "no_replica")
    health = asyncio.run(send(front, "GET", "/health"))
    assert (health.status, health.json) == (
        503, {"status": "starting", "ready": 0, "expected": 2, "replicas": {}},
    )  # fmt: skip


def test_health_counts_replicas_and_ready_ends_with_a_drain() -> None:
    front = make(Replicas({"a": whole(), "b": whole()}))
    health = asyncio.run(send(front, "GET", "/health")).json
    assert (health["ready"], health["replicas"]) == (2, {"a": "ready", "b": "ready"})
    front.draining = True
    assert asyncio.run(send(front, "GET", "/health")).status == 200
    assert asyncio.run(send(front, "GET", "/ready")).status == 503
    assert complete(front).json["error"]["code"] == "draining"


def test_a_busy_replica_keeps_its_state_and_a_lost_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_FRESH_SECONDS", 0.0)
    busy: set[str] = set()

    async def ask(asked: Asked) -> AsyncGenerator[Part, None]:
        async for part in replicas.ask(asked):
            if isinstance(part, Taken) and part.replica in busy:
                await asyncio.sleep(5)
            yield part

    replicas = Replicas({"a": whole(), "b": whole()})
    front = Front(ServerConfig(served_names=("m",)), ask, 2)

    async def run() -> None:
        assert await front.states() == {"a": "ready", "b": "ready"}
        busy.add("b")
        assert await front.states() == {"a": "ready", "b": "ready"}
        monkeypatch.setattr(module, "_LATE_SECONDS", 0.0)
        assert await front.states() == {"a": "ready"}
        busy.clear()
        assert len(await front.states()) == 2
        monkeypatch.setattr(module, "_LATE_SECONDS", 10.0)
        del replicas.answers["b"]
        assert await front.states() == {"a": "ready"}  # all were heard: the other one is gone

    asyncio.run(run())


def test_a_replica_that_is_lost_while_states_are_asked_for_is_not_counted() -> None:
    async def ask(asked: Asked) -> AsyncGenerator[Part, None]:
        async for part in replicas.ask(asked):
            yield part
        if asked.path == "/health" and "a" in asked.avoid:
            front._forget("a")  # its answer came before

    replicas = Replicas({"a": whole(), "b": whole()})
    front = Front(ServerConfig(served_names=("m",)), ask, 2)
    assert asyncio.run(front.states()) == {"b": "ready"}


def test_a_client_that_leaves_ends_its_request() -> None:
    replicas = Replicas({"a": whole()})

    async def run() -> None:
        leave, began = asyncio.Event(), asyncio.Event()

        async def endless(_asked: Asked) -> AsyncGenerator[Part, None]:
            yield Head(200, STREAM)
            began.set()
            await asyncio.Event().wait()

        replicas.answers["a"] = endless
        work = asyncio.create_task(
            send(front, "POST", "/v1/completions", {"prompt": "p"}, leave=leave)
        )
        await began.wait()
        leave.set()
        await asyncio.wait_for(work, 2)

    front = make(replicas)
    asyncio.run(run())
    assert (replicas.closed, front.num_open) == (1, 0)


def test_the_end_tells_streams_and_requests_that_wait() -> None:
    async def run() -> tuple[Seen, Seen]:
        front = make(replicas)
        began = asyncio.Event()

        async def stream(_asked: Asked) -> AsyncGenerator[Part, None]:
            yield Head(200, STREAM)
            yield b"data: {}\n\n"
            began.set()
            await asyncio.Event().wait()

        async def silent(_asked: Asked) -> AsyncGenerator[Part, None]:
            await asyncio.Event().wait()
            yield b""

        replicas.answers["a"] = stream
        one = asyncio.create_task(send(front, "POST", "/v1/completions", {"prompt": "p"}))
        await began.wait()
        replicas.answers["a"] = silent
        two = asyncio.create_task(send(front, "POST", "/v1/completions", {"prompt": "p"}))
        await asyncio.sleep(0.02)
        front.end()
        return await asyncio.wait_for(one, 2), await asyncio.wait_for(two, 2)

    replicas = Replicas({"a": whole()})
    one, two = asyncio.run(run())
    assert b'"shutting_down"' in one.body
    assert one.body.endswith(b"data: [DONE]\n\n")
    assert one.is_whole
    assert (two.status, two.json["error"]["code"]) == (503, "shutting_down")


def test_keys_and_foreign_pages_are_checked_in_front_of_replicas() -> None:
    replicas = Replicas({"a": whole()})
    assert complete(make(replicas, api_keys=("k",))).status == 401
    assert complete(make(replicas), headers=((b"origin", b"https://evil.example"),)).status == 403
    assert replicas.asked == []
    key = ((b"authorization", b"Bearer k"),)
    assert complete(make(replicas, api_keys=("k",)), headers=key).status == 200


def test_later_turns_go_to_the_replica_of_the_first() -> None:
    async def chosen(asked: Asked) -> AsyncGenerator[Part, None]:
        yield Head(200, JSON)
        yield json.dumps({"prefer": asked.prefer}).encode()

    front = make(Replicas({"a": chosen, "b": chosen}))
    talk = [{"role": "user", "content": "x" * 600}]
    first = asyncio.run(send(front, "POST", "/v1/chat/completions", {"messages": talk}))
    more = [*talk, {"role": "user", "content": "more"}]
    second = asyncio.run(send(front, "POST", "/v1/chat/completions", {"messages": more}))
    assert (first.json["prefer"], second.json["prefer"]) == (None, "a")
