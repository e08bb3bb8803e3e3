"""Run one benchmark as a command, with options and errors as in `kvant`."""

from __future__ import annotations

from collections.abc import Callable

import typer

from kvant.cli.main import run


def run_command(command: Callable[..., None]) -> None:
    """Parse `sys.argv`, call `command`, and exit: 0, or 2 with an error that the user can correct."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command)
    run(app)
