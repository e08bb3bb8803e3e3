"""`kvant generate`: complete prompts, all in one batch. Answers on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from kvant.cli import model_options
from kvant.cli.configured import configured
from kvant.engine.config import EngineOptions
from kvant.engine.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvant.engine.llm import LLM, Prompt
    from kvant.engine.result import Result
    from kvant.engine.sampling_params import SamplingParams


class Output(Enum):
    TEXT = "text"
    JSON = "json"


@configured(EngineOptions, model="--model -m", without=("seed",))
def generate(
    settings: Settings,
    prompts: Annotated[
        list[str],
        typer.Argument(
            metavar="PROMPT..",
            help="Texts to complete; - reads one from stdin.",
            show_default=False,
        ),
    ],
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="New tokens at most, for each prompt.")
    ] = 128,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Each prompt is a user's message in the model's chat template, not raw text.",
        ),
    ] = False,
    output: Annotated[
        Output,
        typer.Option("--format", help="text, or json: one object a line, in the prompts' order."),
    ] = Output.TEXT,
    temperature: model_options.Temperature = None,
    top_k: model_options.TopK = None,
    top_p: model_options.TopP = None,
    min_p: model_options.MinP = None,
    seed: model_options.Seed = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop",
            help="End the answer before this text; may be repeated.",
            rich_help_panel=model_options.SAMPLING_PANEL,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Go on after the end of the text.",
            rich_help_panel=model_options.SAMPLING_PANEL,
        ),
    ] = False,
) -> None:
    """Complete prompts and print the answers.

    A prompt is raw text that the model goes on from; with --chat it is a message that the model
    answers. Without --temperature tokens are chosen greedily, so that the same command prints the same
    answer. One prompt is streamed; several run together and are printed as a whole.
    """
    from rich.console import Console

    sampling = model_options.SamplingFlags(
        temperature, top_k, top_p, min_p, seed, max_tokens, stop, ignore_eos
    )
    params = model_options.sampling_from(sampling, None)
    texts = [sys.stdin.read() if text == "-" else text for text in prompts]
    try:
        llm = model_options.open_llm(settings, Console(stderr=True), num_requests=len(texts))
        with model_options.mendable():
            _answer(llm, texts, params, chat=chat, output=output)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _answer(
    llm: LLM, texts: Sequence[str], params: SamplingParams, *, chat: bool, output: Output
) -> None:
    prompts: list[Prompt] = [
        llm.encode_chat([{"role": "user", "content": text}]) if chat else text for text in texts
    ]
    if output is Output.TEXT and len(prompts) == 1:
        for piece in llm.stream(prompts[0], params):
            sys.stdout.write(piece.text)
            sys.stdout.flush()
            if piece.result is not None:
                _warn(piece.result)
        sys.stdout.write("\n")
        return
    for text, result in zip(texts, llm.generate(prompts, params), strict=True):
        if output is Output.JSON:
            sys.stdout.write(json.dumps(_as_json(text, result), ensure_ascii=False) + "\n")
        else:
            sys.stdout.write(f">>> {text}\n{result.text}\n\n")
            _warn(result)


def _warn(result: Result) -> None:
    if result.finish_reason == "numerical_error":
        sys.stderr.write(
            "kvant: this answer ended because its logits were no numbers (NaN or Inf)\n"
        )


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
