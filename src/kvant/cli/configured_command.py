"""Command lines: more spellings of flags are accepted, and the help is grouped."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from kvant.cli.configured import ALL_OPTIONS
from kvant.cli.foreign_flags import SHORT, VALUES, VLLM, Foreign
from kvant.cli.llama_flags import flags_of, translate_llama_server
from kvant.errors import BadValue, WayOut

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
_PROGRAM = re.compile(
    r"(.*/)?(vllm|llama-server)|vllm\.entrypoints\.(openai\.)?api_server"
    r"|(.*/)?(vllm-openai|llama\.cpp)(:.*)?"
)
"""Matches a word that starts another server: a program, a module or an image. Its flags come after it."""


class ConfiguredCommand(TyperCommand):
    """A command that also accepts underscores in flags, counts such as 4k, and auto for a number's default.

    The model may stand alone, behind --model or behind -m. An unknown flag raises BadValue with a way out.
    Help lists the flags by panel. group: what stands before the command's name. foreign: other programs'
    flags. short: other programs' short flags.
    """

    group: ClassVar[str] = ""
    foreign: ClassVar[Mapping[str, Foreign]] = {}
    short: ClassVar[Mapping[str, str]] = {}

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, self.translated(args))

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

    def translated(self, args: Sequence[str]) -> list[str]:
        """Returns the arguments in this command's flags. Raises one BadValue that names all refused ones."""
        refused: list[BadValue] = []
        found = list(self.read(args, refused))
        if refused:
            raise _joined(refused)
        return found

    def read(self, args: Sequence[str], refused: list[BadValue]) -> Iterator[str]:
        """Yields the arguments in this command's flags. Appends errors of refused arguments to `refused`.

        Raises BadValue for a flag without its value, since the flags behind it cannot be told then.
        """
        line = _Line(deque(args), self._options(), refused)
        while line.rest:
            argument = line.rest.popleft()
            if argument == "--":
                yield argument
                yield from line.rest
                break
            if not argument.startswith("-") or argument == "-" or argument[1].isdigit():
                line.has_model = True
                yield argument
            else:
                yield from self._read_flag(argument, line)
        for flag, body in line.objects.items():
            yield from (flag, json.dumps(body))

    def _options(self) -> dict[str, TyperOption]:
        """Returns this command's options by each of their flags."""
        options = (param for param in self.params if isinstance(param, TyperOption))
        return {flag: param for param in options for flag in (*param.opts, *param.secondary_opts)}

    def _read_flag(self, argument: str, line: _Line) -> Iterator[str]:
        """Yields a flag, and its values from the same argument or from the rest of the line."""
        spelled, has_value, after = argument.partition("=")
        flag, keys = self._spelled(spelled, line.known)
        value = after if has_value else None
        if keys.startswith("="):  # -O3
            value = keys[1:]
        as_given = flag if value is None else f"{flag}={value}"
        param, foreign = line.known.get(flag), self.foreign.get(flag)
        if flag in ("--help", "-h"):
            yield "--help"
        elif param is not None and not param.is_flag:
            yield from _read_option(flag, keys, value, param, line)
        elif param is not None:
            yield as_given
        elif flag in ("--model", "-m") and any(_is_model(param) for param in self.params):
            line.has_model = True
            yield line.take_value(flag) if value is None else value
        elif foreign is not None:
            if foreign.takes_value and value is None:
                value = line.take_value(flag)
                list(line.take_more(if_any=line.has_model))
            yield from line.kept(_carried_over(flag, value or "", foreign))
        elif _is_short(flag, line.known):
            yield as_given
        elif flag not in line.unknown:
            line.unknown.add(flag)
            line.refused.append(self._unknown(flag, line.known))

    def _spelled(self, flag: str, known: Mapping[str, object]) -> tuple[str, str]:
        """Returns a flag's usual name, and the keys after its first dot, or = and an attached value."""
        flag, _, keys = flag.partition(".")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
            base = "--" + flag.removeprefix("--no-")
            # --no-X of another program's flag X: if X has no effect, neither has --no-X.
            other = self.foreign.get(base)
            if flag not in known and flag not in self.foreign and other and not other.takes_value:
                flag = base if other.no_effect else flag
        if flag[:2] == "-O" and flag[2:].isdigit() and self.short:
            return self.short["-O"], "=" + flag[2:]
        if flag in self.short and flag not in known:
            flag, _, key = self.short[flag].partition(".")
            keys = keys or key
        return flag, keys

    def _unknown(self, flag: str, known: Mapping[str, object]) -> BadValue:
        near = difflib.get_close_matches(flag, [*known, *self.foreign], n=2, cutoff=0.8)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        if any(flag == option.flag for option in ALL_OPTIONS):
            hint = "; kvant serve has it"
        return BadValue(
            f"kvant {self.group}{self.name} has no option {flag}{hint}",
            ways_out=(
                WayOut(
                    "list the options", ("kvant", *self.group.split(), str(self.name), "--help")
                ),
            ),
        )


