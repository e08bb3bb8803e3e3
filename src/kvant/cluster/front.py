"""HTTP in front of replicas: chooses a replica, retries on others, and informs clients whose replica ended.

The front sends a stream's head to the client at once, and any other answer when it is complete. Until then
another replica may answer the request.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.responses import Response

from kvant.cluster.asking import (
    Affinity,
    Ask,
    Asked,
    Head,
    Part,
    ReplicaLost,
    Taken,
    Verdict,
    prefix_keys,
    verdict,
)
from kvant.cluster.merged import merged
from kvant.server.answers import as_json, unless_disconnected
from kvant.server.api_error import ApiError, Disconnected, internal, unavailable
from kvant.server.app import dialect, is_open
from kvant.server.config import ServerConfig
from kvant.server.guard import App, Guard, Receive, Scope, Send, read_body, with_cors

RETRY_SECONDS = 30.0
"""Seconds after which a request that no replica can take is refused."""
MOST_LOSSES = 3
"""A request during which this many replicas or engines died is not retried."""
_PAUSE_SECONDS = 0.25
_STATE_SECONDS = 2.0
_FRESH_SECONDS = 1.0
_LATE_SECONDS = 10.0
"""Seconds for which a replica that does not answer keeps its last state, unless its process has ended."""
_NOT_PASSED_ON = frozenset({b"origin", b"connection", b"keep-alive", b"transfer-encoding"})
_DROPPED = frozenset({b"connection", b"transfer-encoding", b"date", b"server"})
_SEQUENCE = re.compile(rb'"sequence_number":(\d+)')
_LOST = unavailable("the replica that answered has ended; ask again", code="replica_lost")
_ENDED = unavailable(
    "this server was shut down before the answer was complete", code="shutting_down"
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Whole:
    """A complete answer of one replica."""

    replica: str
    head: Head
    body: bytes

    @property
    def ended_engine(self) -> bool:
        """True if the engine died during this request."""
        return b'"engine_died"' in self.body


@dataclass(slots=True)
class _Counts:
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    retried: Counter = field(init=False)
    cut: Counter = field(init=False)
    ready: Gauge = field(init=False)

    def __post_init__(self) -> None:
        self.retried = Counter(
            "kvant:front_retries", "Requests asked of another replica.", registry=self.registry
        )
        self.cut = Counter(
            "kvant:front_streams_lost", "Streams whose replica ended.", registry=self.registry
        )
        self.ready = Gauge("kvant:replicas_ready", "Replicas that answer.", registry=self.registry)


class Front:
    """The front as an ASGI application. expected: the number of replicas that /health expects."""

    def __init__(self, config: ServerConfig, ask: Ask, expected: int) -> None:
        self.draining = False
        self.num_open = 0
        self._ask, self._expected = ask, expected
        self._guard, self._limits = Guard(config), config.limits
        self._affinity = Affinity()
        self._counts = _Counts()
        self._heard: dict[str, tuple[str, float]] = {}
        self._lost_at: dict[str, float] = {}
        self._states_at = 0.0
        self._asking_states = asyncio.Lock()
        self._forwarding: set[asyncio.Task[Any]] = set()
        self._is_ending = False
        self.app: App = with_cors(self, config.allowed_origins)

    def end(self) -> None:
        """Ends open requests with an error to each client."""
        self.draining = self._is_ending = True
        for task in self._forwarding:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        begun = False

        async def watched(message: object) -> None:
            nonlocal begun
            begun = True
            await send(message)  # type: ignore[arg-type]

        self.num_open += 1
        try:
            await self._answer(scope, receive, watched)
        except Disconnected:
            pass
        except ApiError as fault:
            await _error(path, fault)(scope, receive, send)
        except Exception:
            _log.exception("a request failed")
            if not begun:
                await _error(path, internal())(scope, receive, send)
        finally:
            self.num_open -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], scope["headers"]
        key = self._guard.check(scope, is_open=is_open(path))
        own = {
            "/health": self._health, "/ping": self._health, "/ready": self._ready,
            "/load": self._load, "/metrics": self._metrics,
        }  # fmt: skip
        if path in own:
            await (await own[path]())(scope, receive, send)
            return
        if self.draining:
            raise unavailable("this server is shutting down", code="draining")
        # GET and DELETE have no body, so `read_body`, which requires a content type, is skipped.
        has_body = scope["method"] in ("POST", "PUT", "PATCH")
        body = await read_body(headers, receive, self._limits) if has_body else b""
        asked = Asked(
            scope["method"],
            path,
            scope["query_string"],
            tuple((n, v) for n, v in headers if n not in _NOT_PASSED_ON),
            body,
        )
        keys = prefix_keys(body, key) if body else ()
        await unless_disconnected(receive, self._forward(asked, keys, send))

    async def _forward(self, asked: Asked, keys: tuple[int, ...], send: Send) -> None:
        """Runs `_choose` as a task that `end` can cancel."""
        task = asyncio.current_task()
        assert task is not None
        self._forwarding.add(task)
        try:
            await self._choose(asked, keys, send)
        except asyncio.CancelledError:
            if not self._is_ending:
                raise
            raise _ENDED from None
        finally:
            self._forwarding.discard(task)

    async def _choose(self, asked: Asked, keys: tuple[int, ...], send: Send) -> None:
        """Asks replicas until one has answered. Raises ApiError 503 if none can."""
        ended = time.monotonic() + RETRY_SECONDS
        avoid: tuple[str, ...] = ()
        last: _Whole | None = None
        losses = 0
        while True:
            asked = replace(
                asked, prefer=None if avoid else self._affinity.prefer(keys), avoid=avoid
            )
            try:
                whole = await self._try(asked, keys, send, ended)
            except ReplicaLost as fault:
                _log.info("a request has no answer: %s", fault)
                if fault.replica is None:
                    await asyncio.sleep(_PAUSE_SECONDS)
                else:
                    losses += 1
                    avoid = (*avoid, fault.replica)
            else:
                if whole is None:
                    return
                judged = verdict(whole.head, whole.body)
                asked_all = whole.replica in avoid
                last = whole
                if judged is Verdict.PASS or (judged is Verdict.NEXT and asked_all):
                    break
                if asked_all:
                    avoid = ()
                    await asyncio.sleep(_PAUSE_SECONDS)
                avoid = (*avoid, whole.replica)
                losses += judged is Verdict.RETRY and whole.ended_engine
            if losses == MOST_LOSSES or time.monotonic() >= ended:
                break
            self._counts.retried.inc()
        if last is None:
            raise unavailable("no replica can answer now", code="no_replica")
        await _send_head(last.head, send)
        await send({"type": "http.response.body", "body": last.body})

    async def _try(
        self, asked: Asked, keys: tuple[int, ...], send: Send, ended: float
    ) -> _Whole | None:
        """Asks one replica. Returns its complete answer, or None after passing a stream on to the client.

        Raises ReplicaLost if the replica was lost before anything was passed on.
        """
        async with aclosing(self._ask(asked)) as parts:
            replica = await _taken(parts, max(0.1, ended - time.monotonic()))
            self._affinity.begin(replica, keys)
            try:
                head = await anext(parts)
                assert isinstance(head, Head)
                if not head.is_stream:
                    return _Whole(replica, head, await _rest(parts))
                await self._pass_on(asked.path, replica, head, parts, send)
                return None
            except StopAsyncIteration:
                raise ReplicaLost("the replica did not answer", replica) from None
            except ReplicaLost as fault:
                self._forget(replica)
                raise ReplicaLost(str(fault), replica) from None
            finally:
                self._affinity.end(replica)

    async def _pass_on(
        self,
        path: str,
        replica: str,
        head: Head,
        parts: AsyncGenerator[Part, None],
        send: Send,
    ) -> None:
        """Passes a stream on to the client. If the replica is lost, ends it with an error event."""
        await _send_head(head, send)
        number = 0
        try:
            async for data in parts:
                assert isinstance(data, bytes)
                if found := _SEQUENCE.findall(data):
                    number = int(found[-1])
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except (ReplicaLost, asyncio.CancelledError) as fault:
            if isinstance(fault, ReplicaLost):
                _log.warning("a replica was lost while it answered: %s", fault)
                self._counts.cut.inc()
                self._forget(replica)
            elif not self._is_ending:
                raise
            told = _LOST if isinstance(fault, ReplicaLost) else _ENDED
            last = last_events(path, told, number + 1)
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    # -- what the front says itself --------------------------------------------------------------

    async def states(self) -> dict[str, str]:
        """Returns the state of each replica that can be reached, at most a second old.

        A replica that is too busy to answer keeps its last state for a while.
        """
        async with self._asking_states:
            if time.monotonic() - self._states_at > _FRESH_SECONDS:
                began = time.monotonic()
                found, are_all = await self._everyone(Asked("GET", "/health"))
                now = time.monotonic()
                heard = {
                    whole.replica: (_state_of(whole), now)
                    for whole in found
                    if self._lost_at.get(whole.replica, 0.0) < began
                }
                if not are_all:
                    late = {r: s for r, s in self._heard.items() if now - s[1] < _LATE_SECONDS}
                    heard = late | heard
                self._heard = heard
                # Asked again at once if a replica was lost meanwhile.
                self._states_at = 0.0 if max(self._lost_at.values(), default=0) > began else now
                self._affinity.keep(heard)
                self._counts.ready.set(self._num_ready)
            return {replica: state for replica, (state, _) in self._heard.items()}

    @property
    def _num_ready(self) -> int:
        return sum(state == "ready" for state, _ in self._heard.values())

    def _forget(self, replica: str) -> None:
        """Forgets a lost replica, and makes the next call of `states` ask all replicas again."""
        self._affinity.forget(replica)
        self._heard.pop(replica, None)
        self._lost_at[replica] = time.monotonic()
        self._states_at = 0.0

    async def _everyone(self, asked: Asked) -> tuple[list[_Whole], bool]:
        """Asks every replica. Returns their answers, and whether all answered within _STATE_SECONDS."""
        found: dict[str, _Whole] = {}
        end = time.monotonic() + _STATE_SECONDS
        while (left := end - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    whole = await self._one(replace(asked, avoid=tuple(found)))
            except TimeoutError:
                return list(found.values()), False
            except ReplicaLost as fault:
                if fault.replica is not None:
                    self._forget(fault.replica)
                continue
            if whole.replica in found:
                return list(found.values()), True
            found[whole.replica] = whole
        return list(found.values()), False

    async def _one(self, asked: Asked) -> _Whole:
        async with aclosing(self._ask(asked)) as parts:
            replica = await _taken(parts, _STATE_SECONDS)
            try:
                head = await anext(parts)
                assert isinstance(head, Head)
                return _Whole(replica, head, await _rest(parts))
            except StopAsyncIteration:
                raise ReplicaLost("the replica did not answer", replica) from None
            except ReplicaLost as fault:
                raise ReplicaLost(str(fault), replica) from None

    async def _health(self) -> Response:
        return await self._state(counts_draining=False)

    async def _ready(self) -> Response:
        return await self._state(counts_draining=True)

    async def _state(self, *, counts_draining: bool) -> Response:
        states = await self.states()
        ready = self._num_ready
        good = ready > 0 and not (counts_draining and self.draining)
        status = "draining" if self.draining else "ready" if ready else _worst(states)
        answer = {"status": status, "ready": ready, "expected": self._expected, "replicas": states}
        return as_json(answer, 200 if good else 503, None if good else {"retry-after": "2"})

    async def _load(self) -> Response:
        return as_json({"server_load": self.num_open - 1})

    async def _metrics(self) -> Response:
        await self.states()
        answers, _ = await self._everyone(Asked("GET", "/metrics", headers=self._own_key()))
        texts = {one.replica: one.body.decode() for one in answers if one.head.status == 200}
        text = generate_latest(self._counts.registry).decode() + merged(texts)
        return Response(text, media_type="text/plain; version=0.0.4")

    def _own_key(self) -> tuple[tuple[bytes, bytes], ...]:
        key = self._guard.any_key
        return () if key is None else ((b"x-api-key", key),)


async def _taken(parts: AsyncGenerator[Part, None], seconds: float) -> str:
    """Returns the replica that took the request. Raises ReplicaLost if none takes it within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            taken = await anext(parts)
    except TimeoutError:
        raise ReplicaLost(f"no replica took the request within {seconds:.0f} s") from None
    except StopAsyncIteration:
        raise ReplicaLost("the replica did not answer") from None
    assert isinstance(taken, Taken)
    return taken.replica


async def _rest(parts: AsyncGenerator[Part, None]) -> bytes:
    return b"".join([data async for data in parts if isinstance(data, bytes)])


async def _send_head(head: Head, send: Send) -> None:
    headers = [(name, value) for name, value in head.headers if name not in _DROPPED]
    await send({"type": "http.response.start", "status": head.status, "headers": headers})


def _state_of(whole: _Whole) -> str:
    try:
        return str(msgspec.json.decode(whole.body)["status"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "stopped"


def _worst(states: dict[str, str]) -> str:
    return next((state for state in states.values() if state != "ready"), "starting")


def _error(path: str, fault: ApiError) -> Response:
    return as_json(dialect(path)(fault), fault.status, fault.headers)


def last_events(path: str, fault: ApiError, number: int) -> bytes:
    """Returns the events that end an interrupted stream. number: the event's place in a Responses stream."""
    body = msgspec.json.encode(dialect(path)(fault))
    if path == "/v1/messages":
        return b"event: error\ndata: " + body + b"\n\n"
    if path == "/v1/responses":
        event = {
            "type": "error", "code": "server_error", "message": fault.message, "param": None,
            "sequence_number": number,
        }  # fmt: skip
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    return b"data: " + body + b"\n\ndata: [DONE]\n\n"
