"""Memory of another process, read over NIXL. The only file that imports it.

An agent is not safe for several threads: each `RemoteMemory` belongs to one.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from kvant.errors import NotServable, WayOut

READ_SECONDS = 10.0
"""A read that takes longer is given up."""

_POLL = 0.0005
_KIND = "DRAM"


class ReadFailed(Exception):
    """A read that did not end well; the text says why. What it was to fill is not known."""


def require_nixl() -> Any:
    """Returns the library. Raises NotServable that names the extra."""
    logging.getLogger("nixl").setLevel(logging.WARNING)
    try:
        return importlib.import_module("nixl")
    except ImportError as fault:
        raise NotServable(
            "pages cannot be exchanged with other engines (--kv-transfer)",
            why=f"NIXL cannot be imported: {fault}",
            ways_out=(
                WayOut("install the extra: pip install 'kvant[transfer]'"),
                WayOut("share a directory instead: --kv-offload host:SIZE,disk:DIRECTORY:SIZE"),
            ),
        ) from None


class RemoteMemory:
    """One agent of NIXL with UCX, which chooses RDMA, shared memory or TCP (`UCX_TLS`).

    Reads end in memory that was registered.
    """

    def __init__(self, name: str) -> None:
        nixl = require_nixl()
        # Its import sets the level by a configuration of its own.
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._agent: Any = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
        self._registered: list[Any] = []

    @property
    def metadata(self) -> bytes:
        """What another agent needs to read the registered memory."""
        return bytes(self._agent.get_agent_metadata())

    def register(self, address: int, num_bytes: int) -> None:
        """Lets transfers reach memory, which must outlive this object."""
        found = self._agent.register_memory([(address, num_bytes, 0, "")], _KIND)
        self._registered.append(found)

    def meet(self, metadata: bytes) -> str:
        """Learns another agent; returns its name."""
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def part(self, name: str) -> None:
        """Forgets another agent."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception as fault:
            logging.getLogger(__name__).debug("NIXL forgets %s: %s", name, fault)

    def read(self, name: str, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Copies pieces (address here, address there, bytes) from another agent's memory; waits for them.

        Raises ReadFailed. Nothing is written any more once this returns or raises.
        """
        if not pieces:
            return
        agent, handle = self._agent, None
        try:
            here = agent.get_xfer_descs([(to, size, 0) for to, _, size in pieces], _KIND)
            there = agent.get_xfer_descs([(at, size, 0) for _, at, size in pieces], _KIND)
            handle = agent.initialize_xfer("READ", here, there, name, b"")
            state = agent.transfer(handle)
            end = time.monotonic() + READ_SECONDS
            while state == "PROC":
                if time.monotonic() > end:
                    if self._release(handle):  # it writes nothing any more
                        handle = None
                        raise ReadFailed(f"no end within {READ_SECONDS:.0f} s")
                    end += READ_SECONDS  # the memory is not free before it ends
                time.sleep(_POLL)
                state = agent.check_xfer_state(handle)
        except ReadFailed:
            raise
        except Exception as fault:
            raise ReadFailed(str(fault) or type(fault).__name__) from None
        finally:
            if handle is not None:
                self._release(handle)
        if state != "DONE":
            raise ReadFailed(f"NIXL says {state}")

    def close(self) -> None:
        """Forgets all memory and ends the agent, in the thread that it belongs to. Nothing else may follow.

        Otherwise it would end when garbage is collected, in any thread and beside another agent's call.
        """
        for found in self._registered:
            try:
                self._agent.deregister_memory(found)
            except Exception as fault:
                # A kept record would keep the fault, whose frames hold the agent.
                logging.getLogger(__name__).warning("NIXL keeps memory: %s", str(fault))
        self._registered.clear()
        self._agent = None

    def _release(self, handle: Any) -> bool:
        """Gives a transfer up. Returns False if NIXL cannot."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as fault:
            logging.getLogger(__name__).warning("NIXL keeps a transfer: %s", fault)
            return False
        return True
