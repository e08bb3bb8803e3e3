"""Flags of the commands that run a model, and how they become an engine and sampling parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvant.cli import options
from kvant.errors import BadValue, RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from kvant.engine.llm import LLM
    from kvant.engine.sampling_params import SamplingParams

RUN_PANEL = "Engine"
SAMPLING_PANEL = "Sampling"
DEFAULT_MODEL = "smollm2"

KVMemory = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-memory",
        metavar="SIZE",
        help="Memory of the KV cache, such as 2GiB. Default on a CPU: a quarter of what is free, "
        "or less where less can be used.",
        rich_help_panel=options.KV_PANEL,
    ),
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Share pages between requests that begin alike.",
        rich_help_panel=RUN_PANEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        min=1,
        help="Tokens of one sequence, prompt and answer. Default: the model's, or what fits.",
        rich_help_panel=RUN_PANEL,
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        "--max-num-seqs", min=1, help="Requests that run at once.", rich_help_panel=RUN_PANEL
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens", min=1, help="Tokens of one step.", rich_help_panel=RUN_PANEL
    ),
]
Device = Annotated[
    str,
    typer.Option("--device", help="auto, cpu or cuda.", rich_help_panel=RUN_PANEL),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        help="0 takes the likeliest token.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", help="Only the k likeliest.", rich_help_panel=SAMPLING_PANEL),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        help="Only the likeliest that reach this share.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        help="Only those this fraction as likely as the likeliest.",
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


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """The flags as they came, except those of sampling."""

    model: str
    dtype: str
    kv_cache_dtype: str | None
    skip_layers: Sequence[str] | None
    rules: Sequence[str] | None
    policy: Path | None
    missing_scales: str
    strict: bool
    page_size: int
    attention_backend: str
    batch_invariant: bool
    revision: str | None
    kv_cache_memory: str | None
    prefix_caching: bool
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    device: str


def open_llm(flags: ModelFlags, console: Console, *, num_requests: int) -> LLM:
    """Plan and load. What was chosen, and every warning of the plan, goes to `console`.

    num_requests: how many there will be at once; no memory is taken for more unless flags ask for it.
    """
    from kvant.attention.select import parse_backend
    from kvant.cli.progress import bars
    from kvant.engine.config import default_step, make_config
    from kvant.engine.device import host_device
    from kvant.engine.llm import LLM
    from kvant.engine.planning import PlanRequest
    from kvant.kv.memory import parse_size
    from kvant.kv.names import parse_compute_dtype

    memory = flags.kv_cache_memory
    request = PlanRequest(
        model=flags.model,
        requests=options.requests_from(
            flags.kv_cache_dtype,
            flags.skip_layers,
            flags.rules,
            flags.policy,
            strict=flags.strict,
            missing_scales=flags.missing_scales,
        ),
        revision=flags.revision,
        dtype=parse_compute_dtype(flags.dtype, asked_by="--dtype"),
        backend=parse_backend(flags.attention_backend, asked_by="--attention-backend"),
        page_size=flags.page_size,
        batch_invariant=flags.batch_invariant,
        max_model_len=flags.max_model_len,
        kv_cache_bytes=None if memory is None else parse_size(memory, asked_by="--kv-cache-memory"),
        device=host_device(flags.device),
    )
    most_seqs = min(num_requests, default_step(request.device)[0])
    config = make_config(
        request,
        max_num_seqs=most_seqs if flags.max_num_seqs is None else flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        prefix_caching=flags.prefix_caching,
    )
    with bars(console) as progress:
        llm = LLM.from_config(config, progress=progress)
    for line in llm.notes:
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    for line in llm.planned.warnings:
        console.print(
            f"warning: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True
        )
    return llm


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """None where a flag was not given."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    max_tokens: int
    stop: Sequence[str] | None = None
    ignore_eos: bool = False


def sampling_from(flags: SamplingFlags, model_path: Path | None) -> SamplingParams:
    """Flags, and for what is not given what the model recommends; greedy without a model_path."""
    from kvant.engine.generation_defaults import SamplingDefaults, read_defaults
    from kvant.engine.sampling_params import SamplingParams

    # A temperature of one's own ends the recommendation: its other numbers belong to its temperature.
    use_model = model_path is not None and flags.temperature is None
    said = read_defaults(model_path) if use_model and model_path else SamplingDefaults()
    with mendable():
        return SamplingParams(
            temperature=said.temperature if flags.temperature is None else flags.temperature,
            top_k=said.top_k if flags.top_k is None else flags.top_k,
            top_p=said.top_p if flags.top_p is None else flags.top_p,
            min_p=said.min_p if flags.min_p is None else flags.min_p,
            seed=flags.seed,
            max_tokens=flags.max_tokens,
            stop=tuple(flags.stop or ()),
            ignore_eos=flags.ignore_eos,
        )


@contextmanager
def mendable() -> Iterator[None]:
    """Inside a command a wrong request is the command line's fault: exit code 2."""
    try:
        yield
    except RequestError as fault:
        raise BadValue(str(fault)) from fault
