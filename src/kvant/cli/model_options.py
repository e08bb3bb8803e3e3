"""Sampling flags of the commands that run a model, and opening an engine for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvant.errors import BadValue, NotServable, RequestError, WayOut
from kvant.plan.config import engine_config
from kvant.plan.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

    from kvant.engine.llm import LLM
    from kvant.sampling.sampling_params import SamplingParams
    from kvant.sampling.structured_outputs import StructuredOutputs

SAMPLING_PANEL = "Sampling"

Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        help="0 takes the most likely token.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", help="Only the k most likely tokens.", rich_help_panel=SAMPLING_PANEL),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        help="Only the most likely tokens that reach this probability together.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        help="Only tokens at least this fraction as likely as the most likely one.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        "--presence-penalty",
        help="Subtracted from logits of tokens in the answer, -2 to 2.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        "--frequency-penalty",
        help="The same, times the count of the token in the answer.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        help="Above 1 makes tokens of prompt and answer less likely.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        help="The same seed gives the same answer.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]


def open_llm(settings: Settings, console: Console, *, num_requests: int) -> LLM:
    """Plan and load a model. Choices and warnings of the plan go to `console`.

    num_requests: number of concurrent requests; no memory is reserved for more unless asked for.
    """
    from kvant.cli.progress import bars
    from kvant.engine.build import build_engine
    from kvant.engine.llm import LLM
    from kvant.sampling.generation_defaults import recommendation

    config = engine_config(settings, num_requests=num_requests)
    with bars(console) as progress:
        llm = LLM.from_built(build_engine(config, progress=progress))
    if llm.tokenizing is None:
        model = llm.plan.model
        raise NotServable(
            f"{model} has no tokenizer",
            why="this command reads and prints text",
            ways_out=(
                WayOut("serve it: /v1/completions takes token ids", ("kvant", "serve", model)),
            ),
        )
    recommended = recommendation(llm.default_params)
    own = f"sampling as the model recommends, where no flag is given: {recommended}"
    for line in (*llm.notes, *([own] if recommended else ())):
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    for line in llm.warnings:
        console.print(
            f"warning: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True
        )
    return llm


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """Values of sampling flags; None if a flag was not given."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    max_tokens: int
    stop: Sequence[str] | None = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    n: int = 1
    structured_outputs: StructuredOutputs | None = None


def sampling_from(flags: SamplingFlags, otherwise: SamplingParams) -> SamplingParams:
    """Return the flags' values, and `otherwise`'s for flags that are not given."""
    said = {field.name: getattr(flags, field.name) for field in fields(flags)}
    with mendable():
        return replace(otherwise, **{k: value for k, value in said.items() if value is not None})


@contextmanager
def mendable() -> Iterator[None]:
    """Turn a RequestError into a BadValue: the command line is at fault, exit code 2."""
    try:
        yield
    except RequestError as fault:
        raise BadValue(str(fault)) from fault
