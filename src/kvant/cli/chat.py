"""`kvant chat`: a conversation in the terminal, or one line at a time through a pipe."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvant.cli import model_options
from kvant.cli.configured import configured
from kvant.cli.output import plain
from kvant.errors import BadValue, NotServable, RequestError, WayOut
from kvant.look import counted
from kvant.plan.config import EngineOptions
from kvant.plan.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

    from kvant.engine.llm import LLM
    from kvant.engine.result import Result
    from kvant.engine.text import Message
    from kvant.sampling.sampling_params import SamplingParams

_SAVE_SECONDS = 30.0
"""The longest wait, in seconds, for the pages of a conversation to reach files."""

COMMANDS = {
    "/exit": "leave (or press Ctrl-D)",
    "/reset": "clear the conversation",
    "/plan": "show what every layer stores and who decided it",
    "/help": "show these commands",
}


@configured(
    EngineOptions,
    without=("seed", "max_num_seqs"),
    sampling=model_options.sampling_parameters(without=("n", "stop", "ignore_eos")),
)
def chat(
    settings: Settings,
    sampling: dict[str, Any],
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Maximum number of tokens per answer.")
    ] = 512,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="ID",
            help="Go on with a kept conversation, or begin one that is kept; needs a disk in --kv-offload.",
        ),
    ] = None,
) -> None:
    """Talk with a model.

    Sampling values come from flags, else from the model's generation_config.json. Without both,
    temperature is 1 without filters. Ctrl-C stops an answer; a second Ctrl-C, or one at the prompt, leaves.
    """
    from rich.console import Console

    from kvant.sampling.sampling_params import SamplingParams

    sampling["max_tokens"] = max_tokens
    # Wrong flags are refused before the model loads.
    model_options.sampling_from(sampling, SamplingParams())
    console = Console()
    try:
        llm = model_options.open_llm(settings, console, num_requests=1)
        _refuse_without_template(llm, llm.plan.model)
        kept = None if resume is None else KeptConversation(llm, resume)
        params = model_options.sampling_from(sampling, llm.default_params)
        talk = Conversation(llm, params, console, system)
        if kept is None:
            talk.run()
        else:
            kept.run(talk)
    except KeyboardInterrupt:
        console.print()
        raise typer.Exit(130) from None


def _refuse_without_template(llm: LLM, model: str) -> None:
    assert llm.tokenizing is not None, "open_llm refuses a model without a tokenizer"
    if not llm.tokenizing.has_chat_template:
        raise NotServable(
            f"{model} cannot chat",
            why="it has no chat template, so it can only complete texts",
            ways_out=(
                WayOut("complete a text", ("kvant", "generate", "--model", model, "PROMPT")),
            ),
        )


class KeptConversation:
    """A conversation that is read from files at its beginning and saved at its end.

    Raises BadValue without a directory for pages, and NotServable for a session of another engine.
    """

    def __init__(self, llm: LLM, id: str) -> None:
        from kvant.kv.offload.sessions import ID, ForeignSession, SessionFiles

        tiers = llm.engine.tiers
        if tiers is None or tiers.files is None:
            raise BadValue(
                f"--resume {id} has no directory to read from",
                why="a conversation is kept beside the files of its pages",
                ways_out=(
                    WayOut(
                        "name one", ("--kv-offload", "host:1GiB,disk:~/.cache/kvant/pages:8GiB")
                    ),
                ),
            )
        if not ID.fullmatch(id):
            raise BadValue(
                f"--resume {id!r} is no name of a session",
                why="it has up to 64 letters, digits, dots, dashes and underscores",
            )
        windows = llm.engine.scheduler.allocator.every_window
        self._llm, self._id = llm, id
        size, files = llm.engine.limits.page_size, tiers.files
        self._sessions = SessionFiles(files.store, windows, size, files.others)
        self.messages: list[Message] = []
        try:
            self.messages = self._sessions.read(id, "").messages
        except FileNotFoundError:
            pass
        except ForeignSession as fault:
            raise NotServable(
                f"the session {id} belongs to another engine",
                why=str(fault),
                ways_out=(WayOut("start with the options that it was saved with"),),
            ) from None

    def run(self, talk: Conversation) -> None:
        """Runs the conversation and saves its messages and pages at the end."""
        talk.messages = self.messages
        if self.messages:
            talk.note(f"goes on with {self._id}: {len(self.messages)} messages")
        try:
            talk.run()
        finally:
            self._save(talk)

    def _save(self, talk: Conversation) -> None:
        if not talk.messages:
            return
        end = time.monotonic() + _SAVE_SECONDS
        engine = self._llm.engine
        while engine.is_moving and time.monotonic() < end:
            engine.move(0.05)
        tokens = self._llm.encode_chat([*talk.start(), *talk.messages])
        saved = self._sessions.save(self._id, "", tokens, "", talk.messages)
        talk.note(
            f"kept as {self._id}: {saved.saved_tokens} of {len(tokens)} tokens need not be computed again"
        )


@dataclass
class Conversation:
    """A conversation in the terminal: reads lines, streams answers and keeps the messages."""

    llm: LLM
    params: SamplingParams
    console: Console
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def run(self) -> None:
        """Reads and answers lines until /exit or the end of the input."""
        self._greet()
        while (line := self._read()) is not None:
            text = line.strip()
            if text == "/exit":
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._turn(text)

    def _greet(self) -> None:
        plan = self.llm.plan
        self.note(
            f"{plan.model}: context {self.llm.engine.limits.max_model_len} tokens, "
            f"KV {', '.join(plan.formats)}, {plan.bytes_per_token} bytes a token. /help lists commands."
        )

    def _read(self) -> str | None:
        """Returns one line, or None at the end of the input."""
        if not sys.stdin.isatty():
            return sys.stdin.readline() or None
        with suppress(ImportError):  # some Pythons lack it
            import readline  # noqa: F401  adds editing and history to `input`
        try:
            return input("you> ")
        except EOFError:
            self.console.print()
            return None

    def _command(self, text: str) -> None:
        if text == "/reset":
            self.messages.clear()
            self.note("conversation cleared")
        elif text == "/plan":
            from kvant.cli.plan_table import print_layers

            print_layers(self.llm.planned.target, self.console)
        else:
            if text != "/help":
                self.note(f"unknown command {text.split()[0]}")
            for name, does in COMMANDS.items():
                self.note(f"  {name:8}{does}")

    def _turn(self, text: str) -> None:
        """Answers one question and prints the answer. A question without an answer is not kept."""
        self.messages.append({"role": "user", "content": text})
        try:
            result = self._answer()
        except RequestError as fault:
            plain(self.console, f"cannot answer: {fault}", "red")
            result = None
        if result is not None and result.text:
            self.messages.append({"role": "assistant", "content": result.text})
        else:
            self.messages.pop()

    def _answer(self) -> Result:
        engine, plan = self.llm.engine, self.llm.plan
        number = engine.submit(self._prompt(), self.params)
        clock = _Clock()
        words = Words(self._show, self.console.width if self.console.is_terminal else None)
        result: Result | None = None
        with _interruptible() as interrupted:
            while result is None:
                for piece in engine.step():
                    clock.count(len(piece.token_ids))
                    words.push(piece.text)
                    result = piece.result
                if result is None and interrupted():
                    result = engine.cancel(number)
        words.finish()
        self.console.print()
        parts = [counted(clock.num_tokens, "token"), *clock.report()]
        if result.num_cached_tokens:
            parts.append(
                f"{result.num_cached_tokens} of {result.num_prompt_tokens} prompt tokens cached"
            )
        parts.append(
            f"KV {_size(result.num_pages * plan.page_bytes)} in use ({', '.join(plan.formats)})"
        )
        if result.finish_reason != "stop":
            parts.append(_ENDED[result.finish_reason])
        self.note(" · ".join(parts))
        return result

    def _prompt(self) -> list[int]:
        """Returns the conversation as tokens. If it is too long, drops its oldest turns and says so."""
        limit = self.llm.engine.limits.max_model_len
        left_out = 0
        while True:
            ids = self.llm.encode_chat([*self.start(), *self.messages])
            if len(ids) < limit or len(self.messages) == 1:
                break
            del self.messages[:2]
            left_out += 1
        if left_out:
            self.note(
                f"the conversation exceeds {limit} tokens: dropped the oldest {left_out} turn(s)"
            )
        return ids

    def start(self) -> list[Message]:
        """Returns the messages before the first question: the system message, if there is one."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _show(self, text: str) -> None:
        plain(self.console, printable(text), end="")
        self.console.file.flush()

    def note(self, text: str) -> None:
        """Prints a line that is not part of the conversation."""
        plain(self.console, text, "dim")


