"""The engine's process: `python -P -m kvant.server.engine_process ipc://SOCKET`, started by the supervisor.

Standard input brings the arguments, one line of JSON, and then stays open: its end means that the API
process is gone, and this process ends too. Everything else travels over the socket.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from kvant.engine.build import BuiltEngine, build_engine
from kvant.engine.garbage import search_rarely
from kvant.errors import KvantError
from kvant.plan.config import engine_config
from kvant.plan.plan_json import plan_json
from kvant.plan.settings import Settings
from kvant.server.messages import Fault, FromEngine, Loading, Ready, encode, read_to_engine

if TYPE_CHECKING:
    from kvant.server.engine_loop import EngineLoop

HEARTBEAT_SECONDS = 0.2
_log = logging.getLogger(__name__)


def main(address: str) -> int:
    """Start, report, serve until told to stop; the exit code."""
    logging.basicConfig(stream=sys.stderr, format="kvant engine: %(message)s")
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)

    def send(message: FromEngine) -> None:
        socket.send(encode(message))

    try:
        config = engine_config(settings)
        built = build_engine(
            config, progress=lambda task, done, total: send(Loading(task, done, total))
        )
        built.engine.prepare_structured()
        ready = _ready(built)
    except KvantError as fault:
        return _refuse(socket, Fault(str(fault), fault.exit_code))
    except Exception as fault:
        _log.exception("the engine could not start")  # our own bug, whose place must be known
        return _refuse(socket, Fault(f"the engine could not start: {fault!r}", 1))
    send(ready)
    from kvant.server.engine_loop import EngineLoop  # with torch, which refusals do without

    search_rarely()
    _serve(EngineLoop(built.engine), socket)
    return 0


def _serve(loop: EngineLoop, socket: zmq.Socket[bytes]) -> None:
    """Messages, a step, a report; for ever. Faults that are no single request's end it."""
    pause = int(HEARTBEAT_SECONDS * 1000)
    last_report = 0.0
    while True:
        wait = 0 if loop.engine.has_work or loop.has_news else pause
        took = False
        while socket.poll(wait):
            wait, took = 0, True
            try:
                message = read_to_engine(socket.recv())
            except msgspec.MsgspecError:
                _log.exception("a message that is none was dropped")
                continue
            loop.take(message)
        worked = loop.engine.has_work
        report = loop.step()
        now = time.monotonic()
        if took or worked or report.failures or now - last_report > HEARTBEAT_SECONDS / 2:
            last_report = now
            socket.send(encode(report))


def _ready(built: BuiltEngine) -> Ready:
    target = built.planned.target
    return Ready(
        model=target.local.name,
        path=str(target.local.path),
        revision=target.local.revision,
        plan=json.dumps(plan_json(built.planned)).encode(),
        stored_as=", ".join(f"{name} ({count} layers)" for name, count in built.kv.formats.items()),
        bytes_per_token=built.kv.bytes_per_token,
        capacity_tokens=built.planned.memory.capacity_tokens or 0,
        max_model_len=built.engine.limits.max_model_len,
        max_num_seqs=built.engine.limits.max_num_seqs,
        vocab_size=built.engine.vocab_size,
        page_size=built.kv.page_size,
        notes=(*built.notes, *(f"warning: {line}" for line in built.warnings)),
    )


def _refuse(socket: zmq.Socket[bytes], fault: Fault) -> int:
    socket.send(encode(fault))
    socket.close(linger=5000)
    socket.context.term()
    return fault.exit_code


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
