"""The exceptions of Kvant, and how a message is built.

    KvantError
    +-- ConfigError            what the user can mend: exit code 2, before any weight is loaded
    |   +-- UnknownName        a format, backend, model or option that does not exist
    |   +-- BadValue           a known option with a value that makes no sense
    |   +-- ModelNotFound      no such directory, hub id or installed demo model
    |   +-- BadCheckpoint      files that cannot be read, or that ask for what Kvant has no format for
    |   +-- NotServable        a clear request that nothing here can honour
    |   +-- DoesNotFit         memory
    +-- RequestError           one request is wrong; the engine goes on (HTTP 4xx)
    +-- EngineFault            our own bug or a broken device (exit code 1, HTTP 5xx)

A message has four parts: what was asked and by whom; what clashes and why; what was tried; ways out
that work. A way out carries the arguments that take it, so that tests can run it.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WayOut:
    """One thing the user can do. `arguments` replace or extend the command line that failed."""

    text: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.text}: {shlex.join(self.arguments)}" if self.arguments else self.text


class KvantError(Exception):
    """Base of everything Kvant raises on purpose."""

    exit_code = 1


class ConfigError(KvantError):
    """A request that cannot be honoured as it stands."""

    exit_code = 2

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        tried: Sequence[str] = (),
        ways_out: Sequence[WayOut] = (),
    ) -> None:
        self.what = what
        self.why = why
        self.tried = tuple(tried)
        self.ways_out = tuple(ways_out)
        super().__init__(self._message())

    def _message(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        lines += [f"  tried: {line}" for line in self.tried]
        lines += [f"  way out: {way}" for way in self.ways_out]
        return "\n".join(lines)


class UnknownName(ConfigError):
    """A name that is in no list; the message suggests the nearest and lists all."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, asked_by: str = "") -> None:
        names = list(known)
        spelled = {known.lower(): known for known in reversed(names)}
        close = difflib.get_close_matches(name.lower(), spelled, n=3, cutoff=0.5)
        near = [spelled[found] for found in close]
        by = f" (asked by {asked_by})" if asked_by else ""
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        super().__init__(
            f"unknown {kind} {name!r}{by}{hint}",
            why=f"known are: {', '.join(names)}",
        )


class BadValue(ConfigError):
    """A known option with a value that makes no sense."""


class ModelNotFound(ConfigError):
    """Nothing of that name on disk, on the hub, or among the installed demo models."""


class BadCheckpoint(ConfigError):
    """A checkpoint whose files cannot be read, or whose KV wish Kvant cannot read or has no format for."""


class NotServable(ConfigError):
    """A clear request that no backend here can honour."""


class DoesNotFit(ConfigError):
    """The memory given is too small."""


class RequestError(KvantError):
    """One request is wrong. `param` names the field at fault."""

    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class EngineFault(KvantError):
    """A fault that is not the user's: our own bug, or a device that failed."""
