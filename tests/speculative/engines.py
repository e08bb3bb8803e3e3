"""Engines of the tiny pair, with and without speculation, in float64."""

from __future__ import annotations

from typing import Any

from kvant.engine.llm import LLM
from tests.speculative.pair import Pair


def make_llm(pair: Pair, *, plain: bool = False, **options: Any) -> LLM:
    """Keys of the speculative configuration are taken out of `options`, the rest is LLM's."""
    keys = ("num_speculative_tokens", "draft_kv", "adaptive", "method")
    asked = {key: options.pop(key) for key in keys if key in options}
    config: dict[str, Any] = {"method": "dflash", "adaptive": False, **asked}
    if config["method"] == "dflash":
        config["model"] = str(pair.draft)
    if (draft_kv := config.pop("draft_kv", None)) is not None:
        config["kv_cache_dtype"] = draft_kv
    given = {"dtype": "float64", "kv_cache_memory": "4MB", "seed": 0, **options}
    return LLM(pair.target, speculative_config=None if plain else config, **given)
