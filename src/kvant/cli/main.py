"""`kvant`: its commands, and the only place where errors become text and exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvant import __version__
from kvant.cli.streams import flush_stdout, prepare_streams, reader_left
from kvant.errors import KvantError

app = typer.Typer(
    name="kvant",
    help="LLM inference that decides the KV cache format once, per layer, and explains it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvant {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _add_commands() -> None:
    from kvant.cli import (
        bench,
        calibrate,
        chat,
        demo,
        doctor,
        eval,
        generate,
        plan,
        serve,
        tune,
        verify,
    )
    from kvant.cli.configured_command import ConfiguredCommand, ServeCommand
    from kvant.cli.measuring import MeasuringCommand

    app.command("chat", cls=ConfiguredCommand)(chat.chat)
    app.command("generate", cls=ConfiguredCommand)(generate.generate)
    app.command("plan", cls=ConfiguredCommand)(plan.plan)
    app.command("serve", cls=ServeCommand)(serve.serve)
    app.command("verify", cls=ConfiguredCommand)(verify.verify)
    app.command("doctor", cls=ConfiguredCommand)(doctor.doctor)
    app.command("demo", cls=ConfiguredCommand)(demo.demo)
    app.command("eval", cls=MeasuringCommand)(eval.evaluate)
    app.command("calibrate", cls=MeasuringCommand)(calibrate.calibrate)
    app.command("tune", cls=MeasuringCommand)(tune.tune)
    app.add_typer(bench.app)


_add_commands()


def run(commands: typer.Typer | None = None) -> None:
    """Runs the command given by `sys.argv`, of `commands` or of `kvant`, and exits.

    Exit codes: 0 for success, also if the reader of a pipe has left; 2 for an error that the user can
    correct, which is printed on stderr; 1 for a bug of Kvant.
    """
    code: str | int | None = 0
    prepare_streams()
    try:
        (commands or app)(standalone_mode=True)
    except KvantError as fault:
        sys.stderr.write(f"kvant: error: {fault}\n")
        code = fault.exit_code
    except (BrokenPipeError, SystemExit) as end:
        # rich and typer turn a BrokenPipeError into a SystemExit with code 1.
        code = end.code if isinstance(end, SystemExit) and not reader_left(end) else 0
    flush_stdout()
    sys.exit(code)
