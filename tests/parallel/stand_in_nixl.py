"""The part of NIXL's interface that Kvant uses, over /proc/PID/mem: memory of any process of this machine."""

from __future__ import annotations

import ctypes
import os
from typing import Any

Pieces = list[tuple[int, int, int]]


class nixl_agent_config:
    def __init__(self, backends: list[str]) -> None:
        assert backends == ["UCX"]


class nixl_agent:
    """An agent's metadata is its process and its name."""

    def __init__(self, name: str, config: nixl_agent_config) -> None:
        self._name = name
        self._others: dict[str, int] = {}

    def get_agent_metadata(self) -> bytes:
        return f"{os.getpid()} {self._name}".encode()

    def register_memory(self, pieces: list[tuple[int, int, int, str]], kind: str) -> Any:
        return pieces

    def deregister_memory(self, found: Any) -> None: ...

    def add_remote_agent(self, metadata: bytes) -> str:
        pid, _, name = metadata.decode().partition(" ")
        self._others[name] = int(pid)
        return name

    def remove_remote_agent(self, name: str) -> None:
        del self._others[name]

    def get_xfer_descs(self, pieces: Pieces, kind: str) -> Pieces:
        return pieces

    def initialize_xfer(self, way: str, here: Pieces, there: Pieces, name: str, _: bytes) -> Any:
        assert way == "READ"
        return self._others[name], here, there

    def transfer(self, handle: tuple[int, Pieces, Pieces]) -> str:
        pid, here, there = handle
        file = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
        try:
            for (to, size, _), (at, _, _) in zip(here, there, strict=True):
                data = os.pread(file, size, at)
                if len(data) != size:
                    return "ERR"
                ctypes.memmove(to, data, size)
        finally:
            os.close(file)
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None: ...
