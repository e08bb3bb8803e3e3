"""`kvant plan`: what would be stored, layer by layer, who decided it, and what fits. Loads no weights."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvant.cli import options
from kvant.cli.refused import refuse_calculated_scales, refuse_tensor_parallel
from kvant.engine.planning import Plan, PlanRequest, make_plan
from kvant.errors import DoesNotFit


class Format(Enum):
    TABLE = "table"
    JSON = "json"


def plan(
    model: Annotated[str, typer.Argument(help="Directory, hub id, .gguf file, or smollm2.")],
    dtype: options.Dtype = "auto",
    kv_cache_dtype: options.KVCacheDtype = None,
    skip_layers: options.SkipLayers = None,
    rules: options.Rules = None,
    policy: options.Policy = None,
    missing_scales: options.MissingScales = "error",
    strict: options.Strict = False,
    page_size: options.PageSize = 16,
    attention_backend: options.Backend = "auto",
    batch_invariant: options.BatchInvariant = False,
    speculative_config: options.Speculative = None,
    revision: options.Revision = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="The device's memory, such as 80GiB."),
    ] = None,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option("--kv-cache-memory", metavar="SIZE", help="Give the pages exactly this much."),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", min=1, help="Tokens of one sequence.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", help="cpu, cuda, sm_80, sm_90, sm_100 or gfx942; need not be here."
        ),
    ] = "cpu",
    output: Annotated[Format, typer.Option("--format", help="table or json.")] = Format.TABLE,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the plan as .svg or .png.")
    ] = None,
    calculate_kv_scales: options.CalculateScales = False,
    tensor_parallel_size: options.TensorParallel = 1,
) -> None:
    """Show what every layer would store and who decided it; loads no weights."""
    from kvant.attention.select import parse_backend
    from kvant.engine.speculative_config import parse_speculative_config
    from kvant.kv.memory import parse_size
    from kvant.kv.names import parse_compute_dtype

    refuse_calculated_scales(calculate_kv_scales)
    refuse_tensor_parallel(tensor_parallel_size)
    request = PlanRequest(
        model=model,
        device=options.device_from(device),
        requests=options.requests_from(
            kv_cache_dtype,
            skip_layers,
            rules,
            policy,
            strict=strict,
            missing_scales=missing_scales,
        ),
        revision=revision,
        dtype=parse_compute_dtype(dtype, asked_by="--dtype"),
        backend=parse_backend(attention_backend, asked_by="--attention-backend"),
        page_size=page_size,
        batch_invariant=batch_invariant,
        max_model_len=max_model_len,
        memory_bytes=None if memory is None else parse_size(memory, asked_by="--memory"),
        kv_cache_bytes=None
        if kv_cache_memory is None
        else parse_size(kv_cache_memory, asked_by="--kv-cache-memory"),
        speculative=None
        if speculative_config is None
        else parse_speculative_config(speculative_config),
    )
    made = make_plan(request)
    if (
        made.target.weights.bytes is not None
        and device == "cpu"
        and not (memory or kv_cache_memory)
    ):
        made = make_plan(_as_on_this_machine(made))
    if output is Format.JSON:
        from kvant.engine.plan_json import plan_json

        json.dump(plan_json(made), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        from rich.console import Console

        from kvant.cli.plan_table import print_plan

        print_plan(made, Console(), command=_serve_arguments(sys.argv))
    if plot is not None:
        from kvant.cli.plan_plot import plot_plan

        plot_plan(made, plot)


def _as_on_this_machine(made: Plan) -> PlanRequest:
    """The same request with what the engine would give it here: free memory, and its share for pages."""
    from kvant.engine.budget import choose_kv_bytes
    from kvant.engine.config import default_step
    from kvant.engine.device import free_host_bytes

    free = free_host_bytes()
    request = replace(made.request, memory_bytes=free)
    with contextlib.suppress(DoesNotFit):  # then the plan itself says what is missing
        seqs, _ = default_step(request.device)
        request = replace(request, kv_cache_bytes=choose_kv_bytes(made, free, seqs))
    return request


_PLAN_ONLY = ("--memory", "--device", "--format", "--plot")


def _serve_arguments(argv: list[str]) -> list[str]:
    """What stood after `kvant plan`, less the flags that only planning has, quoted for a shell."""
    kept: list[str] = []
    words = iter(argv[argv.index("plan") + 1 :] if "plan" in argv else [])
    for word in words:
        if word in _PLAN_ONLY:
            next(words, None)
        elif word.split("=", 1)[0] not in _PLAN_ONLY:
            kept.append(shlex.quote(word))
    return kept