class ServeCommand(ConfiguredCommand):
    """A command that also accepts the flags of `vllm serve`, and translates other servers' command lines."""

    foreign = VLLM
    short = SHORT

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        kinds = [one for one in args if one in ("--from-vllm", "--from-llama-server")]
        if kinds:
            if args[0] not in kinds or len(args) != 2:
                way = "give it alone, with the line in quotes"
                raise BadValue(
                    f"{kinds[0]} takes one command line, and nothing stands beside it",
                    ways_out=(WayOut(way, ("kvant", "serve", kinds[0], "PROGRAM --flag ..")),),
                )
            refused: list[BadValue] = []
            sys.stdout.write(self._of_other(args[0], args[1], refused) + "\n")
            if refused:  # the printed line lacks the refused flags
                raise _joined(refused)
            raise typer.Exit
        return super().parse_args(ctx, args)

    def _of_other(self, kind: str, line: str, refused: list[BadValue]) -> str:
        """Returns the `kvant serve` command line for another server's, without its refused flags."""
        words = [word for word in shlex.split(line) if word != "\n"]
        programs = [place for place, word in enumerate(words) if _PROGRAM.fullmatch(word)]
        del words[: programs[-1] + 1 if programs else 0]
        if words and words[0] in ("serve", "server"):
            del words[0]
        if kind == "--from-vllm":
            found = list(self.read(words, refused))
        else:
            found = []
            for one in translate_llama_server(words, refused):
                if isinstance(one, str):
                    found.append(one)
                else:
                    sys.stderr.write(f"kvant: {flags_of(one)} has no effect: {one.no_effect}\n")
            found = list(self.read(found, refused))
        return shlex.join(["kvant", "serve", *found])


def _is_model(param: object) -> bool:
    return isinstance(param, TyperArgument) and param.name == "model"


@dataclass
class _Line:
    """A command line while it is read.

    rest: its words that are not read yet. known: the command's options by flag. refused: errors so far.
    objects: values of dotted flags (--speculative-config.method), by flag. unknown: flags refused as unknown.
    has_model: the model's name was read.
    """

    rest: deque[str]
    known: Mapping[str, TyperOption]
    refused: list[BadValue]
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    has_model: bool = False

    def take_value(self, flag: str) -> str:
        """Removes and returns a flag's value. Raises BadValue if the line ends, or goes on with a flag."""
        rest = self.rest
        if rest and rest[0] not in self.known:
            return rest.popleft()
        behind = f"{rest[0]} comes behind it" if rest else "the command line ends behind it"
        raise BadValue(f"{flag} needs a value", why=behind)

    def take_more(self, *, if_any: bool) -> Iterator[str]:
        """Removes and yields further values, as in `--served-model-name A B`, up to the next flag.

        if_any: whether words may be values. Before the model's name they may not: a word may be that name.
        """
        while if_any and self.rest and not self.rest[0].startswith("-"):
            yield self.rest.popleft()

    def kept(self, words: Iterator[str]) -> Iterator[str]:
        """Yields words until they raise BadValue, which is refused with the others."""
        try:
            yield from words
        except BadValue as fault:
            self.refused.append(fault)


def _read_option(
    flag: str, keys: str, value: str | None, param: TyperOption, line: _Line
) -> Iterator[str]:
    """Yields an option with its values. A dotted one, whose keys are not "", goes to `line.objects`."""
    if value is None:
        value = line.take_value(flag)
    if keys:
        _put(line.objects.setdefault(flag, {}), keys.replace("-", "_"), value)
        return
    values = [value, *line.take_more(if_any=line.has_model and param.multiple)]
    yield from line.kept(word for one in values for word in _valued(flag, one, param))


def _joined(refused: Sequence[BadValue]) -> BadValue:
    """Returns one error for all refused arguments."""
    if len(refused) == 1:
        return refused[0]
    ways = {str(way): way for fault in refused for way in fault.ways_out}
    return BadValue(
        f"{len(refused)} flags of this command line cannot be taken",
        tried=[f"{fault.what}{': ' * bool(fault.why)}{fault.why}" for fault in refused],
        ways_out=tuple(ways.values()),
    )


def _put(into: dict[str, Any], keys: str, value: str) -> None:
    """Sets the value of a dotted key in `into`, parsed as JSON if possible."""
    *above, last = keys.split(".")
    for key in above:
        into = into.setdefault(key, {})
    try:
        into[last] = json.loads(value)
    except json.JSONDecodeError:
        into[last] = value


def _carried_over(flag: str, value: str, one: Foreign) -> Iterator[str]:
    if one.becomes and value not in one.neutral:
        yield from one.becomes
        if one.takes_value:
            yield one.convert(value)
    elif one.refused and value not in one.neutral:
        raise BadValue(
            f"{flag} {value}".strip() + " is not served",
            why=one.refused,
            ways_out=(one.way_out,) if one.way_out else (WayOut("leave it out"),),
        )
    else:
        sys.stderr.write(f"kvant: {flag} has no effect: {one.no_effect}\n")


def _valued(flag: str, value: str, param: TyperOption) -> Iterator[str]:
    """Yields a flag and its value, or nothing if the value means the default."""
    ours = VALUES.get(flag, {}).get(value.lower(), value)
    if ours in ("", "auto") and value.lower() != ours:
        told = "it is left out" if not ours else "auto chooses"
        sys.stderr.write(f"kvant: {flag} {value} has no effect: {told}\n")
        if not ours:
            return
    value = ours
    is_number = param.metavar in ("INT", "NUMBER")
    if is_number and value == "auto":
        return
    if is_number and (found := _COUNT.fullmatch(value)):
        number = Decimal(found[1]) * _UNITS[found[2]]
        value = str(int(number)) if number == int(number) else str(number)
    is_placeholder = value[:1] in ("$", "<")  # in a line that --from-vllm translates
    if is_number and not is_placeholder and not _is_number(value, whole=param.metavar == "INT"):
        kind = "a whole number, such as 4096 or 4k" if param.metavar == "INT" else "a number"
        raise BadValue(f"{flag} is {value or 'empty'}", why=f"it must be {kind}")
    yield flag
    yield value


def _is_number(value: str, *, whole: bool) -> bool:
    try:
        (int if whole else float)(value)
    except ValueError:
        return False
    return True


def _is_short(flag: str, known: Mapping[str, object]) -> bool:
    """Returns whether this is a short option with its value attached, such as -tp4, for the parser."""
    return not flag.startswith("--") and flag[:2] in known
