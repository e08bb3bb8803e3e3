"""`kvant eval`: measures the loss of quality of each KV cache format on a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvant.cli import eval_answers
from kvant.cli.measuring import (
    DeviceOption,
    DtypeOption,
    ModelArgument,
    OverridesOption,
    RecentDtypeOption,
    RecentOption,
    Restart,
    SinkOption,
    TextFile,
    kept_parts,
    measured_llm,
    parse_wide_rows,
    progress,
    refuse_ignored,
)
from kvant.cli.output import (
    Format,
    FormatOption,
    OutFile,
    figure_table,
    readable,
    writable,
    write_result,
)
from kvant.errors import BadValue, WayOut
from kvant.plan.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.console import Console

    from kvant.engine.llm import LLM
    from kvant.measure.quality.evaluate import Extent

CONTEXTS = (512, 2048, 8192, 32768)
QUICK_CONTEXTS = (512, 2048)
LEAST_NEEDLE_TOKENS = 256


_OF_DISTRIBUTIONS = (
    "states", "text", "contexts", "tokens", "layer_format", "quick", "speculative_config",
)  # fmt: skip
_OF_ANSWERS = ("samples", "answer_tokens", "temperature", "top_p")


def evaluate(
    ctx: typer.Context,
    model: ModelArgument = DEFAULT_MODEL,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-format",
            metavar="F",
            help="KV cache format; may be repeated. Default: all that this machine serves.",
        ),
    ] = None,
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state-dtype",
            metavar="F",
            help="Format of recurrent states; may be repeated. Each is measured with the baseline's K and V, "
            "and with every --kv-format.",
        ),
    ] = None,
    baseline: Annotated[
        str, typer.Option("--baseline", metavar="F", help="Format to compare with.")
    ] = "model",
    text: TextFile = None,
    contexts: Annotated[
        list[int] | None,
        typer.Option(
            "--context",
            metavar="INT",
            min=64,
            help="Tokens of a window; may be repeated. Default: 512, 2048, 8192 and 32768, up to the "
            "model's limit.",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=64, help="Tokens of text for each context.")
    ] = 8192,
    recent: RecentOption = 0,
    sink: SinkOption = None,
    recent_format: RecentDtypeOption = None,
    layer_format: Annotated[
        str | None,
        typer.Option(
            "--layer-format",
            metavar="F",
            help="Format that one layer at a time stores alone. Default: the narrowest.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Less text: some minutes on two cores for a small model."),
    ] = False,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            "--speculative-config",
            metavar="JSON",
            help="Drafter, as of kvant serve: how many of its drafts each format accepts.",
        ),
    ] = None,
    long_reasoning: Annotated[
        Path | None,
        typer.Option(
            "--long-reasoning",
            metavar="FILE",
            help="Answer the problems of this file of JSON lines instead, and judge answers by exact match.",
            callback=readable,
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Answers to each problem.")] = 4,
    answer_tokens: Annotated[
        int, typer.Option("--answer-tokens", min=1, help="Most tokens of an answer.")
    ] = 1024,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="Temperature of answers.")
    ] = 0.6,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus of answers.")] = 0.95,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            metavar="TASK,..",
            help="Run these tasks of lm-eval instead, against a server in each format.",
        ),
    ] = None,
    include: Annotated[
        Path | None,
        typer.Option(
            "--include-path",
            metavar="DIR",
            help="Directory with YAML files of tasks, such as tasks over local data.",
        ),
    ] = None,
    lm_eval: Annotated[
        Path | None,
        typer.Option(
            "--lm-eval",
            metavar="COMMAND",
            help="Where lm_eval is. Default: beside Kvant, or on PATH.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Most problems or documents of a task.")
    ] = None,
    overrides: OverridesOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    attention_backend: Annotated[
        str, typer.Option("--attention-backend", metavar="B", help="auto, or one by name.")
    ] = "auto",
    restart: Restart = False,
    output: FormatOption = Format.TABLE,
    page: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write one page with tables and plots.",
            callback=writable,
        ),
    ] = None,
    out: OutFile = None,
) -> None:
    """Measure what KV cache formats cost in quality.

    The baseline is the model's own dtype. The model reads a text through its paged cache in every format.
    Each position's distribution is compared with the baseline's: KL divergence, most likely token,
    perplexity. Definitions are those of llama.cpp's --kl-divergence. The same command continues an
    interrupted evaluation. With --long-reasoning or --tasks the model answers problems instead, in the
    baseline and in each --kv-format.
    """
    from kvant.engine.process import wait_without_spinning

    wait_without_spinning()  # before torch is imported
    from kvant.kv.names import parse_format, parse_one, whole_formats
    from kvant.measure.facts import command_line, measurement_facts
    from kvant.measure.quality.evaluate import Evaluation, choose_contenders, run_parts
    from kvant.measure.quality.lm_eval import find_command
    from kvant.measure.quality.page import page as render
    from kvant.measure.quality.report import report
    from kvant.measure.quality.texts import check_length, read_text
    from kvant.plan.speculative_config import parse_speculative_config

    _check_mode(ctx, long_reasoning, tasks, page)
    named = [parse_format(name, asked_by="--kv-format") for name in formats or ()]
    of_states = [parse_one(name, asked_by="--state-dtype") for name in states or ()]
    wide = parse_format(baseline, asked_by="--baseline")
    layered = (
        None if layer_format is None else parse_format(layer_format, asked_by="--layer-format")
    )
    rows = parse_wide_rows(sink, recent, recent_format)
    if speculative_config is not None:
        parse_speculative_config(speculative_config)
    harness = find_command(lm_eval) if tasks else None  # refused before a model is loaded
    llm = measured_llm(
        model, dtype, device, attention_backend=attention_backend, hf_overrides=overrides
    )
    packages = ("torch", "transformers", "numpy")
    if long_reasoning is not None:
        from kvant.measure.quality.reasoning import Sampling

        found = eval_answers.long_reasoning(
            llm, long_reasoning, wide, named, rows, Sampling(samples, answer_tokens, temperature, top_p),
            limit, restart=restart,
        )  # fmt: skip
        found |= measurement_facts(command_line("kvant"), packages)
        write_result(found, output, out, lambda: eval_answers.print_reasoning(found))
        return
    if tasks and harness is not None:
        found = eval_answers.tasks(
            llm, model, wide, named, rows, [name for one in tasks for name in one.split(",")],
            command=harness, include=include, limit=limit, dtype=dtype, device=device,
            attention_backend=attention_backend, overrides=overrides,
        )  # fmt: skip
        found |= measurement_facts(command_line("kvant"), packages)
        write_result(found, output, out, lambda: eval_answers.print_tasks(found))
        return
    extent = _extent(llm, contexts, tokens, quick=quick)
    read = read_text(text, llm)
    check_length(read, extent.contexts, extent.tokens)
    chosen = choose_contenders(
        llm, wide, named or (() if of_states else whole_formats()), layered, named=bool(named or of_states),
        rows=rows, states=of_states,
    )  # fmt: skip
    evaluation = Evaluation(llm, chosen, read, extent, speculative_config, baseline)
    kept = kept_parts("eval", evaluation.inputs(), restart=restart)
    with progress(kept) as on_progress:
        parts = run_parts(evaluation.parts(), kept, on_progress)
    facts = measurement_facts(command_line("kvant"), packages)
    found = {**report(evaluation, parts), **facts}
    if page is not None:
        page.write_text(render(found), encoding="utf-8")
    write_result(found, output, out, lambda: print_tables(found))
    kept.forget()


def _check_mode(
    ctx: typer.Context, long_reasoning: Path | None, tasks: list[str] | None, page: Path | None
) -> None:
    """Raises BadValue for options that one measurement cannot serve together, or would ignore."""
    if long_reasoning is not None and tasks:
        raise BadValue(
            "--long-reasoning and --tasks are two measurements",
            why="one judges answers to a local file, the other runs lm-eval",
            ways_out=(WayOut("run kvant eval twice"),),
        )
    if page is not None and (long_reasoning is not None or tasks):
        raise BadValue(
            f"--html {page} has no plots of right answers",
            why="it draws KL divergences",
            ways_out=(WayOut("write the scores as JSON", ("--out", "FILE")),),
        )
    if long_reasoning is not None or tasks:
        refuse_ignored(ctx, _OF_DISTRIBUTIONS, why="answers are judged here, not distributions")
    else:
        refuse_ignored(ctx, ("limit",), why="it limits --long-reasoning and --tasks")
    if long_reasoning is None:
        refuse_ignored(ctx, _OF_ANSWERS, why="only --long-reasoning draws such answers")
    if tasks:
        refuse_ignored(ctx, ("restart",), why="lm-eval keeps no parts to go on from")
    else:
        refuse_ignored(ctx, ("include", "lm_eval"), why="it belongs to --tasks")


def _extent(llm: LLM, contexts: list[int] | None, tokens: int, *, quick: bool) -> Extent:
    """Returns how much to measure. Raises BadValue for a context beyond the model's positions."""
    from kvant.measure.quality.evaluate import Extent

    longest = llm.planned.target.geometry.max_model_len
    usual = QUICK_CONTEXTS if quick else CONTEXTS
    fitting = [c for c in usual if longest is None or c <= longest]
    wanted = tuple(sorted(set(contexts or fitting or [longest or usual[0]])))
    if longest is not None and wanted[-1] > longest:
        raise BadValue(
            f"--context {wanted[-1]} is longer than the model's positions reach",
            why=f"they end at {longest}",
            ways_out=(
                WayOut("take the longest context", ("--context", str(longest))),
                WayOut("give it more positions, such as with YaRN", ("--hf-overrides", "JSON")),
            ),
        )
    short = wanted[0]
    if quick:
        return Extent(wanted, 1024, 16, min(512, short), min(256, short), 2, 64, ())
    needles = tuple(c for c in wanted if c >= LEAST_NEEDLE_TOKENS)
    return Extent(wanted, tokens, 64, short, short, 8, 256, needles)


