"""Shows the progress of long work: a bar with the time left, or a spinner for a phase of unknown length.
Without a terminal it prints plain lines.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvant.models import local

T = TypeVar("T")
OnProgress = Callable[[int, int], None]
"""Called with the amount of work done, and the total amount."""

SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def bars(console: Console) -> Iterator[local.Progress]:
    """Yields a progress callback for `locate` and `LLM`. It shows the phase of the start, or in its place a
    bar for the task that runs. Both are removed at the end.
    """
    if not console.is_terminal:
        yield _lines(console)
        return
    sized, counted = _bar(DownloadColumn()), _bar(MofNCompleteColumn())
    phase = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    current = phase.add_task("starting", total=None)
    tasks: dict[str, TaskID] = {}
    lock = threading.Lock()

    def show(task: str, done: int, total: int, unit: str = "bytes") -> None:
        several = sized if unit == "bytes" else counted
        with lock:  # any thread may report a task first
            if not total:
                phase.reset(current, description=task)
                return
            if task not in tasks:
                tasks[task] = several.add_task(task, total=total)
            is_running = done < total
            several.update(tasks[task], completed=done, total=total, visible=is_running)
            bars_shown = any(one.visible for one in (*sized.tasks, *counted.tasks))
            phase.update(current, visible=not bars_shown)

    with Live(Group(phase, sized, counted), console=console, transient=True):
        yield show


@contextmanager
def work(task: str, unit: str = "") -> Iterator[OnProgress]:
    """Yields a function to report progress, shown as a bar on stderr with the time left. It is removed at the
    end. Lines printed meanwhile appear above the bar. Without a terminal, there is a line every 30 seconds.

    unit: the unit of the work, such as "tokens". A new total begins a new stage.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield WorkLines(task, unit, console.file.write)
        return
    with _bar(MofNCompleteColumn(), TextColumn(unit), console=console) as shown:
        current = shown.add_task(task, total=None)

        def tell(done: int, total: int) -> None:
            if total != shown.tasks[0].total:
                shown.reset(current, total=total)
            shown.update(current, completed=done)

        yield tell


class WorkLines:
    """Writes a line of long work every `SECONDS_BETWEEN_LINES`: how much is done, and the time left.

    clock: seconds since any moment.
    """

    def __init__(
        self,
        task: str,
        unit: str,
        write: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._task, self._unit, self._write, self._clock = task, unit, write, clock
        self._total: int | None = None
        self._begin = self._said = clock()
        self._had = 0

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if total != self._total:  # a new stage
            self._total, self._begin, self._had = total, now, done
        if now < self._said + SECONDS_BETWEEN_LINES:
            return
        self._said = now
        speed = (done - self._had) / (now - self._begin) if now > self._begin else 0
        left = f", {(total - done) / speed:,.0f} s left" if speed else ""
        unit = f" {self._unit}" if self._unit else ""
        self._write(f"kvant: {self._task}: {done:,} of {total:,}{unit}{left}\n")


def tracked(items: Iterable[T], total: int, task: str, unit: str = "") -> Iterator[T]:
    """Yields each item, and counts it after the caller has handled it, with a bar of `work`.

    total: the most items there can be.
    """
    with work(task, unit) as on_progress:
        on_progress(0, total)
        for done, item in enumerate(items, start=1):
            yield item
            on_progress(done, total)


def _bar(*columns: ProgressColumn, console: Console | None = None) -> Progress:
    text, left = TextColumn("{task.description}"), TimeRemainingColumn()
    return Progress(text, BarColumn(), *columns, left, console=console, transient=True)


def _lines(console: Console) -> local.Progress:
    """Returns a callback that prints each task once. Phases go to stderr: a pipe gets only answers."""
    started: set[str] = set()

    def show(task: str, done: int, total: int, unit: str = "bytes") -> None:
        if task in started:
            return
        started.add(task)
        if total and unit == "bytes":
            console.print(f"{task} ({total / 2**20:.0f} MiB)", markup=False, highlight=False)
        else:
            sys.stderr.write(f"kvant: {task}\n")
            sys.stderr.flush()

    return show
