"""The engine process: `python -P -m kvant.server.engine_process ipc://SOCKET`, started by the
supervisor.

Standard input brings the settings as one line of JSON, and then stays open. When it closes, the API process
is gone, and this process ends too. All other messages are sent over the socket.
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
from kvant.engine.driver import Driver, Event, Job
from kvant.engine.process import search_rarely
from kvant.engine.result import Progress
from kvant.errors import KvantError, RankLost, RequestError
from kvant.kv.events import PageLog
from kvant.plan.config import engine_config
from kvant.plan.plan_json import plan_json
from kvant.plan.settings import Settings
from kvant.scheduling.request import FinishReason
from kvant.server.config import EventOptions
from kvant.server.kv_events import EventPublisher
from kvant.server.messages import (
    Cancel,
    Failure,
    Fault,
    FromEngine,
    Loading,
    PageStore,
    Piece,
    Ready,
    Report,
    Stats,
    Submit,
    Times,
    ToEngine,
    encode,
    read_to_engine,
)

if TYPE_CHECKING:
    from kvant.execution.runner import Runner

HEARTBEAT_SECONDS = 0.2
LOST_SECONDS = 2.0
"""Seconds within which an engine that lost a rank normally ends by itself."""

_log = logging.getLogger(__name__)


def main(address: str) -> int:
    """Builds the engine, reports that it is ready, and serves. Returns the exit code.

    address: the API process's ZeroMQ socket.
    """
    logging.basicConfig(stream=sys.stderr, format="kvant engine: %(message)s")
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)

    def send(message: FromEngine) -> None:
        socket.send(encode(message))

    def progress(task: str, done: int, total: int, unit: str = "bytes") -> None:
        send(Loading(task, done, total, unit))

    try:
        config = engine_config(settings)
        built = build_engine(config, progress=progress, owns_process=True)
        built.engine.prepare_structured()
        publisher = _publisher(settings, built)
        ready = _ready(built)
    except KvantError as fault:
        return _refuse(socket, Fault(str(fault), fault.exit_code))
    except Exception as fault:
        _log.exception(
            "the engine could not start"
        )  # a bug in Kvant, so the log needs the traceback
        return _refuse(socket, Fault(f"the engine could not start: {fault!r}", 1))
    send(ready)
    search_rarely()
    if built.planned.num_ranks > 1:
        threading.Thread(target=_end_with_ranks, args=(built.engine.runner,), daemon=True).start()
    _serve(Driver(built.engine), socket, publisher)
    return 0


def _publisher(settings: Settings, built: BuiltEngine) -> EventPublisher | None:
    """Returns a publisher of the prefix cache's events, or None without --kv-events."""
    config = settings.build(EventOptions).parsed
    if config is None:
        return None
    log = PageLog()
    built.engine.tell(log)
    return EventPublisher(config, log, built.kv.page_size)


def _serve(
    driver: Driver[int], socket: zmq.Socket[bytes], publisher: EventPublisher | None
) -> None:
    """Handles messages, steps the engine and sends reports, without end. A fatal error is raised.

    The first report, with the number of pages, is sent at once.
    """
    pause = int(HEARTBEAT_SECONDS * 1000)
    last_report = 0.0
    while True:
        wait = 0 if driver.has_work or not last_report else pause
        took = False
        while socket.poll(wait):
            wait, took = 0, True
            try:
                message = read_to_engine(socket.recv())
            except (msgspec.MsgspecError, RequestError):
                _log.exception("an invalid message was dropped")
                continue
            take(driver, message)
        worked = driver.has_work
        report = report_of(driver, driver.step())
        if publisher is not None:
            publisher.publish()
        now = time.monotonic()
        if took or worked or now - last_report > HEARTBEAT_SECONDS / 2:
            last_report = now
            socket.send(encode(report))


def take(driver: Driver[int], message: ToEngine) -> None:
    """Carries out a message: submits or cancels sequences."""
    match message:
        case Cancel():
            for id in message.ids:
                driver.cancel(id)
        case Submit():
            driver.submit(message.id, message.prompt_token_ids, message.sampling, message.salt)


