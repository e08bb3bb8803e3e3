"""A server's children forked from the server, which was forked from an interpreter that has torch already."""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import logging
import os
import signal
from pathlib import Path

from tests.forked import execute


def fork() -> None:
    """From now on, this process forks the children that it would start."""
    asyncio.create_subprocess_exec = _start  # type: ignore[assignment]


class _Child:
    """What a server needs of an `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader | None):
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._handle = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._handle, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode


async def _start(program: str, *arguments: str, stdout: int | None = None, **_: object) -> _Child:
    """Fork `python -P -m MODULE ..` in a session of its own, with a pipe to its stdin."""
    its_input, own_output = os.pipe()
    own_input, its_output = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be(arguments[1:], its_input, None if stdout is None else its_output)
    os.close(its_input)
    os.close(its_output)
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(own_output, "wb")
    )
    reader = asyncio.StreamReader()
    source = os.fdopen(own_input, "rb")
    if stdout is None:
        source.close()
        return _Child(pid, asyncio.StreamWriter(transport, protocol, None, loop), None)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    return _Child(pid, asyncio.StreamWriter(transport, protocol, None, loop), reader)


def _be(arguments: tuple[str, ...], stdin: int, stdout: int | None) -> None:
    """Be the child. The caller's frames stay alive, so nothing of the server is collected here."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(stdin, 0)
    if stdout is not None:
        os.dup2(stdout, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.closerange(3, 1024)  # as exec would do: the server's sockets are not this process's
    asyncio._set_running_loop(None)
    logging.getLogger().handlers.clear()
    Path("/proc/self/comm").write_text(arguments[1].rpartition(".")[2])
    execute(arguments)
