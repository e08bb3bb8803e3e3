"""The table of the engine's options, and the frozen configuration that is made from their values once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from kvant.attention.need import DeviceFacts
from kvant.attention.select import parse_backend
from kvant.errors import BadValue, WayOut
from kvant.kv.geometry import StateKind
from kvant.kv.memory import UTILIZATION, parse_size
from kvant.kv.names import parse_compute_dtype, parse_format, parse_one, parse_sides
from kvant.kv.offload.config import parse_offload
from kvant.kv.policy import read_policy
from kvant.kv.request import (
    Asked,
    AskedState,
    AskedWide,
    KVRequest,
    Requests,
    parse_rule,
    parse_skips,
)
from kvant.kv.transfer.config import TransferConfig, parse_transfer
from kvant.kv.wide import ask_wide
from kvant.models.overrides import parse_overrides
from kvant.models.pooling import Task
from kvant.models.quantization import Activations, Quantization
from kvant.plan.device import host_device
from kvant.plan.limits import default_num_seqs
from kvant.plan.options import Kind, option, options_of
from kvant.plan.plan import DEFAULT_PAGE_SIZE, PlanRequest
from kvant.plan.refused import refuse_calculated_scales
from kvant.plan.settings import Given, Settings, read_settings
from kvant.plan.speculative_config import parse_speculative_config
from kvant.sampling.structured_outputs import CompileLimits

DEFAULT_MODEL = "smollm2"
_kv = partial(option, panel="KV cache")
_run = partial(option, panel="Engine")
_COMPILE = CompileLimits()


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options that a plan depends on."""

    model: str = option(DEFAULT_MODEL, "Directory, hub id, .gguf file, or smollm2.")
    revision: str | None = option(None, "Branch, tag or commit of a hub model.", unset="main")
    hf_overrides: str | None = option(
        None,
        "Values that replace those of config.json, such as a longer context with YaRN; sections are merged.",
        kind=Kind.OBJECT,
        metavar="JSON",
        unset="config.json as it is",
    )
    dtype: str = option("auto", "Dtype to compute in; auto is the config's.", metavar="D")
    kv_cache_dtype: str | None = _kv(
        None,
        "Format of the KV cache: a name, K/V, auto (the checkpoint's wish) or model "
        "(the model dtype).",
        metavar="F|K/V",
        unset="auto",
    )
    kv_cache_dtype_skip_layers: tuple[str, ...] = _kv(
        (),
        "Layers that store the model dtype: 0,1,-1,4-7,re:PATTERN,sliding_window,full.",
        kind=Kind.LAYERS,
        metavar="L,..",
    )
    kv_cache_rules: tuple[str, ...] = _kv(
        (),
        "Format for some layers, such as 0-3:bf16 or full:k=fp8; repeatable.",
        flag_name="--kv-cache-rule",
        metavar="L,..:F",
    )
    kv_cache_policy: str | None = _kv(
        None, "YAML file with kv_cache_dtype, skip_layers, rules and recent_tokens.", metavar="FILE",
        unset="none",
    )  # fmt: skip
    state_dtype: str | None = _kv(
        None,
        "Format of recurrent states (linear attention, Mamba): float32, bfloat16, fp8_per_token_head or "
        "int8_per_token_head, with a scale per row.",
        metavar="F",
        unset="the checkpoint's wish, else float32",
        aliases=("mamba_ssm_cache_dtype",),
    )
    conv_state_dtype: str | None = _kv(
        None,
        "Format of the inputs that convolutions keep.",
        metavar="F",
        unset="the model dtype",
        aliases=("mamba_cache_dtype",),
    )
    state_cache_memory: str | None = _kv(
        None,
        "Most of the pages' memory for states of recurrent layers that the prefix cache continues from.",
        kind=Kind.SIZE,
        metavar="SIZE",
        unset="a state for every four of max_num_seqs, at least 8",
    )
    kv_recent_tokens: int = _kv(
        0,
        "Last tokens that attention reads wide. Their rows are stored a second time where the KV cache is "
        "narrower; 128 is a good number for 4 bits.",
        low=0,
        high=2**20,
    )
    kv_sink_tokens: int | None = _kv(
        None,
        "First tokens that attention reads wide, beside the last ones.",
        low=0,
        high=2**20,
        unset="16 with --kv-recent-tokens",
    )
    kv_recent_dtype: str | None = _kv(
        None,
        "Format of rows that are stored wide: a name of 8 bits or more, K/V, or one side alone.",
        metavar="F|K/V|k=F|v=F",
        unset="the model dtype",
    )
    kv_offload: str | None = _kv(
        None,
        "Where cached pages go that the device has no room for: host memory, then files.",
        metavar="host:SIZE[,disk:DIR:SIZE]",
        unset="they are computed again",
    )
    kv_transfer: str | None = _kv(
        None,
        "Engines that read pages of this one's host memory, and engines whose pages this one reads, over "
        "NIXL: prefill in one, decode in another.",
        metavar="give:HOST:PORT|take:HOST:PORT,..",
        unset="none",
    )
    kv_transfer_convert: str | None = _kv(
        None,
        "Formats of other engines' pages that are converted to this one's; others are refused.",
        metavar="F|K/V,..",
        unset="none",
    )
    kv_missing_scales: str = _kv(
        "error",
        "What to do if scales that the checkpoint promises are missing.",
        choices=("error", "one"),
    )
    kv_format_defaults: str = _kv(
        "on",
        "Whether a format may store the first and last layers in the model dtype, as turboquant's do.",
        choices=("on", "off"),
    )
    strict: bool = _kv(
        False,
        "Refuse a checkpoint's KV format that cannot be served, instead of using the model dtype.",
    )
    page_size: int = _kv(
        DEFAULT_PAGE_SIZE, "Tokens per page.", low=1, high=256, aliases=("block_size",)
    )
    kv_cache_memory: str | None = _kv(
        None,
        "Memory for the KV cache, such as 2GiB.",
        kind=Kind.SIZE,
        metavar="SIZE",
        unset="CPU: a quarter of free memory, or less if the requests cannot fill it",
    )
    gpu_memory_utilization: float = _kv(
        UTILIZATION,
        "Share of a GPU's memory for weights, workspaces and pages.",
        low=0.01,
        high=1.0,
    )
    attention_backend: str = option("auto", "auto, or one backend by name.", metavar="B")
    batch_invariant: bool = option(
        False,
        "Compute each answer bitwise equal alone and in any batch, with any chunking, caching or "
        "preemption; slower.",
    )
    quantization: str | None = option(
        None,
        "Round the weights of linear layers while loading; embeddings and norms stay.",
        choices=tuple(q.value for q in Quantization),
        unset="as stored",
    )
    weight_activations: str | None = option(
        None,
        "Round what narrow weights multiply: faster, less exact. int8 on CPUs, fp8 on GPUs; fp8_fast adds "
        "in fewer bits, too.",
        choices=tuple(a.value for a in Activations),
        unset="as the checkpoint declares",
    )
    speculative_config: str | None = option(
        None,
        'Drafter: {"method":"dflash","model":..,"num_speculative_tokens":..,"kv_cache_dtype":..}.',
        kind=Kind.OBJECT,
        metavar="JSON",
        unset="no drafter",
    )
    max_model_len: int | None = _run(
        None,
        "Most tokens of one sequence, prompt and answer.",
        low=1,
        unset="the model's, or what fits",
    )
    expected_length: int | None = option(
        None,
        "Tokens of a usual sequence: the plan says how many of them fit.",
        low=1,
        unset="--max-model-len",
    )
    calculate_kv_scales: bool = option(False, "Refused, with the reason.", hidden=True)
    tensor_parallel_size: int = option(
        1, "Devices that share the model, one process each.", low=1, high=64, short=("-tp",)
    )
    max_num_seqs: int | None = _run(
        None, "Most sequences that run at once.", low=1, high=2**16, unset="32 on a CPU, else 256"
    )
    max_num_batched_tokens: int | None = _run(
        None,
        "Most tokens of one step. Larger steps compute prompts faster, and running answers wait longer.",
        low=1,
        high=2**20,
        unset="512 on a CPU, else 8192 + max_num_seqs",
    )
    enable_prefix_caching: bool = _run(True, "Share pages between requests with equal beginnings.")


