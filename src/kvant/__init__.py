"""Kvant: an LLM inference engine whose KV cache format is decided once, explained and honoured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvant.engine.async_llm import AsyncLLM
    from kvant.engine.llm import LLM
    from kvant.sampling.sampling_params import SamplingParams
    from kvant.sampling.structured_outputs import StructuredOutputs

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "StructuredOutputs", "__version__"]
__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "kvant.engine.async_llm",
    "LLM": "kvant.engine.llm",
    "SamplingParams": "kvant.sampling.sampling_params",
    "StructuredOutputs": "kvant.sampling.structured_outputs",
}


def __getattr__(name: str) -> Any:
    """Names of the Python API, imported on first use: `import kvant` alone loads nothing heavy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvant' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
