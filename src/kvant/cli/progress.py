"""Progress bars for downloads and conversions; plain lines if the output is not a terminal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kvant.models import local


@contextmanager
def bars(console: Console) -> Iterator[local.Progress]:
    """Yield a progress callback for `locate` and `LLM`: one bar per task, removed at the end."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        tasks = {}
        lock = threading.Lock()

        def show(task: str, done: int, total: int) -> None:
            with lock:  # any thread may report a task first
                if task not in tasks:
                    tasks[task] = shown.add_task(task, total=total)
            shown.update(tasks[task], completed=done, total=total)

        yield show


def _lines(console: Console) -> local.Progress:
    started: set[str] = set()

    def show(task: str, done: int, total: int) -> None:
        if task not in started:
            started.add(task)
            console.print(f"{task} ({total / 2**20:.0f} MiB)", markup=False, highlight=False)

    return show
