"""The exceptions of Kvant, and the form of their messages.

    KvantError
    +-- ConfigError            the user can fix it: exit code 2, before any weight is loaded
    |   +-- UnknownName        a format, backend, model or option that does not exist
    |   +-- BadValue           a known option with an invalid value
    |   +-- ModelNotFound      no such directory, hub id or installed demo model
    |   +-- BadCheckpoint      unreadable files, or a KV format that Kvant does not have
    |   +-- NotServable        a valid request that nothing here can serve
    |   +-- DoesNotFit         too little memory
    +-- RequestError           one request is invalid; the engine continues (HTTP 4xx)
    +-- EngineFault            a bug in Kvant or a broken device (exit code 1, HTTP 5xx)
        +-- RankLost           another process of a tensor-parallel engine died or hangs

A message has four parts: what was asked and by whom, what clashes and why, what was tried, and ways
out that work. A way out carries its command-line arguments, so tests can run it.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

KV_FORMAT = "--kv-cache-dtype"
"""Option that names the KV format, for ways out. Commands that spell it otherwise reword their errors."""


@dataclass(frozen=True, slots=True)
class WayOut:
    """One action for the user. `arguments` replace or extend the command line that failed."""

    text: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.text}: {shlex.join(self.arguments)}" if self.arguments else self.text


def _is_option(arguments: Sequence[str]) -> bool:
    return bool(arguments) and arguments[0].startswith("-")


class KvantError(Exception):
    """Base class of all exceptions that Kvant raises on purpose."""

    exit_code = 1


class ConfigError(KvantError):
    """The configuration asks for something that Kvant cannot do as given."""

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

    def reword(self, kv_format: str | None, options: Collection[str]) -> None:
        """Keeps the ways out that a command with these `options` can take, in its own words.

        kv_format: the command's option in the place of `KV_FORMAT`, None without one.
        """
        ways = [
            replace(way, arguments=(kv_format, *way.arguments[1:]))
            if kv_format is not None and way.arguments[:1] == (KV_FORMAT,)
            else way
            for way in self.ways_out
        ]
        self.ways_out = tuple(
            way for way in ways if not _is_option(way.arguments) or way.arguments[0] in options
        )
        self.args = (self._message(),)

    @property
    def ways(self) -> str:
        """The ways out as the end of a line, "" without one."""
        return "".join(f"; way out: {way}" for way in self.ways_out)

    def _message(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        lines += [f"  tried: {line}" for line in self.tried]
        lines += [f"  way out: {way}" for way in self.ways_out]
        return "\n".join(lines)


class UnknownName(ConfigError):
    """An unknown name. The message suggests the nearest names, and lists all of them if they are few."""

    MOST_LISTED = 40
    """Maximum number of known names that are listed beside suggestions."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, asked_by: str = "") -> None:
        names = list(known)
        spelled = {known.lower(): known for known in reversed(names)}
        begun = [one for one in spelled if len(name) > 2 and one.startswith(name.lower())]
        close = difflib.get_close_matches(name.lower(), spelled, n=3, cutoff=0.5)
        near = [spelled[found] for found in dict.fromkeys((*reversed(begun), *close))][:3]
        by = f" (asked by {asked_by})" if asked_by else ""
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        is_listed = not near or len(names) <= self.MOST_LISTED
        super().__init__(
            f"unknown {kind} {name!r}{by}{hint}",
            why=f"known names: {', '.join(names)}" if is_listed else "",
        )


class BadValue(ConfigError):
    """A known option with an invalid value."""


class ModelNotFound(ConfigError):
    """No model of that name on disk, on the hub, or among the installed demo models."""


class BadCheckpoint(ConfigError):
    """Checkpoint files that Kvant cannot read, or a KV format in them that it does not have."""


class NotServable(ConfigError):
    """A valid request that nothing on this machine can serve."""


class DoesNotFit(ConfigError):
    """The available memory is too small."""


class RequestError(KvantError):
    """One request is invalid. `param` names the field at fault."""

    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class EngineFault(KvantError):
    """A fault that the user cannot fix: a bug in Kvant, or a device that failed."""


class RankLost(EngineFault):
    """A process that runs a part of the model died or hangs: the engine cannot go on."""
