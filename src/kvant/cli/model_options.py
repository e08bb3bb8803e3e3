"""Shared by commands that run a model: the sampling flags, and loading the model."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvant.cli.output import plain
from kvant.errors import BadValue, NotServable, RequestError, WayOut
from kvant.models.pooling import Task
from kvant.plan.config import engine_config
from kvant.plan.settings import Settings
from kvant.sampling.sampling_params import PARAMS, SamplingParams, scalar_type

if TYPE_CHECKING:
    from rich.console import Console

    from kvant.engine.llm import LLM


def sampling_parameters(without: Collection[str] = ()) -> list[inspect.Parameter]:
    """Returns the flags of sampling parameters, from `SamplingParams`. Their default None means unset."""
    names = (name for name, param in PARAMS.items() if param.has_flag and name not in without)
    return [_parameter(name) for name in names]


def _parameter(name: str) -> inspect.Parameter:
    kind: Any = scalar_type(name) or list[str]  # all flags but `stop` are scalars
    option = typer.Option(
        "--" + name.replace("_", "-"),
        help=PARAMS[name].help,
        metavar={int: "INT", float: "NUMBER", bool: None}.get(kind, "TEXT"),
        rich_help_panel="Sampling",
        show_default=False,
    )
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(
        name, keyword_only, default=None, annotation=Annotated[kind | None, option]
    )


def open_llm(settings: Settings, console: Console, *, num_requests: int) -> LLM:
    """Plans and loads a model. Prints choices and warnings of the plan to `console`.

    num_requests: the most concurrent requests; memory is reserved for these only, unless options say more.
    """
    from kvant.cli.progress import bars
    from kvant.engine.build import build_engine
    from kvant.engine.llm import LLM
    from kvant.sampling.generation_defaults import recommendation

    config = engine_config(settings, num_requests=num_requests)
    if config.task is Task.EMBED:
        raise _embeds(config.plan.model)
    with bars(console) as progress:
        built = build_engine(config, progress=progress, owns_process=True)
    if built.pooling is not None:
        raise _embeds(config.plan.model)
    llm = LLM.from_built(built)
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
        plain(console, line, "dim")
    for line in llm.warnings:
        plain(console, f"warning: {line}", "yellow")
    return llm


def _embeds(model: str) -> NotServable:
    return NotServable(
        f"{model} gives embeddings here, and this command prints text",
        why="--task embed asks for them, or the checkpoint has files of sentence-transformers",
        ways_out=(
            WayOut("generate text", ("--task", "generate")),
            WayOut("serve embeddings", ("kvant", "serve", model, "--task", "embed")),
        ),
    )


def sampling_from(said: Mapping[str, Any], otherwise: SamplingParams) -> SamplingParams:
    """Returns `otherwise` with the given flags' values. None or an empty list means not given."""
    with mendable():
        return replace(otherwise, **{k: v for k, v in said.items() if v is not None and v != []})


@contextmanager
def mendable() -> Iterator[None]:
    """Turns a RequestError into a BadValue, since the command line is wrong (exit code 2)."""
    try:
        yield
    except RequestError as fault:
        raise BadValue(str(fault)) from fault
