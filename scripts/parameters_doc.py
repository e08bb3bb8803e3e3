"""Write docs/parameters.md from the server's own tables; --check only compares."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from kvant.server.app import ENDPOINTS as ROUTES
from kvant.server.parameters import INSIDE, NOT_OFFERED, Inside, Table
from kvant.server.unserved import objects_of

DOC = Path(__file__).resolve().parent.parent / "docs" / "parameters.md"
ENDPOINTS = {one.path: (one.body, one.parameters) for one in ROUTES if one.body is not None}
HEAD = """\
# Parameters of requests

This page is written from the server's own tables (`kvant.server.parameters` and the types of bodies).
It lists every parameter of OpenAI's, Anthropic's and vLLM's requests, and those of llama.cpp and SGLang
that clients send.

- **works**: the parameter does what its API says; limits are in [server.md](server.md).
- **refused**: a value that would change the answer gets 400 with `param`. A neutral value and `null` pass.
- **no effect**: it cannot change an answer.

Any other parameter is a 400 that names it.
"""
OBJECTS = """
## Inside objects

The same holds for objects in bodies. Objects that clients send back as a server gave them (messages, items,
blocks) may have other fields too: these have no effect, and the server logs each name once. Other objects
get 400.
"""


def rows(body: type[msgspec.Struct], table: Table) -> dict[str, tuple[str, str]]:
    """Returns, by parameter, its state, and what to do instead or why."""
    found = {name: ("works", "") for name in body.__struct_fields__}
    refused = {name: ("refused", one.way_out) for name, one in table.refused.items()}
    idle = {name: ("no effect", why) for name, why in table.no_effect.items()}
    return {**idle, **refused, **found}


def written() -> str:
    parts = [HEAD]
    alike: dict[tuple[type[msgspec.Struct], int], list[str]] = {}
    for path, (body, table) in ENDPOINTS.items():
        alike.setdefault((body, id(table)), []).append(path)
    for paths in alike.values():
        body, table = ENDPOINTS[paths[0]]
        found = rows(body, table)
        path = "`, `".join(paths)
        works = sorted(name for name, (state, _) in found.items() if state == "works")
        parts.append(f"\n## `{path}`\n\n{filled('Works: ', works)}\n")
        others = sorted(
            (state != "refused", name, state, why)
            for name, (state, why) in found.items()
            if state != "works"
        )
        if others:
            parts.append("\n| parameter | state | instead, or why |\n|---|---|---|\n")
            parts += [f"| `{name}` | {state} | {why} |\n" for _, name, state, why in others]
    parts.append(OBJECTS)
    for kind, (path, places) in objects().items():
        inside = INSIDE.get(kind.__name__, Inside())
        end = " Other fields are logged." if inside.is_history else ""
        paths = ", ".join(f"`{place}`" for place in places)
        parts.append(
            f"\n{paths} of `{path}`:{end}\n\n{filled('Works: ', sorted(kind.__struct_fields__))}\n"
        )
        states = {name: ("refused", one.way_out) for name, one in inside.refused.items()}
        states |= {name: ("no effect", why) for name, why in inside.no_effect.items()}
        if states:
            parts.append("\n| field | state | instead, or why |\n|---|---|---|\n")
            parts += [f"| `{name}` | {state} | {why} |\n" for name, (state, why) in states.items()]
    parts.append("\n## Endpoints of other servers\n\nThey get 404 with `code` `not_offered`.\n\n")
    parts.append("| path | instead, or why |\n|---|---|\n")
    parts += [f"| `{path}` | {why} |\n" for path, why in NOT_OFFERED.items()]
    return "".join(parts)


def objects() -> dict[type[msgspec.Struct], tuple[str, list[str]]]:
    """Returns the types of objects in bodies: the first endpoint for them, and their paths in bodies."""
    found: dict[type[msgspec.Struct], tuple[str, list[str]]] = {}

    def walk(kind: type[msgspec.Struct], endpoint: str, path: str) -> None:
        for name, inner in objects_of(kind).items():
            _, known = found.setdefault(inner, (endpoint, []))
            place = f"{path}{name}"
            if place not in known:
                known.append(place)
                if inner is not kind:  # a block may have blocks
                    walk(inner, endpoint, f"{place}.")

    for endpoint, (body, _) in ENDPOINTS.items():
        walk(body, endpoint, "")
    return found


def filled(start: str, names: list[str]) -> str:
    """Fills lines of at most 118 characters with names."""
    lines, line = [], start
    for place, name in enumerate(names):
        item = f"`{name}`" + ("." if place == len(names) - 1 else ", ")
        if len(line) + len(item.rstrip()) > 118:
            lines.append(line.rstrip())
            line = ""
        line += item
    return "\n".join([*lines, line.rstrip()])


def main(check: bool) -> int:
    now = DOC.read_text(encoding="utf-8") if DOC.exists() else ""
    new = written()
    if check:
        return 0 if now == new else 1
    DOC.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
