"""The sizes of a checkpoint's weights as planning reads them."""

from __future__ import annotations

from pathlib import Path

from kvant.kv.checkpoint.safetensors_header import read_headers
from kvant.models.weights import StoredWeights, read_stored_weights


def stored(directory: Path) -> StoredWeights:
    return read_stored_weights(directory, {}, read_headers(directory))
