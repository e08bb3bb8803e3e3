"""Reads the matrices with which a plan rounds keys; `kvant.kv.checkpoint.rounding` finds them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.rounding import FILE_NAME
from kvant.kv.checkpoint.safetensors_header import read_header
from kvant.kv.spec import KVPlan, ScaleTensor


def read_rounding(directory: Path, plan: KVPlan) -> dict[int, npt.NDArray[np.float32]]:
    """Returns the matrices that a plan uses, by layer index: [num_kv_heads, head_dim, head_dim].

    Raises BadCheckpoint, naming the tensor, for values not finite, or not 0 on or below the diagonal.
    """
    wanted: Mapping[int, ScaleTensor] = {
        layer.geometry.index: layer.k.scale.tensor
        for layer in plan.layers
        if layer.k is not None
        and layer.k.dtype.format.takes_rounding
        and layer.k.scale.tensor is not None
    }
    if not wanted:
        return {}
    path = directory / FILE_NAME
    header, data = read_header(path), path.read_bytes()
    found = {}
    for index, tensor in wanted.items():
        entry = header.tensors.get(tensor.name)
        if entry is None or entry.shape != tensor.shape:
            raise BadCheckpoint(
                f"{tensor.name} in {path} changed", why="its shape differs from the plan"
            )
        count = math.prod(entry.shape)
        values = np.frombuffer(data, "<f4", count, entry.begin).reshape(entry.shape).copy()
        if not np.isfinite(values).all() or np.tril(values).any():
            raise BadCheckpoint(
                f"{tensor.name} in {path} is no rounding matrix",
                why="its numbers must be finite, and 0 on the diagonal and below it",
            )
        found[index] = values
    return found