@dataclass(frozen=True, slots=True)
class EngineOptions(PlanOptions):
    """Options of a running engine: those of its plan, and of its process."""

    device: str = _run("auto", "auto, cpu or cuda.")
    rank_launcher: str = _run(
        "here",
        "Who starts the ranks: the engine on this machine, or torchrun on one or more.",
        choices=("here", "torchrun"),
    )
    seed: int | None = _run(None, "Seed for requests that have none.", unset="random")
    load_format: str = _run(
        "auto",
        "auto reads the weights; dummy makes random ones for timings, from a config.json alone.",
        choices=("auto", "dummy"),
    )
    task: str = _run(
        "auto",
        "embed gives embeddings instead of text; auto embeds with a checkpoint of sentence-transformers.",
        choices=tuple(Task),
    )
    structured_timeout: float = _run(
        _COMPILE.seconds, "Seconds that compiling a schema, regex or grammar may take.", low=0.1
    )
    structured_cache_bytes: int = _run(
        _COMPILE.cached_bytes, "Bytes of schemas, regexes and grammars that stay compiled.", low=0
    )


ENGINE_OPTIONS = options_of(EngineOptions)


class LLMOptions(TypedDict, total=False):
    """Names and types of the options as Python arguments, for type checkers; see `EngineOptions`."""

    revision: str | None
    hf_overrides: str | Mapping[str, Any] | None
    dtype: str | None
    kv_cache_dtype: str | None
    kv_cache_dtype_skip_layers: str | Sequence[int | str] | None
    kv_cache_rules: str | Sequence[str] | None
    kv_cache_policy: str | Path | None
    state_dtype: str | None
    mamba_ssm_cache_dtype: str | None
    conv_state_dtype: str | None
    mamba_cache_dtype: str | None
    state_cache_memory: int | str | None
    kv_recent_tokens: int | None
    kv_sink_tokens: int | None
    kv_recent_dtype: str | None
    kv_offload: str | None
    kv_transfer: str | None
    kv_transfer_convert: str | None
    kv_missing_scales: str | None
    kv_format_defaults: str | None
    strict: bool | None
    page_size: int | None
    block_size: int | None
    kv_cache_memory: int | str | None
    attention_backend: str | None
    batch_invariant: bool | None
    quantization: str | None
    weight_activations: str | None
    speculative_config: str | Mapping[str, Any] | None
    max_model_len: int | None
    expected_length: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    enable_prefix_caching: bool | None
    device: str | None
    rank_launcher: str | None
    seed: int | None
    load_format: str | None
    task: str | None
    structured_timeout: float | None
    structured_cache_bytes: int | None
    gpu_memory_utilization: float | None
    tensor_parallel_size: int | None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine's whole configuration. plan: the request for its plan. seed: of the generator that gives
    seeds to requests without one; None draws it. dummy_weights: make random weights instead of reading them,
    for timings. settings: the option values that all of this was made from; other ranks rebuild it from
    them. task: whether to generate or to embed.
    """

    plan: PlanRequest
    seed: int | None = None
    dummy_weights: bool = False
    compile_limits: CompileLimits = field(default_factory=CompileLimits)
    settings: Settings = field(default_factory=Settings)
    task: Task = Task.AUTO


def engine_config(settings: Settings, *, num_requests: int | None = None) -> EngineConfig:
    """Builds an engine's configuration. Raises ConfigError, naming the source of a wrong value.

    num_requests: the most requests that there will be, if known. It limits max_num_seqs, and so the memory
    of the pages, unless max_num_seqs is set.
    """
    options = settings.build(EngineOptions)
    device = host_device(options.device, asked_by=_by(settings, "device"))
    seqs = options.max_num_seqs
    if seqs is None and num_requests is not None:
        seqs = min(default_num_seqs(device), num_requests)
    return EngineConfig(
        replace(plan_request(settings, device), max_num_seqs=seqs),
        options.seed,
        options.load_format == "dummy",
        CompileLimits(options.structured_timeout, options.structured_cache_bytes),
        settings,
        Task(options.task),
    )


def config_of(model: str | Path | None, options: LLMOptions) -> EngineConfig:
    """Builds a configuration from arguments, else variables, else defaults. None means not given."""
    given: dict[str, object] = {"model": model, **options}
    settings = read_settings(
        ENGINE_OPTIONS, given=given, by=lambda option: f"{option.name}=", environ=os.environ
    )
    return engine_config(settings)


def plan_request(settings: Settings, device: DeviceFacts) -> PlanRequest:
    """Builds the typed request for a plan. Format names are parsed here and nowhere later."""
    options = settings.build(PlanOptions)
    refuse_calculated_scales(options.calculate_kv_scales)
    memory, draft = options.kv_cache_memory, options.speculative_config
    return PlanRequest(
        model=options.model,
        device=device,
        requests=_kv_requests(settings, options),
        revision=options.revision,
        overrides=None
        if options.hf_overrides is None
        else parse_overrides(options.hf_overrides, asked_by=_by(settings, "hf_overrides")),
        dtype=parse_compute_dtype(options.dtype, asked_by=_by(settings, "dtype")),
        backend=parse_backend(
            options.attention_backend, asked_by=_by(settings, "attention_backend")
        ),
        page_size=options.page_size,
        max_model_len=options.max_model_len,
        expected_length=options.expected_length,
        kv_cache_bytes=None
        if memory is None
        else parse_size(memory, asked_by=_by(settings, "kv_cache_memory")),
        state_cache_bytes=None
        if options.state_cache_memory is None
        else parse_size(options.state_cache_memory, asked_by=_by(settings, "state_cache_memory")),
        offload=None
        if options.kv_offload is None
        else parse_offload(options.kv_offload, asked_by=_by(settings, "kv_offload")),
        transfer=_transfer(settings, options),
        speculative=None
        if draft is None
        else parse_speculative_config(draft, asked_by=_by(settings, "speculative_config")),
        memory_utilization=options.gpu_memory_utilization,
        batch_invariant=options.batch_invariant,
        quantization=None if options.quantization is None else Quantization(options.quantization),
        activations=None
        if options.weight_activations is None
        else Activations(options.weight_activations),
        tensor_parallel_size=options.tensor_parallel_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        prefix_caching=options.enable_prefix_caching,
    )


def _kv_requests(settings: Settings, options: PlanOptions) -> Requests:
    """Builds the requests for the KV cache from all sources of formats; the policy file is the weakest."""
    asked = tuple(_asked(given) for given in settings.given.get("kv_cache_dtype", ()))
    found = Requests(
        target=KVRequest(
            explicit=asked,
            strict=options.strict,
            missing_scales_as_one=options.kv_missing_scales == "one",
            format_defaults=options.kv_format_defaults == "on",
            states=(
                *_asked_states(settings, "state_dtype", StateKind.RECURRENT),
                *_asked_states(settings, "conv_state_dtype", StateKind.CONV),
            ),
            wide=_asked_wide(settings, options),
        )
    )
    for text, by in _items(settings, "kv_cache_dtype_skip_layers"):
        found = found.merged(parse_skips(text, asked_by=by))
    for text, by in _items(settings, "kv_cache_rules"):
        found = found.merged(parse_rule(text, asked_by=by))
    if options.kv_cache_policy is None:
        return found
    policy = read_policy(Path(options.kv_cache_policy))
    if settings.get("kv_recent_tokens") is not None:  # the option decides, also where it is 0
        policy = replace(policy, target=replace(policy.target, wide=None, wide_rules=()))
    return found.merged(policy)


def _asked(given: Given) -> Asked:
    by = given.label(given.value)
    return Asked(parse_format(str(given.value), asked_by=by), by)


def _asked_wide(settings: Settings, options: PlanOptions) -> AskedWide | None:
    """Returns the request for wide rows, or None. Its source is the first of its options that was given."""
    names = ("kv_recent_tokens", "kv_sink_tokens", "kv_recent_dtype")
    given = next((found for name in names if (found := settings.get(name)) is not None), None)
    if given is None:
        return None
    stored = options.kv_recent_dtype
    return ask_wide(
        options.kv_sink_tokens,
        options.kv_recent_tokens,
        None if stored is None else parse_sides(stored, asked_by=_by(settings, "kv_recent_dtype")),
        asked_by=given.label(given.value),
    )


def _asked_states(settings: Settings, name: str, kind: StateKind) -> tuple[AskedState, ...]:
    """Returns the requested formats of states from every source, the strongest source first."""
    found = []
    for given in settings.given.get(name, ()):
        by = given.label(given.value)
        found.append(AskedState(kind, parse_one(str(given.value), asked_by=by), by))
    return tuple(found)


def _items(settings: Settings, name: str) -> list[tuple[str, str]]:
    """Returns each item of a list option, and the item with its source for messages."""
    given = settings.get(name)
    if given is None:
        return []
    assert isinstance(given.value, tuple)
    return [(text, given.label(text)) for text in given.value]


def _transfer(settings: Settings, options: PlanOptions) -> TransferConfig | None:
    convert = options.kv_transfer_convert
    if options.kv_transfer is None:
        if convert is not None:
            raise BadValue(
                f"{_by(settings, 'kv_transfer_convert')}: no engine's pages are converted",
                why="none are taken without --kv-transfer",
                ways_out=(WayOut("name the engine: --kv-transfer take:HOST:PORT"),),
            )
        return None
    return parse_transfer(options.kv_transfer, convert, asked_by=_by(settings, "kv_transfer"))


def _by(settings: Settings, name: str) -> str:
    """Returns the source of an option's value for messages; for a default, the option's flag."""
    given = settings.get(name)
    return "--" + name.replace("_", "-") if given is None else given.by.removesuffix("=")
