"""stdout and stderr as a process finds them: closed, without all characters, left by their reader."""

from __future__ import annotations

import codecs
import io
import os
import sys


def prepare_streams() -> None:
    """Make both writable, whatever is written.

    One that was closed at the start (`>&-`) goes nowhere; a character that stdout's encoding lacks, as
    latin-1 lacks most, becomes a question mark.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def writes_utf8() -> bool:
    """Whether stdout writes every character as it is."""
    return codecs.lookup(sys.stdout.encoding).name == "utf-8"


def reader_left(fault: BaseException | None) -> bool:
    """Whether `fault` is, or came of, a write to a pipe without a reader, as `kvant plan M | head -3` has."""
    while fault is not None and not isinstance(fault, BrokenPipeError):
        fault = fault.__context__
    return fault is not None


def flush_stdout() -> None:
    """Write what stdout still holds, nowhere from now on if its reader has left."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
