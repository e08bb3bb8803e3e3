"""`kvant tune`: finds a KV format for each layer and side under a budget, and writes a policy file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvant.cli.measuring import (
    DeviceOption,
    DtypeOption,
    ModelArgument,
    Restart,
    SinkOption,
    TextFile,
    kept_parts,
    measured_llm,
    parse_wide_rows,
    progress,
)
from kvant.cli.output import Format, FormatOption, OutFile, figure_table, writable, write_result
from kvant.errors import BadValue, WayOut
from kvant.measure.tuning.costs import Costs
from kvant.plan.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from kvant.kv.dtype import KVDtype
    from kvant.kv.format import Side
    from kvant.kv.request import AskedWide
    from kvant.measure.tuning.tune import Tuned
    from kvant.plan.plan import Plan

RECENT = (48, 112, 176, 240, 368, 496, 752, 1008)
"""Numbers of last tokens that layers may store wide by default. With 16 first ones they fill pages of 16."""
_SHORTEST = 1024
"""Tokens of the shortest sequence for which some are a choice by default."""

_BITS = re.compile(r"(\d+(?:\.\d+)?)\s*(?:bits?)?")


def tune(
    model: ModelArgument = DEFAULT_MODEL,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="BITS",
            help="Most bits per value, scales included, such as 4.5bits.",
        ),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            "--max-kl",
            min=0.0,
            metavar="NATS",
            help="Greatest mean KL divergence on held-out text.",
        ),
    ] = None,
    text: TextFile = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Write the policy, for --kv-cache-policy.",
            callback=writable,
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-format",
            metavar="F",
            help="Format to choose from, or a pair K/V; may be repeated. Default: all that this machine "
            "serves.",
        ),
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            "--beside",
            metavar="F",
            help="Uniform format to verify beside the policy; may be repeated. Default: all.",
        ),
    ] = None,
    recent: Annotated[
        list[int] | None,
        typer.Option(
            "--kv-recent-tokens",
            metavar="INT",
            min=0,
            help="Last tokens that a layer may store wide too; may be repeated, 0 for none. Default: 0, and "
            "48 to 1008 in sequences of 1024 tokens or more, at most an eighth of them and half a window.",
        ),
    ] = None,
    sink: SinkOption = None,
    recent_formats: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-recent-dtype",
            metavar="F",
            help="Format of these rows; may be repeated. Default: the model dtype.",
        ),
    ] = None,
    context: Annotated[int, typer.Option("--context", min=64, help="Tokens of a window.")] = 512,
    tokens: Annotated[
        int, typer.Option("--tokens", min=64, help="Tokens to measure each choice on.")
    ] = 512,
    verify_tokens: Annotated[
        int, typer.Option("--verify-tokens", min=64, help="Tokens of held-out text.")
    ] = 4096,
    verify_context: Annotated[
        int | None,
        typer.Option(
            "--verify-context",
            min=64,
            help="Tokens of the sequence whose bytes count, and of a window of held-out text. Default: "
            "--context.",
        ),
    ] = None,
    costs: Annotated[
        Costs,
        typer.Option(
            "--costs",
            help="Where costs of single layers come from: readings, or estimates from gradients, on a CPU.",
        ),
    ] = Costs.MEASURED,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    restart: Restart = False,
    output: FormatOption = Format.TABLE,
    out: OutFile = None,
) -> None:
    """Choose KV formats per layer, for keys and values apart.

    The budget is one of bytes or of KL divergence. Every format is measured on each layer and side alone,
    by the kernels that serve it. The search is exact for the sum of these costs. The policy is then
    compared with uniform formats on text that was held out. The same command continues an interrupted
    tuning.
    """
    from kvant.engine.process import wait_without_spinning

    bits = _budget(budget, max_kl)
    wait_without_spinning()  # before torch is imported
    from kvant.kv.names import parse_format
    from kvant.measure.facts import command_line, measurement_facts
    from kvant.measure.tuning.checks import check_tunable, rows_to_choose

    candidates = _formats(formats)
    uniform = [parse_format(name, asked_by="--beside") for name in beside or ()]
    rows = _rows(recent, sink, recent_formats, verify_context or context, context)
    named = recent is not None

    def check(planned: Plan) -> None:
        check_tunable(planned, costs)
        rows_to_choose(planned, rows, named=named)

    llm = measured_llm(model, dtype, device, check=check)
    from kvant.measure.quality.kept import measured_by
    from kvant.measure.quality.texts import read_text
    from kvant.measure.tuning.policy_file import policy_text, report
    from kvant.measure.tuning.tune import Tuner, divide_text

    rows = rows_to_choose(llm.planned, rows, named=named)
    read = read_text(text, llm)
    lesson = divide_text(read, llm, context, tokens, verify_tokens, verify_context)
    inputs = {
        "tune": 1,
        **measured_by(llm),
        "formats": [f"{side} {dtype}" for side, dtype in candidates],
        "windows": [ids.tolist() for ids in (lesson.measured, lesson.whole, lesson.held_out)],
        "rows": [one and [one.sink, one.recent, str(one.format)] for one in rows],
    }
    kept = kept_parts("tune", inputs, restart=restart)
    with progress(kept) as on_progress:
        tuner = Tuner(llm, lesson, candidates, kept, on_progress, uniform, rows, costs)
        tuned = (
            tuner.for_kl(max_kl)
            if bits is None and max_kl is not None
            else tuner.for_bits(bits or 0)
        )
    target, command = llm.planned.target, command_line("kvant")
    body = {
        **report(tuned, target.geometry, target.local.name),
        **measurement_facts(command, ("torch", "transformers", "numpy")),
    }
    if save is not None:
        written = policy_text(tuned, target.geometry, target.local.name, command)
        save.write_text(written, encoding="utf-8")
    write_result(body, output, out, lambda: _print(tuned, body, save))


def _budget(budget: str | None, max_kl: float | None) -> float | None:
    """Returns the bits per value, None with --max-kl. Raises BadValue unless exactly one flag is given."""
    if (budget is None) is (max_kl is None):
        raise BadValue(
            "kvant tune takes one of --budget and --max-kl",
            why="the other one is what it finds",
            ways_out=(WayOut("take the bytes of 4 bits with scales", ("--budget", "4.5bits")),),
        )
    if budget is None:
        return None
    found = _BITS.fullmatch(budget.strip())
    if found is None or float(found[1]) <= 0:
        raise BadValue(f"--budget {budget!r} is no number of bits", why="write 4.5bits, say")
    return float(found[1])


def _rows(
    recent: Sequence[int] | None,
    sink: int | None,
    formats: Sequence[str] | None,
    length: int,
    context: int,
) -> list[AskedWide | None]:
    """Returns what a layer may store wide too. Raises BadValue for more rows than a window has.

    length: tokens of the sequence whose bytes count. context: of the windows that measure one layer.
    """
    from kvant.kv.wide import SINK_TOKENS

    first = SINK_TOKENS if sink is None else sink
    most = min(length // 8, context // 2) if length >= _SHORTEST else 0
    usual = (0, *(n for n in RECENT if n + first <= most))
    counts = usual if recent is None else tuple(recent)
    if max(counts) + first >= context:
        raise BadValue(
            f"--kv-recent-tokens {max(counts)} leaves no narrow rows in windows of {context} tokens",
            why="the cost of narrow rows is measured there",
            ways_out=(
                WayOut("read longer windows", ("--context", str(4 * (max(counts) + first)))),
            ),
        )
    if not any(counts):
        parse_wide_rows(sink, 0, formats[0] if formats else None)  # refuses options of no rows
    found: dict[AskedWide | None, None] = {}
    for count in counts:
        stored: Sequence[str | None] = (formats if count else None) or [None]
        for name in stored:
            found[parse_wide_rows(first if count else None, count, name)] = None
    return list(found)


def _formats(names: Sequence[str] | None) -> list[tuple[Side, KVDtype]]:
    """Returns the storage formats of keys and of values in a list of names."""
    from kvant.kv.dtype import KVDtype
    from kvant.kv.format import Side
    from kvant.kv.names import parse_format

    found: dict[tuple[Side, KVDtype], None] = {}
    for name in names or ():
        one = parse_format(name, asked_by="--kv-format")
        for side, dtype in ((Side.K, one.k), (Side.V, one.v)):
            if not isinstance(dtype, KVDtype):
                raise BadValue(
                    f"--kv-format {name} is no storage format",
                    why="the model dtype is always among the choices",
                )
            found[side, dtype] = None
    return list(found)


def _print(tuned: Tuned, body: dict[str, Any], save: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvant.kv.format import Side
    from kvant.kv.groups import depends_on_length
    from kvant.measure.tuning.policy_file import explain, name_of
    from kvant.measure.tuning.tune import described

    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    wide = tuned.plan.has_wide_rows
    for title in ("layer", "K", "V", *(("rows",) if wide else ())):
        table.add_column(title, no_wrap=True)
    for index, stored in sorted(tuned.chosen.chosen.items()):
        rows = (described(stored.rows),) if wide else ()
        table.add_row(str(index), *(name_of(tuned, index, side) for side in Side), *rows)
    console.print(table)
    console.print()
    dearest = max(
        tuned.options, key=lambda place: max(option.kl for option in tuned.options[place])
    )
    said = f"{dearest[1].value.upper()} of layer {dearest[0]}: {explain(tuned.options[dearest])}"
    console.print(f"most sensitive: {said}", markup=False, soft_wrap=True)
    console.print()
    if tuned.costs is Costs.GRADIENTS:
        console.print(
            "[dim]costs of single layers are estimates from gradients, scaled to measured sums[/]"
        )
    avoided = tuned.avoided
    if avoided is not None:
        console.print(
            f"[dim]{avoided.side.value.upper()} in {avoided.dtype} is avoided: on the measured text the "
            f"policy loses {avoided.kl:.5f} nats without it and {avoided.kl_with:.5f} with it[/]",
            soft_wrap=True,
        )
    figures = figure_table("stored as", ("B/token", "bits", "mean KL", "99 %", "same top"))
    best = tuned.best_uniform
    for one in (tuned.policy, *sorted(tuned.uniform, key=lambda u: u.bytes_per_token)):
        f = one.figures
        figures.add_row(
            "this policy" if one is tuned.policy else one.name,
            f"{one.bytes_per_token:,}",
            f"{one.bits:.2f}",
            f"{f.kld_mean:.5f}±{f.kld_mean_error:.5f}",
            f"{f.kld_p99:.4f}",
            f"{f.same_top:.1%}",
            style="bold" if one in (tuned.policy, best) else "",
        )
    console.print(figures)
    console.print(
        f"[dim]{body['model']} on {tuned.policy.figures.positions:,} positions that were held out; uniform "
        "formats without their wide ends; KL in nats[/]"
    )
    if depends_on_length(tuned.plan, tuned.length):
        console.print(f"[dim]bytes are those of a sequence of {tuned.length:,} tokens[/]")
    narrow, equal = tuned.best_without_rows, tuned.as_good
    for other, which in (
        (best, ""),
        (narrow if narrow is not best else None, " without wide rows"),
    ):
        if other is not None and other.figures.kld_mean > 0:
            share = tuned.policy.figures.kld_mean / other.figures.kld_mean
            console.print(
                f"{share:.2f} times the KL divergence of {other.name} ({other.bytes_per_token:,} B/token), "
                f"the best of these formats{which} within the policy's bytes"
            )
    if equal is not None:
        fewer = 1 - tuned.policy.bytes_per_token / equal.bytes_per_token
        console.print(
            f"{abs(fewer):.0%} {'fewer' if fewer >= 0 else 'more'} bytes than {equal.name}, the smallest of "
            "these formats that loses no more"
        )
    if save is None:
        console.print("[dim]nothing is written; --save FILE writes the policy[/]")
    else:
        console.print(f"use it: --kv-cache-policy {save}", markup=False, soft_wrap=True)
