"""Builds a command's flags from tables of options.

    @configured(EngineOptions)
    def generate(settings: Settings, prompts: ...) -> None: ...

The command gets every flag of the tables, --config and --print-config. `settings` has the options' values.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvant.cli.print_config import config_lines
from kvant.cluster.config import REPLICA_OPTIONS
from kvant.errors import BadValue, WayOut
from kvant.plan.config import DEFAULT_MODEL, ENGINE_OPTIONS, engine_config
from kvant.plan.options import Kind, Option, options_of
from kvant.plan.settings import (
    CONFIG_VARIABLE,
    Settings,
    read_settings,
    refuse_unknown_variables,
)
from kvant.server.config import SERVER_OPTIONS

ALL_OPTIONS = (*ENGINE_OPTIONS, *SERVER_OPTIONS, *REPLICA_OPTIONS)
"""Options that a configuration file may have. Every command accepts all of them, so one file serves all."""

_TYPES: dict[Kind, Any] = {
    Kind.COUNT: int | None,
    Kind.NUMBER: float | None,
    Kind.SWITCH: bool | None,
    Kind.TEXTS: list[str] | None,
    Kind.LAYERS: list[str] | None,
}
_METAVARS = {Kind.COUNT: "INT", Kind.NUMBER: "NUMBER", Kind.TEXT: "TEXT", Kind.TEXTS: "TEXT"}
_ENDING = (
    "Every option is also a variable KVANT_NAME and a key of the YAML file that --config names. "
    "Flags override variables, variables override the file (docs/configuration.md)."
)
Command = Callable[..., None]


def configured(
    *tables: type,
    model: str = "argument",
    needs_model: bool = False,
    without: Sequence[str] = (),
    sampling: Sequence[inspect.Parameter] = (),
    check: Callable[[Settings], object] = engine_config,
) -> Callable[[Command], Command]:
    """Returns a decorator that gives a command the flags of `tables`.

    model: "argument", or the flags of the model. needs_model: the model has no default. without: options
    without a flag. check: raises the errors of a start that depend on the settings alone. sampling: flags of
    sampling parameters; the command gets their values by name, as `sampling`.
    """
    options = tuple(o for o in options_of(*tables) if o.name not in without)

    def wrap(command: Command) -> Command:
        def run(**arguments: Any) -> None:
            given = {option.name: arguments.pop(option.name) for option in options}
            file, show = arguments.pop("config"), arguments.pop("print_config")
            settings = _settings(given, file)
            if needs_model and settings.get("model") is None:
                raise BadValue(
                    f"kvant {command.__name__}: no model is named",
                    ways_out=(WayOut("take the demo model", (DEFAULT_MODEL,)),),
                )
            if show:
                check(settings)  # refuse settings that a start would refuse
                for line in config_lines(options_of(*tables), settings):
                    sys.stdout.write(line + "\n")
                return
            if sampling:
                arguments["sampling"] = {flag.name: arguments.pop(flag.name) for flag in sampling}
            command(settings, **arguments)

        own = [
            parameter
            for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
            if name != "settings" and not (sampling and name == "sampling")
        ]
        parameters = [_parameter(o, model, needed=needs_model) for o in options]
        parameters += [_CONFIG, _PRINT_CONFIG]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *sampling, *parameters)]
        )
        run.__name__ = command.__name__
        run.__doc__ = f"{inspect.cleandoc(command.__doc__ or '')}\n\n{_ENDING}"
        return run

    return wrap


def _settings(given: dict[str, Any], file: Path | None) -> Settings:
    named = os.environ.get(CONFIG_VARIABLE)
    refuse_unknown_variables(ALL_OPTIONS, os.environ)
    path = file if file is not None or named is None else Path(named)
    return read_settings(
        ALL_OPTIONS,
        # A repeatable option that was not given is an empty list.
        given={name: None if value == [] else value for name, value in given.items()},
        by=lambda option: "MODEL" if option.name == "model" else option.flag,
        environ=os.environ,
        file=path,
    )


def _parameter(option: Option, model: str, *, needed: bool) -> inspect.Parameter:
    default = option.unset if option.default is None else _shown(option)
    help = option.help + (f"  [default: {default}]" if default and not option.hidden else "")
    info: Any
    if option.name == "model" and model == "argument":
        info = typer.Argument(help=option.help if needed else help, show_default=False)
    else:
        flags = model.split() if option.name == "model" else option.flags
        info = typer.Option(
            *flags,
            help=help,
            metavar=option.metavar or "|".join(option.choices) or _METAVARS.get(option.kind),
            rich_help_panel=option.panel,
            hidden=option.hidden,
            show_default=False,
        )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[_TYPES.get(option.kind, str | None), info],
    )


def _shown(option: Option) -> str:
    """Returns a default as help shows it; empty for lists and for switches that are off."""
    if option.kind is Kind.SWITCH:
        return "on" if option.default else ""
    return "" if isinstance(option.default, tuple) else str(option.default)


_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help=f"YAML file of options.  [env: {CONFIG_VARIABLE}]"
        ),
    ],
)
_PRINT_CONFIG = inspect.Parameter(
    "print_config",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print every option with its value and source, as a file for --config, and exit.",
        ),
    ],
)
