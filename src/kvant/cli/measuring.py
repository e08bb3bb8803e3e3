"""Shared by commands that measure a model: options, loading the model, and results kept on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvant.cli.configured_command import ConfiguredCommand
from kvant.cli.output import readable
from kvant.cli.progress import OnProgress, bars, work
from kvant.errors import BadValue, ConfigError, NotServable, WayOut

if TYPE_CHECKING:
    from kvant.engine.llm import LLM
    from kvant.kv.request import AskedWide
    from kvant.measure.quality.kept import Kept
    from kvant.plan.plan import Plan


_FEW_TOKENS = 256
"""Tokens of the one sequence for which a measured model itself has pages."""


class MeasuringCommand(ConfiguredCommand):
    """A command that names KV formats with --kv-format, if at all. Its errors name its own options."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except ConfigError as fault:
            options = {option for param in self.params for option in param.opts}
            fault.reword("--kv-format" if "--kv-format" in options else None, options)
            raise


def refuse_ignored(ctx: typer.Context, names: Iterable[str], *, why: str) -> None:
    """Raises BadValue for an option of the command line that this measurement would ignore.

    names: of the command's parameters.
    """
    for param in ctx.command.params:
        if param.name not in names:
            continue
        source = ctx.get_parameter_source(param.name)
        if source is not None and source.name == "COMMANDLINE":
            raise BadValue(
                f"{param.opts[0]} has no effect here",
                why=why,
                ways_out=(WayOut(f"leave {param.opts[0]} out"),),
            )


ModelArgument = Annotated[str, typer.Argument(help="Directory, hub id, .gguf file, or smollm2.")]
TextFile = Annotated[
    Path | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="Text in UTF-8 or JSON lines. Default: Python's manual.",
        callback=readable,
    ),
]
RecentOption = Annotated[
    int,
    typer.Option(
        "--kv-recent-tokens", min=0, help="Last tokens that every format stores wide too."
    ),
]
SinkOption = Annotated[
    int | None,
    typer.Option(
        "--kv-sink-tokens",
        min=0,
        help="First tokens likewise. Default: 16 with --kv-recent-tokens.",
    ),
]
RecentDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--kv-recent-dtype",
        metavar="F",
        help="Format of these rows: F, K/V, or one side alone, k=F or v=F. Default: the model dtype.",
    ),
]
DtypeOption = Annotated[str, typer.Option("--dtype", metavar="D", help="Dtype to compute in.")]
OverridesOption = Annotated[
    str | None,
    typer.Option(
        "--hf-overrides",
        metavar="JSON",
        help="Values that replace those of config.json, such as a longer context with YaRN.",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Restart = Annotated[
    bool, typer.Option("--restart", help="Discard an interrupted measurement and start again.")
]


def parse_wide_rows(sink: int | None, recent: int, dtype: str | None) -> AskedWide | None:
    """Parses the three options of rows that are stored wide too. Raises UnknownName or BadValue."""
    from kvant.kv.names import parse_sides
    from kvant.kv.wide import ask_wide

    stored = None if dtype is None else parse_sides(dtype, asked_by="--kv-recent-dtype")
    return ask_wide(sink, recent, stored, asked_by=f"--kv-recent-tokens {recent}")


def measured_llm(
    model: str,
    dtype: str,
    device: str,
    *,
    attention_backend: str = "auto",
    hf_overrides: str | None = None,
    check: Callable[[Plan], None] | None = None,
) -> LLM:
    """Loads a model with few pages, since measurements build engines with pages of their own.

    check: raises ConfigError for a plan that the measurement cannot use; called before weights are loaded.
    Raises NotServable for a model without a tokenizer: measurements read text.
    """
    from rich.console import Console

    from kvant.engine.build import plan_engine
    from kvant.plan.config import config_of

    config = config_of(
        model,
        {
            "dtype": dtype,
            "device": device,
            "kv_cache_dtype": "model",
            "max_model_len": _FEW_TOKENS,
            "max_num_seqs": 1,
            "attention_backend": attention_backend,
            "hf_overrides": hf_overrides,
        },
    )
    with bars(Console(stderr=True)) as progress:
        planned = plan_engine(config, progress=progress)
        if check is not None:
            check(planned)
        from kvant.engine.llm import LLM  # it imports torch

        few = planned.bytes_for(_FEW_TOKENS)
        config = replace(config, plan=replace(config.plan, kv_cache_bytes=few))
        llm = LLM.from_config(config, progress=progress)
    if llm.tokenizing is None:
        raise NotServable(
            f"{model} has no tokenizer",
            why="this command reads text",
            ways_out=(WayOut("put the tokenizer's files into the model's directory"),),
        )
    return llm


def kept_parts(command: str, inputs: Mapping[str, object], *, restart: bool) -> Kept:
    """Returns the results that an interrupted run with equal inputs kept. restart: remove them first."""
    from kvant.measure.quality.kept import Kept
    from kvant.models.import_cache import cache_root

    root = cache_root() / command
    if restart:
        Kept(root, inputs).forget()
    kept = Kept(root, inputs)
    if len(kept):
        sys.stderr.write(f"continuing with {len(kept)} parts from an earlier run: {kept.path}\n")
    return kept


@contextmanager
def progress(kept: Kept) -> Iterator[OnProgress]:
    """Yields a function that shows progress. At the end, reports a damaged part of `kept`.

    An interruption says how much is kept and how to continue.
    """
    try:
        with work("measuring", "tokens") as tell:
            yield tell
    except KeyboardInterrupt:
        sys.stderr.write(_interrupted(kept))
        raise
    if kept.note:
        sys.stderr.write(f"{kept.note}\n")


def _interrupted(kept: Kept) -> str:
    count = len(kept)
    if not count:
        return "kvant: interrupted before the first part was measured; nothing is kept\n"
    parts = "1 part is" if count == 1 else f"{count} parts are"
    return f"kvant: interrupted; {parts} kept in {kept.path}; the same command continues\n"
