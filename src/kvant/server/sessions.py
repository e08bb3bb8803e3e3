"""Sessions over HTTP: conversations whose pages stay in files (`kvant.kv.offload.sessions`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.responses import Response

from kvant.kv.identity import PageIdentity
from kvant.server import wire
from kvant.server.answers import Call, as_json, unless_disconnected
from kvant.server.api_error import ApiError, bad_request
from kvant.server.requests import read_chat, read_completion

if TYPE_CHECKING:
    from kvant.kv.offload.sessions import Session, SessionFiles

_T = TypeVar("_T")
_ROOT = "/v1/kv/sessions/"
QUIET_SECONDS = 3.0
"""If no page reaches a file for this long, a session is saved with the pages written so far."""


async def save_session(call: Call) -> Response:
    """Runs a conversation's prompt, waits until its pages are in files, and saves the session."""
    store = _store(call)
    service, facts = call.service, call.service.require()
    limits = service.config.limits
    generation, messages = await call.read(
        lambda data: (read_chat(data, limits, facts), msgspec.json.decode(data)["messages"])
    )

    async def save() -> Session:
        ((tokens,), _) = await service.tokenise(generation, facts)
        asked: dict[str, object] = {"prompt": tokens, "max_tokens": 1, "temperature": 0}
        if generation.salt:
            asked["cache_salt"] = generation.salt
        only = read_completion(msgspec.json.encode(asked), limits, facts)
        running = await service.open(only, key=call.key, counted={})
        try:
            async for _ in service.events(running):
                pass
        finally:
            service.close(running)
        salt = service.salt_of(call.key, generation.salt)
        hashes = await asyncio.to_thread(store.hashes, tokens, salt)
        best, since = -1, time.monotonic()
        while best < len(hashes) and time.monotonic() - since < QUIET_SECONDS:
            count = await asyncio.to_thread(store.count_saved, hashes)
            if count > best:
                best, since = count, time.monotonic()
            elif best < len(hashes):
                await asyncio.sleep(0.05)
        return await _disk(lambda: store.save(_id(call), _owner(call), tokens, salt, messages))

    session = await unless_disconnected(call.receive, save())
    return as_json(_card(session))


async def restore_session(call: Call) -> Response:
    """Answers with a session's conversation. The next request that begins with it restores its pages."""
    store = _store(call)
    session = await _disk(lambda: store.read(_id(call), _owner(call)))
    card = msgspec.structs.asdict(_card(session))
    return as_json(wire.RestoredSession(**card, messages=session.messages))


async def list_sessions(call: Call) -> Response:
    store = _store(call)
    found = await _disk(lambda: store.list(_owner(call)))
    return as_json(wire.SessionList(data=[_card(session) for session in found]))


async def delete_session(call: Call) -> Response:
    store = _store(call)
    await _disk(lambda: store.delete(_id(call), _owner(call)))
    return as_json(wire.DeletedSession(_id(call)))


async def _disk(work: Callable[[], _T]) -> _T:
    from kvant.kv.offload.sessions import ForeignSession

    try:
        return await asyncio.to_thread(work)
    except FileNotFoundError:
        raise ApiError(404, "there is no such session", code="session_not_found") from None
    except ForeignSession as fault:
        raise ApiError(
            409, f"the session belongs to another engine: {fault}", code="session_foreign"
        ) from None
    except OSError as fault:
        raise ApiError(
            503, f"sessions cannot be kept: {fault.strerror}", type="server_error",
            code="sessions_unwritable", retry_after=30,
        ) from None  # fmt: skip


def _store(call: Call) -> SessionFiles:
    from kvant.kv.offload.page_files import PageFiles
    from kvant.kv.offload.sessions import ID, SessionFiles

    call.service.require()
    ready = call.service.supervisor.ready
    if ready is None or ready.page_store is None:
        raise ApiError(
            404,
            "this server keeps no sessions: start it with --kv-offload host:SIZE,disk:DIRECTORY:SIZE",
            code="sessions_off",
        )
    if call.scope["path"] != _ROOT.rstrip("/") and not ID.fullmatch(_id(call)):
        raise bad_request("an id has up to 64 letters, digits, dots, dashes, underscores", "id")
    held = ready.page_store
    files, *others = (
        PageFiles(Path(held.directory), PageIdentity(**identity), held.budget)
        for identity in (held.identity, *held.others)
    )
    return SessionFiles(files, held.windows, ready.page_size, others)


def _id(call: Call) -> str:
    path: str = call.scope["path"]
    return path.removeprefix(_ROOT)


def _owner(call: Call) -> str:
    return call.service.salt_of(call.key, "")


def _card(session: Session) -> wire.SessionCard:
    return wire.SessionCard(
        session.id, int(session.saved), len(session.token_ids), session.saved_tokens
    )
