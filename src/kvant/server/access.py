"""Checks the options that control access (host, keys, origins, model names) before anything starts."""

from __future__ import annotations

import ipaddress
import json
import re
from pathlib import Path

from kvant.errors import BadValue, WayOut

_KEY = re.compile(r"[\x21-\x7e]+")
_ORIGIN = re.compile(r"https?://[^/\s]+")


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach `host`. Names other than localhost count as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(host: str, *, has_key: bool, insecure: bool) -> None:
    """Raises BadValue if anyone on the network could use the server without a key."""
    if not is_loopback(host) and not has_key and not insecure:
        raise BadValue(
            f"--host {host} would let anyone who reaches it use this server",
            why="it is not a loopback address, and there is no --api-key",
            ways_out=(
                WayOut("ask for a key", ("--api-key", "SECRET")),
                WayOut("stay on this machine", ("--host", "127.0.0.1")),
                WayOut("allow access without a key", ("--insecure-no-auth",)),
            ),
        )


def check_names(names: tuple[str, ...]) -> None:
    """Raises BadValue if a name of the model is blank."""
    if not all(name.strip() for name in names):
        raise BadValue(
            "--served-model-name is empty",
            why="clients name the model in every request, and the server names itself so",
        )


def read_keys(path: Path) -> tuple[str, ...]:
    """Reads keys from a file, one per line; empty lines and lines that begin with # are skipped.

    Raises BadValue if the file cannot be read or has no key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise BadValue(f"--api-key-file {path} cannot be read", why=str(fault)) from None
    lines = (line.strip() for line in text.splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise BadValue(
            f"--api-key-file {path} holds no key", why="the server would accept every request"
        )
    return keys


def check_keys(keys: tuple[str, ...]) -> None:
    """Raises BadValue for a key that is empty or that no HTTP header can carry."""
    for key in keys:
        if not _KEY.fullmatch(key):  # the key itself is a secret and is not shown
            raise BadValue(
                "an API key is empty or has characters that no HTTP header carries",
                why="a key is visible ASCII without spaces",
            )


def read_origins(given: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the origins as a flat tuple. An item may be a JSON list, as in vLLM's flag."""
    found: list[str] = []
    for item in given:
        if not item.startswith("["):
            found.append(item)
            continue
        try:
            items = json.loads(item)
        except ValueError:
            items = None
        if not isinstance(items, list) or not all(isinstance(one, str) for one in items):
            raise BadValue(f"--allowed-origins {item} is not a JSON list of texts")
        found += items
    return tuple(found)


def check_origins(origins: tuple[str, ...]) -> None:
    """Raises BadValue if an item is not an origin, for example an address with a path."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise BadValue(
                f"--allowed-origins {origin} is not an origin",
                why="an origin is SCHEME://HOST or SCHEME://HOST:PORT, without a path",
                ways_out=(WayOut("let every page use it", ("--allowed-origins", "*")),),
            )
