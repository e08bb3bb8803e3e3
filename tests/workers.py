"""pytest plugin: `--workers N` collects tests once, forks N processes and shares the tests among them.

Importing and collecting all tests takes 11 CPU seconds, and 40 in a new clone, where nothing is compiled.
The workers of pytest-xdist are new interpreters, and each pays it again.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

_CONTEXT = multiprocessing.get_context("fork")
Location = tuple[str, int | None, str]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", type=int, default=0, help="number of processes to fork for the tests"
    )
    parser.addoption(
        "--spread",
        choices=("file", "test"),
        default="file",
        help="what a worker takes at a time, in the order of collection (default: a file)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    if not option.workers or option.collectonly or session.testsfailed:
        return None  # as pytest does it
    _Parent(session, option.workers, option.spread).run()
    return True


class _Parent:
    """Hands out tests and reports what workers say of them."""

    def __init__(self, session: pytest.Session, count: int, spread: str) -> None:
        self._session, self._hook = session, session.config.hook
        self._queue = deque(_groups(session.items, spread))
        self._workers: dict[Connection, Any] = {}
        self._running: dict[Connection, tuple[str, Location]] = {}
        self._taken: dict[Connection, list[int]] = {}
        self._count = min(count, len(self._queue))

    def run(self) -> None:
        if (forked := sys.modules.get("tests.forked")) is not None:
            forked.share_server()
        # Made before the fork: workers then share one directory, which pytest removes at the end.
        self._session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        try:
            for _ in range(self._count):
                self._start()
            while self._workers:
                for connection in wait(self._workers):
                    assert isinstance(connection, Connection)
                    self._receive(connection)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        finally:
            for process in self._workers.values():
                process.terminate()

    def _start(self) -> None:
        own, its = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_work, args=(self._session, its, [own, *self._workers]))
        process.start()
        its.close()
        self._workers[own] = process

    def _receive(self, connection: Connection) -> None:
        try:
            kind, *said = connection.recv()
        except (EOFError, ConnectionResetError):
            self._lose(connection, "")
            return
        if kind == "next":
            self._taken[connection] = self._queue.popleft() if self._queue else []
            connection.send(self._taken[connection])
        elif kind == "start":
            self._running[connection] = said[0], said[1]
        elif kind == "report":
            report = self._hook.pytest_report_from_serializable(
                config=self._session.config, data=said[0]
            )
            self._hook.pytest_runtest_logreport(report=report)
        elif kind == "finish":
            del self._running[connection]
            self._hook.pytest_runtest_logfinish(nodeid=said[0], location=said[1])
        else:
            self._lose(connection, said[0])

    def _lose(self, connection: Connection, why: str) -> None:
        """A worker ended: the test that it ran, if any, has failed, and another takes the rest."""
        process = self._workers.pop(connection)
        process.join()
        connection.close()
        running = self._running.pop(connection, None)
        if running is None and process.exitcode == 0:
            return
        nodeid, location = running or ("a worker between tests", ("", None, "a worker"))
        text = why or f"the process ended with exit code {process.exitcode}"
        lost = pytest.TestReport(nodeid, location, {}, "failed", text, "call")
        self._hook.pytest_runtest_logreport(report=lost)
        taken = self._taken.pop(connection, [])
        ids = [self._session.items[index].nodeid for index in taken]
        if rest := taken[ids.index(nodeid) + 1 :] if nodeid in ids else taken:
            self._queue.appendleft(rest)
        self._start()


def _groups(items: list[pytest.Item], spread: str) -> Iterator[list[int]]:
    """Positions of the tests of each file, or of each test."""
    numbers = range(len(items))
    if spread == "test":
        return ([number] for number in numbers)
    files = itertools.groupby(numbers, lambda number: items[number].nodeid.partition("::")[0])
    return (list(group) for _, group in files)


# -- in a worker -------------------------------------------------------------------------------


class _Child:
    """Sends the parent what pytest would print."""

    def __init__(self, session: pytest.Session, connection: Connection) -> None:
        self._session, self._connection = session, connection

    def pytest_runtest_logstart(self, nodeid: str, location: Location) -> None:
        self._connection.send(("start", nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._connection.send(("report", data))

    def pytest_runtest_logfinish(self, nodeid: str, location: Location) -> None:
        self._connection.send(("finish", nodeid, location))

    def next_group(self) -> list[pytest.Item]:
        self._connection.send(("next",))
        return [self._session.items[index] for index in self._connection.recv()]

    def run(self) -> None:
        group = self.next_group()
        while group:
            for item, after in itertools.pairwise(group):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            last, group = group[-1], self.next_group()
            after = group[0] if group else None  # whose fixtures stay
            last.config.hook.pytest_runtest_protocol(item=last, nextitem=after)


def _work(session: pytest.Session, connection: Connection, others: list[Connection]) -> None:
    """Be a worker. Its output goes to files of its own, or is captured by them."""
    for other in others:
        other.close()
    plugins = session.config.pluginmanager
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    plugins.unregister(name="terminalreporter")
    child = _Child(session, connection)
    plugins.register(child)
    try:
        child.run()
    except BaseException:
        connection.send(("lost", traceback.format_exc()))
        sys.exit(1)
