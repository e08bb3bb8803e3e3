"""Read everything that a checkpoint says about its KV cache, from small files and headers alone.

Declarations come from `config.json` (at the top, or in the part that describes the text model) and
from ModelOpt's `hf_quant_config.json`; scales from the headers of the safetensors files. A wish
that cannot be read is a fact like any other, because an explicit request makes it irrelevant; a
file that cannot be read is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvant.kv.checkpoint import compressed_tensors, legacy_fp8, modelopt, quark
from kvant.kv.checkpoint.declaration import Declaration, Reader, agreed, unreadable
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.kv.checkpoint.json_file import read_json_object
from kvant.kv.checkpoint.rounding import find_rounding
from kvant.kv.checkpoint.safetensors_header import (
    INDEX_NAME,
    Header,
    find_weight_files,
)
from kvant.kv.checkpoint.scales import FoundScales, find_scales

CONFIG_NAME, MODELOPT_NAME = "config.json", "hf_quant_config.json"

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where a multimodal config keeps its text model; a thinker has a text_config of its own."""

_CONFIG_KEYS = {"quantization_config": None, "compression_config": "compressed-tensors"}
"""Keys that hold declarations, and the dialect if the key alone implies it."""

_READERS: dict[str, Reader] = {
    "compressed-tensors": compressed_tensors.read,
    "compressed_tensors": compressed_tensors.read,
    "modelopt": modelopt.read,
    "modelopt_fp4": modelopt.read,
    "modelopt_mxfp8": modelopt.read,
    "modelopt_mixed": modelopt.read,
    "quark": quark.read,
    "fp8": legacy_fp8.read,
}

_KV_KEYS = (
    "kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quantized_layers", "kv_cache_dtype",
)  # fmt: skip


def read_checkpoint(
    directory: Path, config: Mapping[str, Any], headers: Sequence[Header] | None
) -> CheckpointKV:
    """Reads what a checkpoint says about its KV cache.

    config: its config.json. headers: of its weight files, None without any. Raises BadCheckpoint, naming
    a broken file.
    """
    declared = agreed(list(_declarations(directory, config)))
    found = find_scales(headers or (), directory)
    if declared is not None:
        declared = modelopt.settle_promises(declared, found.scales)
    return CheckpointKV(
        scheme=None if declared is None else declared.scheme,
        per_layer=MappingProxyType({} if declared is None else dict(declared.per_layer)),
        scales=MappingProxyType(dict(found.scales)),
        checked=headers is not None,
        rounding=MappingProxyType(find_rounding(directory)),
        notes=tuple(_notes(directory, declared, found, headers is not None)),
        ignored=found.ignored,
    )


def _declarations(directory: Path, config: Mapping[str, Any]) -> Iterator[Declaration]:
    """Yields every declaration about the KV cache, the main config first."""
    for part, where in _config_parts(config, f"{CONFIG_NAME}: "):
        for key, dialect in _CONFIG_KEYS.items():
            if part.get(key) is not None:
                declared = _read_dialect(part[key], f"{where}{key}", dialect)
                if declared is not None:
                    yield declared
    if os.path.isfile(directory / MODELOPT_NAME):
        content = read_json_object(directory / MODELOPT_NAME)
        inner = content.get("quantization")
        if isinstance(inner, Mapping):
            declared = modelopt.read(inner, f"{MODELOPT_NAME}: quantization")
        else:
            declared = unreadable(MODELOPT_NAME, "quantization", f"it is {inner!r}, no object")
        if declared is not None:
            yield declared


def _config_parts(config: Mapping[str, Any], where: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    yield config, where
    for key in _TEXT_PARTS:
        part = config.get(key)
        if isinstance(part, Mapping):
            yield from _config_parts(part, f"{where}{key}.")


def _read_dialect(declared: Any, where: str, dialect: str | None) -> Declaration | None:
    if not isinstance(declared, Mapping):
        return unreadable(where, f"{declared!r}", "it is no object")
    inner = declared.get("quantization_config")
    if dialect is not None and isinstance(inner, Mapping):
        declared, where = inner, f"{where}.quantization_config"
    method = dialect or declared.get("quant_method") or _producer(declared)
    reader = _READERS.get(method.lower()) if isinstance(method, str) else None
    if reader is not None:
        return reader(declared, where)
    for key in _KV_KEYS:
        if declared.get(key) is not None:
            return unreadable(
                f"{where}.{key}",
                f"{declared[key]!r}",
                f"quant_method is {method!r}; Kvant reads KV declarations of {', '.join(_READERS)}",
            )
    return None


def _producer(declared: Mapping[str, Any]) -> Any:
    """Older ModelOpt exports name their producer and have no quant_method."""
    producer = declared.get("producer")
    return producer.get("name") if isinstance(producer, Mapping) else None


def _notes(
    directory: Path, declared: Declaration | None, found: FoundScales, checked: bool
) -> Iterator[str]:
    silent = declared is None or (declared.scheme is None and not declared.per_layer)
    if found.scales and silent:
        tensors = {tensor.name for tensor in found.scales.values()}
        yield legacy_fp8.scales_hint(len(tensors))
    if not checked and find_weight_files(directory).paths:
        yield f"{INDEX_NAME} is there without its files: scales are not checked"
