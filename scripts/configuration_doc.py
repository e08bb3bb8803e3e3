"""Writes the tables of docs/configuration.md from the options themselves; --check only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from kvant.cluster.config import ReplicaOptions
from kvant.plan.config import EngineOptions
from kvant.plan.options import Kind, Option, options_of
from kvant.server.config import ServerConfig

DOC = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- options: {} -->\n", "<!-- end of options -->\n"
TABLES = {"engine": EngineOptions, "server": ServerConfig, "replicas": ReplicaOptions}


def table(options: tuple[Option, ...]) -> str:
    lines = ["| flag | default | what it is |", "|---|---|---|"]
    for option in options:
        if not option.hidden:
            flags = "`, `".join(flag.split("/")[0] for flag in option.flags)
            lines.append(f"| `{flags}` | {default(option)} | {option.help} |")
    return "".join(line + "\n" for line in lines)


def default(option: Option) -> str:
    if option.default is None:
        return option.unset
    if option.kind in (Kind.TEXTS, Kind.LAYERS):
        return "none"
    if option.kind is Kind.SWITCH:
        return "on" if option.default else "off"
    return (
        f"{option.default:,}"
        if isinstance(option.default, int) and option.default > 9999
        else f"{option.default}"
    )


def written(text: str) -> str:
    """Returns the document with new tables."""
    for name, class_ in TABLES.items():
        before, begin, rest = text.partition(BEGIN.format(name))
        _, end, after = rest.partition(END)
        assert end, f"{DOC} has no place for the options of the {name}"
        text = before + begin + "\n" + table(options_of(class_)) + "\n" + end + after
    return text


if __name__ == "__main__":
    old = DOC.read_text(encoding="utf-8")
    new = written(old)
    if "--check" in sys.argv:
        sys.exit(f"{DOC} is stale: run scripts/configuration_doc.py" if old != new else 0)
    DOC.write_text(new, encoding="utf-8")
