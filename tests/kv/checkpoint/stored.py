"""A checkpoint's KV declarations and the sizes of its weights, read as planning reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvant.kv.checkpoint import read
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.kv.checkpoint.json_file import read_json_object
from kvant.kv.checkpoint.safetensors_header import read_headers
from kvant.models.weights import StoredWeights, read_stored_weights


def stored(directory: Path) -> StoredWeights:
    return read_stored_weights(directory, {}, read_headers(directory))


def read_checkpoint(directory: Path, config: Mapping[str, Any] | None = None) -> CheckpointKV:
    if config is None:
        config = read_json_object(directory / "config.json")
    return read.read_checkpoint(directory, config, read_headers(directory))
