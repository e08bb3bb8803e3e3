"""The flags of `kvant serve` that are the engine's, on their way to the engine's process."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvant.attention.select import parse_backend
from kvant.engine.config import EngineConfig, flag_and_value, kv_requests, make_config
from kvant.engine.device import host_device
from kvant.engine.planning import DEFAULT_PAGE_SIZE, PlanRequest
from kvant.engine.speculative_config import parse_speculative_config
from kvant.kv.memory import parse_size
from kvant.kv.names import parse_compute_dtype


class EngineArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the user wrote, as text; `engine_config` gives it its types, once, in the engine's process."""

    model: str
    dtype: str = "auto"
    kv_cache_dtype: str | None = None
    skip_layers: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    policy: str | None = None
    missing_scales: str = "error"
    strict: bool = False
    page_size: int = DEFAULT_PAGE_SIZE
    attention_backend: str = "auto"
    batch_invariant: bool = False
    speculative_config: str | None = None
    revision: str | None = None
    device: str = "auto"
    kv_cache_memory: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefix_caching: bool = True
    seed: int | None = None


def engine_config(given: EngineArguments) -> EngineConfig:
    """ConfigError, naming the flag, for everything that makes no sense."""
    plan = PlanRequest(
        model=given.model,
        requests=kv_requests(
            kv_cache_dtype=given.kv_cache_dtype,
            skip_layers=given.skip_layers,
            rules=given.rules,
            policy=None if given.policy is None else Path(given.policy),
            missing_scales=given.missing_scales,
            strict=given.strict,
            label=flag_and_value,
        ),
        revision=given.revision,
        dtype=parse_compute_dtype(given.dtype, asked_by="--dtype"),
        backend=parse_backend(given.attention_backend, asked_by="--attention-backend"),
        page_size=given.page_size,
        batch_invariant=given.batch_invariant,
        max_model_len=given.max_model_len,
        kv_cache_bytes=None
        if given.kv_cache_memory is None
        else parse_size(given.kv_cache_memory, asked_by="--kv-cache-memory"),
        speculative=None
        if given.speculative_config is None
        else parse_speculative_config(given.speculative_config),
        device=host_device(given.device),
    )
    return make_config(
        plan,
        max_num_seqs=given.max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens,
        prefix_caching=given.prefix_caching,
        seed=given.seed,
    )
