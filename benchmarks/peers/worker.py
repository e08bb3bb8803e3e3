"""Kvant's side of the connection to a peer's process."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from tempfile import TemporaryFile
from types import TracebackType

from benchmarks.engine_timing import Case
from kvant.errors import ConfigError, WayOut


class Worker:
    """A peer that waits for cases. about: versions, as the peer names them.

    Raises ConfigError, with `ways_out`, if the process does not start.
    """

    def __init__(self, name: str, command: Sequence[str], ways_out: Sequence[WayOut]) -> None:
        self.name = name
        # With the threads' own ways of waiting: what Kvant sets for itself is not for others.
        environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
        self._errors = TemporaryFile("w+")  # noqa: SIM115  closed with the worker
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=environment,
            )
        except OSError as fault:
            self._errors.close()
            raise self._missing(str(fault), ways_out) from fault
        greeting = self._read()
        if not greeting:
            why = self._said()
            self._close()
            raise self._missing(why, ways_out)
        self.about: dict[str, str] = json.loads(greeting)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def time(self, case: Case, *, repeats: int, seed: int, filled: bool) -> list[float]:
        """Returns milliseconds of each step, or of each whole prompt.

        filled: long prompts are not computed.
        """
        asked = {
            "decode": case.decode,
            "batch": case.batch,
            "context": case.context,
            "repeats": repeats,
            "seed": seed,
            "filled": filled,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if not answer:
            raise ConfigError(f"{self.name} ended while it was measured", why=self._said())
        found: list[float] = json.loads(answer)
        return found

    def _close(self) -> None:
        with self._process:  # the end of its cases is the end of its work
            pass
        self._errors.close()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _said(self) -> str:
        """Returns the last line of the process's standard error."""
        self._process.wait(timeout=30)
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"it ended with {self._process.returncode}, saying nothing"

    def _missing(self, why: str, ways_out: Sequence[WayOut]) -> ConfigError:
        return ConfigError(f"the peer {self.name} does not run", why=why, ways_out=ways_out)
