"""Ranks forked from a server that has imported everything: a start takes no seconds.

The processes run what `kvant.parallel.ranks.spawn` starts; only their imports are shared.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch", "torch.distributed", "transformers", "kvant.parallel.rank_process",
        "kvant.parallel.group", "kvant.models.load", "kvant.execution.runner",
        "kvant.attention.cpu.backend", "kvant.models.modules.forward", "kvant.models.fused.decoder",
        "tests.parallel.forked", *(f"transformers.models.{name}.modeling_{name}" for name in (
            "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3",
            "gpt_oss", "phi3", "olmo2", "ministral")),
    ]
)  # fmt: skip


def _run(link: socket.socket, pulse: socket.socket) -> None:
    from kvant.parallel.rank_process import main

    os._exit(main(link.detach(), pulse.detach()))


class _Forked:
    """A forked process, as `subprocess.Popen` would show it."""

    def __init__(self, process: Any) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return int(self._process.exitcode)


def spawn(link: socket.socket, pulse: socket.socket) -> _Forked:
    process = _CONTEXT.Process(target=_run, args=(link, pulse), daemon=True)
    process.start()
    return _Forked(process)
