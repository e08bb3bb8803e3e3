"""`python -m benchmarks.decode`: steady decode steps, one format of the KV cache after another."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Annotated

import typer

from benchmarks.command import run_command
from kvant.cli.configured import configured
from kvant.cli.output import OutFile, write_json
from kvant.kv.dtype import KVDtype
from kvant.plan.config import EngineOptions, engine_config
from kvant.plan.settings import Settings

_OWN = (
    "kv_cache_dtype", "kv_cache_memory", "max_model_len", "max_num_seqs", "enable_prefix_caching",
    "seed",
)  # fmt: skip


@configured(EngineOptions, model="--model -m", without=_OWN)
def decode(
    settings: Settings,
    stored: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-format",
            metavar="F[;RULE..]",
            help="KV cache format, layers of others behind it; may be repeated.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences.")] = 32,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of each.")] = 16384,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that are timed.")] = 50,
    profile_steps: Annotated[
        int,
        typer.Option(
            "--profile-steps",
            min=0,
            help="Further steps under torch's profiler, for the share of time in which a GPU idles.",
        ),
    ] = 0,
    out: OutFile = None,
) -> None:
    """Milliseconds a decode step of long sequences, without computing their prompts."""
    from benchmarks.device_idle import NotProfiled
    from benchmarks.steady_decode import parse_stored, steady_decode, table
    from kvant.engine.llm import LLM
    from kvant.measure.facts import command_line, measurement_facts

    wanted = stored or [
        "model",
        *(str(d) for d in (KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD)),
    ]
    for text in wanted:
        parse_stored(text)  # what is wrong is told before a model is loaded
    config = engine_config(settings, num_requests=1)
    # A pool for nothing: every format gets one of its own.
    plan = replace(config.plan, max_model_len=128, kv_cache_bytes=64 * 2**20, prefix_caching=False)
    llm = LLM.from_config(replace(config, plan=plan, seed=0))
    found = []
    for one in steady_decode(
        llm, wanted, batch=batch, context=context, steps=steps, profiled=profile_steps
    ):
        found.append(one)
        sys.stderr.write(f"{one.stored}: {one.timing.median_ms:.3f} ms a step\n")
        if isinstance(one.timing.idle, NotProfiled):
            sys.stderr.write(f"{one.stored}: idle time not measured: {one.timing.idle.why}\n")
    sys.stdout.write(table(found) + "\n")
    if out is not None:
        facts = measurement_facts(
            command_line("python -m benchmarks.decode"), ["torch", "transformers", "numpy"]
        )
        rows = [{**asdict(one), "median_ms": one.timing.median_ms} for one in found]
        write_json(out, {**facts, "rows": rows})


if __name__ == "__main__":
    run_command(decode)
