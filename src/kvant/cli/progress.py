"""Progress of a start: a bar for bytes, a spinner for a phase; plain lines if there is no terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvant.models import local


@contextmanager
def bars(console: Console) -> Iterator[local.Progress]:
    """Yield a progress callback for `locate` and `LLM`: one bar for each task and one line for the phase
    of the start, removed at the end.
    """
    if not console.is_terminal:
        yield _lines(console)
        return
    sized = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    )
    phase = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    current = phase.add_task("starting", total=None)
    tasks = {}
    lock = threading.Lock()

    def show(task: str, done: int, total: int) -> None:
        with lock:  # any thread may report a task first
            if not total:
                phase.reset(current, description=task)
                return
            if task not in tasks:
                tasks[task] = sized.add_task(task, total=total)
        sized.update(tasks[task], completed=done, total=total)

    with Live(Group(phase, sized), console=console, transient=True):
        yield show


def _lines(console: Console) -> local.Progress:
    """Phases go to stderr, so that the output of a command in a pipe has answers only."""
    started: set[str] = set()

    def show(task: str, done: int, total: int) -> None:
        if task in started:
            return
        started.add(task)
        if total:
            console.print(f"{task} ({total / 2**20:.0f} MiB)", markup=False, highlight=False)
        else:
            sys.stderr.write(f"kvant: {task}\n")
            sys.stderr.flush()

    return show
