"""Python processes forked from one that has imported torch, transformers and Kvant: a start takes no seconds.

They are processes of their own, with their own arguments, environment, streams, signals and exit codes. Only
imports are shared. What a fresh interpreter imports, and what that costs, is tested with real ones.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, reduction, resource_tracker
from pathlib import Path
from typing import IO, Any

_FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3", "gpt_oss", "phi3",
    "olmo2", "ministral",
)  # fmt: skip
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "pytest", "torch", "torch.distributed", "transformers", "kvant.parallel.rank_process",
        "kvant.parallel.group", "kvant.models.load", "kvant.execution.runner",
        "kvant.attention.cpu.backend", "kvant.models.modules.forward", "kvant.models.fused.decoder",
        "kvant.cli.main", "kvant.engine.llm", "kvant.server.serve", "kvant.server.engine_process",
        "tests.forked", *(f"transformers.models.{name}.modeling_{name}" for name in _FAMILIES),
    ]
)  # fmt: skip
_ENVIRONMENT = dict(os.environ)
_QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"
"""A killed process leaves the lock of its progress bars, which a tracker removes at the end, and says so."""


class Forked:
    """A forked process, as `subprocess.Popen` would show it."""

    def __init__(self, process: Any, stdout: IO[str] | None = None) -> None:
        self._process = process
        self.stdout = stdout

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # the fork server reaped it since
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self.returncode


def spawn(link: socket.socket, pulse: socket.socket) -> Forked:
    """What `kvant.parallel.ranks.spawn` starts."""
    return _start(_rank, link, pulse)


def popen(
    arguments: Sequence[str],
    *,
    streams: tuple[int, int, int] = (0, 1, 2),
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    start_new_session: bool = False,
) -> Forked:
    """Start Python with `-c CODE ..` or `-m MODULE ..`. streams: descriptors for stdin, stdout and stderr."""
    environment = dict(os.environ if env is None else env)
    sent = [_Sent(one) for one in streams]
    directory = str(cwd or os.getcwd())
    return _start(_python, list(arguments), environment, directory, sent, start_new_session)


def popen_piped(arguments: Sequence[str], env: Mapping[str, str] | None = None) -> Forked:
    """Start Python with stdout and stderr in one pipe, which `stdout` reads."""
    read, write = os.pipe()
    process = popen(arguments, streams=(0, write, write), env=env)
    os.close(write)
    process.stdout = open(read)  # noqa: SIM115  the caller closes it
    return process


def run(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, with both streams captured."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = popen(arguments, streams=(0, out.fileno(), err.fileno()), env=env, cwd=cwd)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        shown = [_text(stream) for stream in (out, err)]
    return subprocess.CompletedProcess(list(arguments), code, *shown)


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return io.TextIOWrapper(io.BytesIO(stream.read())).read()


def share_server() -> None:
    """Start the process that forks, for the processes that this one will fork, too."""
    _start_server()
    # The other half of what it does, to ask whether its child still runs, only a parent can do.
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]


def _start_server() -> None:
    if forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined]
        changed = dict(os.environ)
        try:
            os.environ.clear()
            os.environ.update(_ENVIRONMENT)  # not the environment of the test that is the first
            os.environ["PYTHONWARNINGS"] = _QUIET
            resource_tracker.ensure_running()
            os.environ.pop("PYTHONWARNINGS")
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(changed)


def _start(target: Any, *arguments: Any) -> Forked:
    _start_server()
    process = _CONTEXT.Process(target=target, args=arguments, daemon=True)
    process.start()
    return Forked(process)


class _Sent:
    """A descriptor that a process gets with its arguments."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._number),)


def _received(sent: Any) -> int:
    return int(sent.detach())


# -- in the process ----------------------------------------------------------------------------


def _rank(link: socket.socket, pulse: socket.socket) -> None:
    from kvant.parallel.rank_process import main

    os._exit(main(link.detach(), pulse.detach()))


def _python(
    arguments: list[str],
    environment: dict[str, str],
    directory: str,
    streams: list[int],
    new_session: bool,
) -> None:
    if new_session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    execute(arguments)


def execute(arguments: Sequence[str]) -> None:
    """Be the interpreter of these arguments; end this process. Descriptors 0 to 2 are its streams."""
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    option, what, *rest = arguments
    code: object = 0
    try:
        sys.argv = ["-c", *rest]
        if option == "-m":
            sys.modules.pop(what, None)  # it runs as __main__, as if nothing had imported it
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