def report_of(driver: Driver[int], events: list[Event[int]]) -> Report:
    """Returns a report of a step's events and the engine's counters."""
    pieces: list[Piece] = []
    failures: list[Failure] = []
    for job, news in events:
        if isinstance(news, RequestError):
            failures.append(Failure(job.key, "refused", str(news), news.param))
        elif not isinstance(news, Progress):
            failures.append(Failure(job.key, "engine_fault", _OURS))
        elif news.result is None and not news.logprobs and news.prompt_logprobs is None:
            pieces.append(Piece(job.key, news.text, news.token_ids))  # nearly all pieces are such
        elif news.result is None or news.result.finish_reason is not FinishReason.NUMERICAL_ERROR:
            pieces.append(_piece(job, news))
        else:
            failures.append(Failure(job.key, "numerical_error", _NUMERICAL))
    stats = driver.engine.stats
    return Report(
        Stats(
            stats.num_running,
            stats.num_waiting,
            stats.num_held_pages,
            stats.num_idle_pages,
            stats.num_usable_pages,
            stats.num_steps,
            stats.num_computed_tokens,
            stats.num_preemptions,
            stats.speculation,
            tuple((one.layer, one.k, one.v) for one in stats.saturated),
            stats.num_compiling,
            stats.offload,
            stats.groups,
        ),
        tuple(pieces),
        tuple(failures),
        driver.prompt_tokens_per_second,
        driver.num_tokens,
        driver.num_audits,
        driver.num_audit_faults,
        driver.num_scale_audits,
        driver.num_scale_faults,
    )


def _piece(job: Job[int], news: Progress) -> Piece:
    of_prompt = news.prompt_logprobs
    result = news.result
    return Piece(
        job.key,
        news.text,
        news.token_ids,
        news.logprobs,
        None if of_prompt is None else tuple(one for one in of_prompt if one is not None),
        None if result is None else result.finish_reason,
        None if result is None else result.stop_reason,
        0 if result is None else result.num_cached_tokens,
        None if result is None else _times(job),
        None if result is None else result.hidden,
    )


def _times(job: Job[int]) -> Times:
    """Returns the times of a job that ends now."""
    first = job.first
    return Times(job.started - job.submitted, first - job.started, time.monotonic() - first)


_OURS = "the engine failed on this request; the server's log has details"
_NUMERICAL = "the model computed NaN or Inf for this request"


def _ready(built: BuiltEngine) -> Ready:
    target, plan = built.planned.target, plan_json(built.planned)
    memory = built.planned.memory
    return Ready(
        model=target.local.name,
        path=str(target.local.path),
        revision=target.local.revision,
        plan=json.dumps(plan).encode(),
        stored_as=", ".join(
            f"{name} ({count} layer{'s' if count > 1 else ''})"
            for name, count in built.kv.formats.items()
        ),
        bytes_per_token=built.kv.bytes_per_token,
        capacity_tokens=memory.capacity_tokens or 0,
        pool_bytes=(memory.kv_bytes or 0) * built.planned.num_ranks,
        max_model_len=built.engine.limits.max_model_len,
        max_num_seqs=built.engine.limits.max_num_seqs,
        vocab_size=built.engine.vocab_size,
        page_size=built.kv.page_size,
        fingerprint=plan["fingerprint"],
        notes=(*built.notes, *(f"warning: {line}" for line in built.warnings)),
        page_store=_page_store(built),
        pooling=built.pooling,
    )


def _page_store(built: BuiltEngine) -> PageStore | None:
    """Returns what the API process needs to find page files of sessions; None without files."""
    tiers = built.engine.tiers
    if tiers is None or tiers.files is None:
        return None
    store = tiers.files.store
    windows = built.engine.scheduler.allocator.every_window
    others = tuple(files.identity.fields for files in tiers.files.others)
    return PageStore(str(store.directory), store.identity.fields, windows, store.budget, others)


def _refuse(socket: zmq.Socket[bytes], fault: Fault) -> int:
    socket.send(encode(fault))
    socket.close(linger=5000)
    socket.context.term()
    return fault.exit_code


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def _end_with_ranks(runner: Runner) -> None:
    """Ends this process soon after a rank was lost, even if a kernel waits for that rank for ever."""
    try:
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            runner.check()
    except RankLost:
        time.sleep(LOST_SECONDS)
        _log.exception("the engine waits for a lost rank and is ended")
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
