"""Output that nobody reads any more, as behind `kvant plan M | head -3`."""

from __future__ import annotations

import os
import sys


def reader_left(fault: BaseException | None) -> bool:
    """Whether `fault` is, or came of, a write to a pipe without a reader."""
    while fault is not None and not isinstance(fault, BrokenPipeError):
        fault = fault.__context__
    return fault is not None


def open_closed_streams() -> None:
    """Give a process that was started without stdout or stderr (`>&-`) ones that go nowhere."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def flush_stdout() -> None:
    """Write what stdout still holds, nowhere from now on if its reader has left."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
