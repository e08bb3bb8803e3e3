"""Makes stdout and stderr safe to write: closed streams, narrow encodings, pipes without a reader."""

from __future__ import annotations

import codecs
import io
import os
import sys


def prepare_streams() -> None:
    """Replaces closed streams, and lets stdout write any character.

    A stream that is closed at the start (`>&-`) is replaced by the null device. A character that stdout's
    encoding lacks is written as a question mark.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def writes_utf8() -> bool:
    """Returns whether stdout can encode every character."""
    return codecs.lookup(sys.stdout.encoding).name == "utf-8"


def reader_left(fault: BaseException | None) -> bool:
    """Returns whether a write to a pipe without a reader caused `fault`, as in `kvant plan M | head`."""
    while fault is not None and not isinstance(fault, BrokenPipeError):
        fault = fault.__context__
    return fault is not None


def flush_stdout() -> None:
    """Flushes stdout. If its reader has left, redirects it to the null device."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