class Words:
    """Shows streamed text, whole words at a time.

    show: prints text. width: columns of the terminal; a word that would cross its edge begins a new line.
    None shows the pieces unchanged.
    """

    def __init__(self, show: Callable[[str], None], width: int | None) -> None:
        self._show, self._width = show, width
        self._held = ""
        self._column = 0
        self._goes_on = False  # the last word was shown in part

    def push(self, text: str) -> None:
        if self._width is None:
            self._show(text)
            return
        *whole, self._held = re.split(r"(?<=\s)", self._held + printable(text))
        for word in whole:
            self._place(word)
        if _cells(self._held) >= self._width:  # a word as long as a line is shown in pieces
            self._place(self._held)
            self._held, self._goes_on = "", True

    def finish(self) -> None:
        """Shows the rest of the text."""
        if self._held:
            self._place(self._held)
            self._held = ""

    def _place(self, word: str) -> None:
        """Shows a word with its trailing blank, on a new line if it does not fit; or a word's next part."""
        assert self._width is not None
        goes_on, self._goes_on = self._goes_on, False
        size = _cells(word.rstrip())
        if not goes_on and self._column and size and self._column + size > self._width:
            self._show("\n")
            self._column = 0
        self._show(word)
        column = self._column + _cells(word)
        if goes_on or size >= self._width:  # the terminal has wrapped it
            column %= self._width
        self._column = 0 if word.endswith("\n") else column


def _cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text.rstrip("\n"))


_ENDED = {
    "length": "reached --max-tokens or the end of the context",
    "cancelled": "stopped",
    "numerical_error": "ended: its logits were NaN or Inf",
}


class _Clock:
    """Measures the speed of one answer."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first: float | None = None
        self._last = self._started
        self.num_tokens = 0

    def count(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last

    def report(self) -> list[str]:
        """Returns texts of the tokens per second after the first token, and the time to the first token."""
        if self._first is None:
            return []
        parts = [f"first after {self._first - self._started:.2f} s"]
        if self.num_tokens > 1:
            speed = (self.num_tokens - 1) / (self._last - self._first)
            parts.insert(0, f"{speed:.1f} tokens/s")
        return parts


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns True after one Ctrl-C. A second Ctrl-C raises KeyboardInterrupt."""
    seen = 0

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen > 0
    finally:
        signal.signal(signal.SIGINT, before)


def printable(text: str) -> str:
    """Removes control characters except newline and tab, so that a model cannot control the terminal."""
    return "".join(c for c in text if c in "\n\t" or not (c < " " or "\x7f" <= c <= "\x9f"))


def _size(num_bytes: int) -> str:
    from kvant.kv.memory import format_size

    return format_size(num_bytes)
