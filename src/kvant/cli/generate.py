"""`kvant generate`: completes prompts in one batch. Answers go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvant.cli import model_options
from kvant.cli.configured import configured
from kvant.cli.streams import writes_utf8
from kvant.errors import BadValue, WayOut
from kvant.models.demo import DEMO_NAME
from kvant.models.directory import CONFIG_NAME
from kvant.plan.config import EngineOptions
from kvant.plan.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvant.engine.llm import LLM, Prompt
    from kvant.engine.result import Result
    from kvant.sampling.sampling_params import SamplingParams
    from kvant.sampling.structured_outputs import StructuredOutputs

_FORM_PANEL = "Structured output"


class Output(Enum):
    TEXT = "text"
    JSON = "json"


@configured(
    EngineOptions,
    model="--model -m",
    without=("seed",),
    sampling=model_options.sampling_parameters(),
)
def generate(
    settings: Settings,
    sampling: dict[str, Any],
    prompts: Annotated[
        list[str],
        typer.Argument(
            metavar="PROMPT..",
            help="Texts to complete; - reads one from stdin, without its last line break.",
        ),
    ],
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Maximum number of new tokens per prompt.")
    ] = 128,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Treat each prompt as a user message in the model's chat template."
        ),
    ] = False,
    output: Annotated[
        Output,
        typer.Option(
            "--format", help="text, or json: one object per line, in the order of the prompts."
        ),
    ] = Output.TEXT,
    json_schema: Annotated[
        str | None,
        typer.Option(
            "--json-schema",
            help="The answer is JSON that follows this schema; @FILE reads one.",
            rich_help_panel=_FORM_PANEL,
        ),
    ] = None,
    json_object: Annotated[
        bool,
        typer.Option(
            "--json-object", help="The answer is a JSON object.", rich_help_panel=_FORM_PANEL
        ),
    ] = False,
    regex: Annotated[
        str | None,
        typer.Option(
            "--regex",
            help="The whole answer matches this regular expression.",
            rich_help_panel=_FORM_PANEL,
        ),
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(
            "--choice",
            help="The answer is one of these; may be repeated.",
            rich_help_panel=_FORM_PANEL,
        ),
    ] = None,
    grammar: Annotated[
        str | None,
        typer.Option(
            "--grammar",
            help="The answer follows this Lark or GBNF grammar; @FILE reads one.",
            rich_help_panel=_FORM_PANEL,
        ),
    ] = None,
) -> None:
    """Complete prompts and print the answers.

    A prompt is raw text that the model continues. With --chat, it is a message that the model answers.
    Sampling values come from flags, else from the model's generation_config.json. Without both,
    temperature is 1 without filters. --temperature 0 or --seed makes the answer repeatable.
    One prompt is streamed. Several prompts run together, and their answers are printed whole.
    """
    from rich.console import Console

    from kvant.sampling.sampling_params import SamplingParams

    sampling |= {
        "max_tokens": max_tokens,
        "structured_outputs": _form(json_schema, json_object, regex, choice, grammar),
    }
    _refuse_models(prompts)
    if max_tokens < 1:
        raise BadValue(f"--max-tokens is {max_tokens}", why="it must be a whole number, 1 or more")
    # Wrong flags are refused before the model loads.
    params = model_options.sampling_from(sampling, SamplingParams())
    texts = [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in prompts]
    if not (chat or all(texts)):
        raise BadValue(
            "a prompt is empty",
            why="there is nothing to go on from",
            ways_out=(WayOut("give a text, or - to read one from stdin"),),
        )
    try:
        llm = model_options.open_llm(
            settings, Console(stderr=True), num_requests=len(texts) * params.n
        )
        params = model_options.sampling_from(sampling, llm.default_params)
        with model_options.mendable():
            _answer(llm, texts, params, chat=chat, output=output)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _refuse_models(prompts: list[str]) -> None:
    """Raises BadValue for a prompt that is a model on this machine, since other commands take it there."""
    for text in prompts:
        # A text may be longer than a name: os.path answers for those too.
        is_file = text.endswith(".gguf") and os.path.isfile(text)
        is_directory = bool(text) and os.path.isfile(os.path.join(text, CONFIG_NAME))
        if text == DEMO_NAME or is_file or is_directory:
            raise BadValue(
                f"kvant generate takes prompts, and {text} is a model",
                why="its arguments are texts that a model continues",
                ways_out=(WayOut("name the model by its flag", ("--model", text)),),
            )


def _form(
    json_schema: str | None,
    json_object: bool,
    regex: str | None,
    choice: Sequence[str] | None,
    grammar: str | None,
) -> StructuredOutputs | None:
    """Returns the structured output given by the flags, or None. Raises BadValue for two or a wrong one."""
    from kvant.sampling.structured_outputs import StructuredOutputs

    given = {
        "--json-schema": json_schema,
        "--json-object": json_object or None,
        "--regex": regex,
        "--choice": choice or None,
        "--grammar": grammar,
    }
    names = [name for name, value in given.items() if value is not None]
    if not names:
        return None
    if len(names) > 1:
        raise BadValue(
            f"{' and '.join(names)} cannot be combined", why="an answer follows one of them"
        )
    with model_options.mendable():
        return StructuredOutputs(
            json=None if json_schema is None else _text("--json-schema", json_schema),
            json_object=json_object,
            regex=regex,
            choice=tuple(choice) if choice else None,
            grammar=None if grammar is None else _text("--grammar", grammar),
            asked_as=names[0],
        )


def _text(flag: str, given: str) -> str:
    """Returns the flag's value, read from a file if it begins with @. Raises BadValue."""
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise BadValue(f"{flag} {given} cannot be read", why=str(fault)) from None


def _answer(
    llm: LLM, texts: Sequence[str], params: SamplingParams, *, chat: bool, output: Output
) -> None:
    prompts: list[Prompt] = [
        llm.encode_chat([{"role": "user", "content": text}]) if chat else text for text in texts
    ]
    if output is Output.TEXT and len(prompts) == 1 and params.n == 1:
        for piece in llm.stream(prompts[0], params):
            sys.stdout.write(piece.text)
            sys.stdout.flush()
            if piece.result is not None:
                _warn(piece.result)
        sys.stdout.write("\n")
        return
    asked = [text for text in texts for _ in range(params.n)]
    for text, result in zip(asked, llm.generate(prompts, params), strict=True):
        if output is Output.JSON:
            line = json.dumps(_as_json(text, result), ensure_ascii=not writes_utf8())
            sys.stdout.write(line + "\n")
        else:
            sys.stdout.write(f">>> {text}\n{result.text}\n\n")
            _warn(result)


def _warn(result: Result) -> None:
    if result.finish_reason == "numerical_error":
        sys.stderr.write("kvant: this answer ended because its logits were NaN or Inf\n")


def _as_json(text: str, result: Result) -> dict[str, object]:
    return {
        "prompt": text,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_cached_tokens": result.num_cached_tokens,
    }
