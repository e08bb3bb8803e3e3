"""Runs `kvant` with arguments, as its `main` does."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvant.cli.main import run

_IN_TURN = """
import contextlib, io, json, os, sys
before = dict(os.environ)
for arguments, env in json.load(sys.stdin):
    os.environ.clear()
    os.environ.update(before | env)
    sys.argv = ["kvant", *arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            from kvant.cli.main import run
            run()
        except SystemExit as end:
            code = end.code
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    print(json.dumps((code, out.getvalue(), err.getvalue(), heavy)))
"""
_MEASURED = """
import resource, sys
sys.argv[0] = "kvant"
code = 0
try:
    from kvant.cli.main import run
    run()
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(bool(end.code))
used = resource.getrusage(resource.RUSAGE_SELF)
# Not ru_maxrss: a child starts with its parent's, and a test process is large.
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
heavy = [name for name in ("torch", "transformers") if name in sys.modules]
sys.stdout.flush()
sys.stderr.write(f"\\x00{used.ru_utime + used.ru_stime} {peak} {','.join(heavy)}")
sys.stderr.flush()
sys.exit(code)
"""


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class InTurn(Ran):
    """heavy: which of torch and transformers this command or one before it imported."""

    heavy: list[str]


@dataclass(frozen=True)
class Measured(Ran):
    """cpu_s: processor seconds, which other processes do not change. peak_mib: resident memory.

    heavy: which of torch and transformers were imported.
    """

    cpu_s: float
    peak_mib: float
    heavy: tuple[str, ...]


def _environment(env: Mapping[str, str] | None) -> dict[str, str]:
    return {"COLUMNS": "100", **(env or {})}


def kvant(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Ran:
    """Run in this process, from `sys.argv` to the exit code. A process of its own imports for seconds."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(out),
        redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        patch.setattr(sys, "argv", ["kvant", *map(str, arguments)])
        for name, value in _environment(env).items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            run()
    out.flush()
    shown = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    return Ran(int(end.value.code or 0), shown, err.getvalue())


def in_turn(commands: Sequence[tuple[Sequence[str | Path], Mapping[str, str]]]) -> list[InTurn]:
    """Run arguments, each with its variables, one after another in a new interpreter."""
    sent = [([*map(str, arguments)], _environment(env)) for arguments, env in commands]
    done = subprocess.run(
        [sys.executable, "-c", _IN_TURN],
        input=json.dumps(sent),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [InTurn(*json.loads(line)) for line in done.stdout.splitlines()]


def measured(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Measured:
    """Run in a new interpreter, and tell what it cost."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | _environment(env),
        timeout=120,
    )
    err, _, figures = done.stderr.partition("\x00")
    assert figures, f"the command ended without its figures: {done.stderr}"
    cpu, peak, *heavy = figures.split()
    names = tuple(heavy[0].split(",")) if heavy else ()
    return Measured(done.returncode, done.stdout, err, float(cpu), int(peak) / 1024, names)
