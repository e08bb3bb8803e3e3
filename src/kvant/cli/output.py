"""The output of commands: the format of stdout, tables, and files that are checked before a long run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvant.errors import BadValue

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class Format(Enum):
    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Format of the output.")]
"""Type of the parameter `output: FormatOption = Format.TABLE`."""


def writable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Returns `path`, or raises BadValue if no file can be written there. A callback of typer."""
    if path is None:
        return None
    folder = path.absolute().parent
    why = ""
    if path.is_dir():
        why = "it is a directory"
    elif not folder.is_dir():
        why = f"there is no directory {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "there is no permission to write it"
    if why:
        raise BadValue(f"{option.opts[0]} {path} cannot be written", why=why)
    return path


def readable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Returns `path`, or raises BadValue if no file can be read there. A callback of typer."""
    if path is None:
        return None
    why = ""
    if path.is_dir():
        why = "it is a directory"
    elif not path.exists():
        why = "there is no such file"
    elif not os.access(path, os.R_OK):
        why = "there is no permission to read it"
    if why:
        raise BadValue(f"{option.opts[0]} {path} cannot be read", why=why)
    return path


OutFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Write the measurements to this file as JSON.",
        callback=writable,
    ),
]
"""Type of the parameter `out: OutFile = None` of a command that measures."""


def write_json(path: Path, body: object) -> None:
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def write_result(body: object, output: Format, out: Path | None, show: Callable[[], None]) -> None:
    """Writes a measurement to the file `out` if one is given, and to stdout as JSON or by `show()`."""
    if out is not None:
        write_json(out, body)
    if output is Format.JSON:
        sys.stdout.write(json.dumps(body) + "\n")
    else:
        show()


def plain(console: Console, text: str, style: str | None = None, *, end: str = "\n") -> None:
    """Prints text that may contain anything, unchanged: without markup, highlighting or line breaks."""
    console.print(
        text, style=style, end=end, markup=False, highlight=False, emoji=False, soft_wrap=True
    )


def figure_table(name: str, figures: Sequence[str]) -> Table:
    """Returns a table without lines: a column of names and right-aligned columns of figures.

    On a narrow terminal names are folded, and figures stay whole.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(name, overflow="fold")
    for title in figures:
        table.add_column(title, justify="right", no_wrap=True)
    return table
