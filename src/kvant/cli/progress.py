"""Progress of long work: a bar with the time left, or a spinner for a phase; plain lines or nothing if there
is no terminal.
"""

from __future__ import annotations

import sys
import threading
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
Told = Callable[[int, int], None]
"""Called with what is done, and with all there is to do."""


@contextmanager
def bars(console: Console) -> Iterator[local.Progress]:
    """Yield a progress callback for `locate` and `LLM`: one bar for each task and one line for the phase
    of the start, removed at the end.
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
        several.update(tasks[task], completed=done, total=total)

    with Live(Group(phase, sized, counted), console=console, transient=True):
        yield show


@contextmanager
def work(task: str, unit: str = "") -> Iterator[Told]:
    """Yield what is told of work in steps: one bar on stderr, removed at the end, with the time left. Nothing
    is shown without a terminal. Lines that are printed meanwhile stand above the bar.

    unit: of what is counted, such as "tokens". A new total begins a new stage.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    with _bar(MofNCompleteColumn(), TextColumn(unit), console=console) as shown:
        current = shown.add_task(task, total=None)

        def tell(done: int, total: int) -> None:
            if total != shown.tasks[0].total:
                shown.reset(current, total=total)
            shown.update(current, completed=done)

        yield tell


def tracked(items: Iterable[T], total: int, task: str, unit: str = "") -> Iterator[T]:
    """Yield each item, and count it once the caller is done with it, with a bar as of `work`.

    total: the most items there can be.
    """
    with work(task, unit) as told:
        told(0, total)
        for done, item in enumerate(items, start=1):
            yield item
            told(done, total)


def _bar(*columns: ProgressColumn, console: Console | None = None) -> Progress:
    text, left = TextColumn("{task.description}"), TimeRemainingColumn()
    return Progress(text, BarColumn(), *columns, left, console=console, transient=True)


def _lines(console: Console) -> local.Progress:
    """Phases go to stderr, so that the output of a command in a pipe has answers only."""
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
