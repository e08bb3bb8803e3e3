"""The command line of configured commands: friendlier spellings in, help in groups out."""

from __future__ import annotations

import difflib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import ClassVar

import typer
from typer.core import TyperCommand, TyperOption

from kvant.cli.foreign_flags import VALUES, VLLM, Foreign
from kvant.cli.llama_flags import flags_of, translate_llama_server
from kvant.errors import BadValue, WayOut

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
_OTHER = "Other"


class ConfiguredCommand(TyperCommand):
    """Takes underscores in flags, counts such as 4k, and auto for the default of a number.

    An unknown flag is a BadValue with a way out. Help lists the flags by panel.
    """

    foreign: ClassVar[Mapping[str, Foreign]] = {}

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, list(self._translated(args)))

    def format_options(  # type: ignore[override]
        self, ctx: typer.Context, formatter: typer._click.HelpFormatter
    ) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if param.param_type_name == "argument" else "Options"
                panel = getattr(param, "rich_help_panel", None) or default
                sections.setdefault(panel, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    # -- arguments -----------------------------------------------------------------------------

    def _translated(self, args: list[str]) -> Iterator[str]:
        """The arguments as this command knows them."""
        known = {
            flag: param
            for param in self.params
            if isinstance(param, TyperOption)
            for flag in (*param.opts, *param.secondary_opts)
        }
        rest = iter(args)
        for argument in rest:
            if argument == "--":
                yield argument
                yield from rest
                return
            if not argument.startswith("-") or argument == "-" or argument[1].isdigit():
                yield argument
                continue
            flag, has_value, value = argument.partition("=")
            if flag.startswith("--"):
                flag = flag.replace("_", "-")
            param = known.get(flag)
            if param is None and flag == "--model":
                yield value if has_value else next(rest, flag)
            elif param is None and flag in self.foreign:
                one = self.foreign[flag]
                if one.takes_value and not has_value:
                    value = next(rest, "")
                yield from _carried_over(flag, value, one)
            elif flag in ("--help", "-h"):
                yield "--help"
            elif param is None and not _is_short(flag, known):
                raise self._unknown(flag, known)
            elif param is None or param.is_flag:
                yield flag + has_value + value
            else:
                if not has_value:
                    value = next(rest, "")
                yield from _valued(flag, value, param)

    def _unknown(self, flag: str, known: Mapping[str, object]) -> BadValue:
        near = difflib.get_close_matches(flag, [*known, *self.foreign], n=2, cutoff=0.8)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        return BadValue(
            f"kvant {self.name} has no option {flag}{hint}",
            ways_out=(WayOut("list the options", ("kvant", str(self.name), "--help")),),
        )


class ServeCommand(ConfiguredCommand):
    """Also takes the flags of `vllm serve`, and translates whole command lines of other servers."""

    foreign = VLLM

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args and args[0] in ("--from-vllm", "--from-llama-server"):
            if len(args) != 2:
                raise BadValue(
                    f"{args[0]} takes one command line",
                    ways_out=(WayOut("put it in quotes", (args[0], "PROGRAM --flag ..")),),
                )
            sys.stdout.write(self._of_other(args[0], args[1]) + "\n")
            raise typer.Exit
        return super().parse_args(ctx, args)

    def _of_other(self, kind: str, line: str) -> str:
        """The command line of `kvant serve` for one of another server."""
        words = [word for word in shlex.split(line) if word != "\n"]
        while words and (words[0] in ("vllm", "serve") or "=" in words[0].split("-")[0]):
            del words[0]  # the program's name, and variables before it
        if words and words[0].rsplit("/", 1)[-1] in ("llama-server", "server"):
            del words[0]
        if kind == "--from-vllm":
            found = list(self._translated(words))
        else:
            found = []
            for one in translate_llama_server(words):
                if isinstance(one, str):
                    found.append(one)
                else:
                    sys.stderr.write(f"kvant: {flags_of(one)} has no effect: {one.no_effect}\n")
            found = list(self._translated(found))
        return shlex.join(["kvant", "serve", *found])


def _carried_over(flag: str, value: str, one: Foreign) -> Iterator[str]:
    if one.becomes:
        yield from one.becomes
        if one.takes_value:
            yield value
    elif one.refused and value not in one.neutral:
        raise BadValue(
            f"{flag} {value}".strip() + " is not served",
            why=one.refused,
            ways_out=(one.way_out,) if one.way_out else (WayOut("leave it out"),),
        )
    else:
        sys.stderr.write(f"kvant: {flag} has no effect: {one.no_effect}\n")


def _valued(flag: str, value: str, param: TyperOption) -> Iterator[str]:
    """A flag with its value, or nothing where the value asks for the default."""
    value = VALUES.get(flag, {}).get(value, value)
    is_number = param.metavar in ("INT", "NUMBER")
    if is_number and value == "auto":
        return
    if is_number and (found := _COUNT.fullmatch(value)):
        number = Decimal(found[1]) * _UNITS[found[2]]
        value = str(int(number)) if number == int(number) else str(number)
    yield flag
    yield value


def _is_short(flag: str, known: Mapping[str, object]) -> bool:
    """A short option with its value attached, such as -tp4, is left to the parser."""
    return not flag.startswith("--") and flag[:2] in known
