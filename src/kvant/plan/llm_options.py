"""Options of the engine as Python keyword arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from kvant.plan.config import ENGINE_OPTIONS, EngineConfig, engine_config
from kvant.plan.settings import read_settings


class LLMOptions(TypedDict, total=False):
    """Names and types of the options, for type checkers. `EngineOptions` describes them."""

    revision: str | None
    dtype: str | None
    kv_cache_dtype: str | None
    kv_cache_dtype_skip_layers: str | Sequence[int | str] | None
    kv_cache_rules: str | Sequence[str] | None
    kv_cache_policy: str | Path | None
    kv_missing_scales: str | None
    kv_format_defaults: str | None
    strict: bool | None
    page_size: int | None
    block_size: int | None
    kv_cache_memory: int | str | None
    attention_backend: str | None
    batch_invariant: bool | None
    quantization: str | None
    speculative_config: str | Mapping[str, Any] | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    enable_prefix_caching: bool | None
    device: str | None
    seed: int | None
    load_format: str | None
    structured_timeout: float | None
    structured_cache_bytes: int | None
    gpu_memory_utilization: float | None


def config_of(model: str | Path | None, options: LLMOptions) -> EngineConfig:
    """The configuration of arguments, else variables, else defaults. None means not given."""
    given: dict[str, object] = {"model": model, **options}
    settings = read_settings(
        ENGINE_OPTIONS, given=given, by=lambda option: f"{option.name}=", environ=os.environ
    )
    return engine_config(settings)
