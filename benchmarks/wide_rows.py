"""Gain of wide rows of first and latest tokens for narrow formats, through Kvant's own kernels.

    python -m benchmarks.wide_rows smollm2-kv --context 1024 --context 8192 --out wide-rows.json

Every format reads the same windows of text, alone and with wide rows. Only the second half of each window
is evaluated; KL divergence is from the model's own dtype, in nats. Bits are per value of a sequence of
the window's length. They include scales and all pages with wide rows, also their unused rows.
Protective defaults of formats are off.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.command import run_command
from kvant.cli.output import OutFile, write_json
from kvant.engine.llm import LLM
from kvant.execution.runner import ModelRunner
from kvant.kv.groups import bits_per_value_at, bytes_per_token_at
from kvant.kv.names import parse_format, parse_sides
from kvant.kv.request import Asked, AskedWide, KVRequest
from kvant.kv.spec import KVPlan
from kvant.kv.wide import ask_wide
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.quality.compare import compare_windows
from kvant.measure.quality.kl_statistics import Distances, join, statistics_of
from kvant.measure.quality.texts import evaluated, read_text, windows
from kvant.plan.resolution import resolve_again

FORMATS = ("int4_per_token_head", "int4_feedback")


def wide_rows(
    model: Annotated[str, typer.Argument(help="A model, calibrated for int4_feedback.")],
    formats: Annotated[
        list[str] | None,
        typer.Option("--kv-format", metavar="F[@SINK+RECENT]", help="May name its own wide rows."),
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", metavar="SINK+RECENT", help="Wide rows; 0+0 for none."),
    ] = None,
    stored: Annotated[str, typer.Option("--kv-recent-dtype", metavar="F")] = "bfloat16",
    contexts: Annotated[list[int] | None, typer.Option("--context", min=64)] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", help="Tokens of text for each context.")
    ] = 4096,
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE")] = None,
    overrides: Annotated[
        str | None, typer.Option("--hf-overrides", metavar="JSON", help="As of kvant eval.")
    ] = None,
    out: OutFile = None,
) -> None:
    """Measure formats with and without wide rows."""
    llm = LLM(
        model,
        dtype="float32",
        kv_cache_dtype="model",
        kv_cache_memory="32MiB",
        max_model_len=256,
        hf_overrides=overrides,
    )
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    read = read_text(text, llm)
    plans: dict[tuple[str, str], KVPlan] = {}
    for asked_name in formats or FORMATS:
        name, _, own = asked_name.partition("@")
        for pair in (own,) if own else rows or ("0+0", "4+128"):
            asked = Asked(parse_format(name, asked_by="--kv-format"), "--kv-format")
            request = KVRequest((asked,), format_defaults=False, wide=_asked(pair, stored))
            plans[name, pair] = resolve_again(llm.planned, request)
    found: list[dict[str, object]] = []
    for context in contexts or (1024,):
        parts: dict[tuple[str, str], list[Distances]] = {key: [] for key in plans}
        for batch in torch.split(windows(read, llm, context, tokens), 1):
            named = {" ".join(key): plan for key, plan in plans.items()}
            compared = compare_windows(
                runner.model, llm.plan, named, batch,
                vocab_size=llm.engine.vocab_size, decode=1, on_progress=lambda _: None,
            )  # fmt: skip
            for key in plans:
                one = compared[" ".join(key)]
                seen = one.positions >= evaluated(context)[0]
                parts[key].append(_where(one.prefill, seen))
                sys.stderr.write(f"{context} {' '.join(key)}: {parts[key][-1].kl.mean():.5f}\n")
        for (name, pair), measured in parts.items():
            plan = plans[name, pair]
            found.append(
                {
                    "format": name,
                    "rows": pair,
                    "context": context,
                    "bytes_per_token": round(bytes_per_token_at(plan, context)),
                    "bits": round(bits_per_value_at(plan, context), 4),
                    **asdict(statistics_of(join(measured))),
                }
            )
    facts = measurement_facts(command_line("python -m benchmarks.wide_rows"), ("torch",))
    body = {"schema": 1, "model": model, "wide_rows_in": stored, "rows": found, **facts}
    if out is not None:
        write_json(out, body)
    else:
        sys.stdout.write(json.dumps(body) + "\n")


def _asked(pair: str, stored: str) -> AskedWide | None:
    sink, recent = (int(part) for part in pair.split("+"))
    format_ = parse_sides(stored, asked_by="--kv-recent-dtype") if recent else None
    return ask_wide(sink, recent, format_, asked_by=f"--rows {pair}")


def _where(found: Distances, chosen: object) -> Distances:
    return Distances(
        *(getattr(found, name)[chosen] for name in ("kl", "nll", "baseline_nll", "same_top"))
    )


if __name__ == "__main__":
    run_command(wide_rows)