def print_tables(found: dict[str, Any]) -> None:
    """Prints a report of `kvant.measure.quality.report` as tables of at most 80 columns."""
    from rich.console import Console

    console = Console()
    formats = found["formats"]
    quality = {
        name: (
            f"{one['bytes_per_token']:,}",
            f"{one['kld_mean']:.5f}±{one['kld_mean_error']:.5f}",
            f"{one['same_top']:.1%}",
            f"{one['ppl_ratio']:.4f}±{one['ppl_ratio_error']:.4f}",
        )
        for name, one in formats.items()
    }
    _table(console, ("B/token", "mean KL", "same top", "PPL ratio"), quality)
    floor, longest = found["noise_floor"]["kld_mean"], found["contexts"][-1]
    console.print(
        f"[dim]against {found['baseline']}, windows of {longest} tokens, second half of each; KL in nats; "
        f"±: standard error; noise floor {floor:.1e}\n"
        f"best for their bytes: {'; '.join(found['pareto'])}[/]\n"
    )
    keys = ("kld_median", "kld_p99", "kld_p999", "kld_max")
    tails = {name: [f"{one[key]:.5f}" for key in keys] for name, one in formats.items()}
    titles = ["median KL", "99 %", "99.9 %", "max"]
    if any("bytes_per_sequence" in one for one in formats.values()):
        titles.append("B of states")
        for name, cells in tails.items():
            cells.append(f"{formats[name]['bytes_per_sequence']:,}")
    _table(console, titles, tails)
    if len(found["contexts"]) > 1:
        by_context = {
            name: [f"{one['contexts'][str(c)]['kld_mean']:.5f}" for c in found["contexts"]]
            for name, one in formats.items()
        }
        _table(console, [f"KL at {context:,}" for context in found["contexts"]], by_context)
    paths = {
        name: (
            f"{one['decode']['kld_mean']:.5f}",
            _cell(one, "k_alone"),
            _cell(one, "v_alone"),
            f"{one['generation']['same']:.0%}" if "generation" in one else "-",
            f"{one['decode']['tokens_per_second']:.1f}",
        )
        for name, one in formats.items()
    }
    _table(console, ("decode KL", "K alone", "V alone", "same text", "tokens/s"), paths)
    if "baseline_acceptance_length" in found:
        lengths = {
            found["baseline"]: [f"{found['baseline_acceptance_length']:.2f}"],
            **{name: [f"{one['acceptance_length']:.2f}"] for name, one in formats.items()},
        }
        _table(console, ["tokens a step with drafts"], lengths)
    if "baseline_needles" in found:
        needles = {
            name: [f"{n['found']} of {n['of']}" for n in one.values()]
            for name, one in {
                found["baseline"]: found["baseline_needles"],
                **{name: one["needles"] for name, one in formats.items()},
            }.items()
        }
        _table(console, [f"needles at {c}" for c in found["baseline_needles"]], needles)
    for name, why in found["refused"].items():
        console.print(f"[dim]not measured: {name}: {why}[/]")


def _table(console: Console, titles: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    table = figure_table("format", titles)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
    console.print()


def _cell(one: dict[str, Any], key: str) -> str:
    return f"{one[key]:.5f}" if key in one else "-"
