"""Reads in which order a layer's inputs are grouped, and refuses orders that are none."""

from __future__ import annotations

import numpy as np
from numpy import int64
from numpy.typing import NDArray

from kvant.errors import BadCheckpoint, WayOut
from kvant.kv.checkpoint.json_file import COPY_AGAIN
from kvant.weights.format import Dialect, Scheme
from kvant.weights.parts import IN_ORDER


def input_order(name: str, index: NDArray[int64], scheme: Scheme) -> NDArray[int64] | None:
    """Returns inputs sorted by their groups, [K], from the group of each input, [K]; None if they are sorted.

    -1 for all inputs says that they are: compressed-tensors writes it where nothing was reordered. Raises
    BadCheckpoint, naming the tensor, for other numbers of groups, for groups of other sizes, and for an order
    that the checkpoint does not declare.
    """
    size, count = scheme.format.columns, len(index) // scheme.format.columns
    if np.array_equal(index, np.arange(len(index)) // size) or (index == -1).all():
        return None
    if not scheme.reordered:
        declaration = '"actorder": "group"'
        if scheme.dialect is not Dialect.PACK_QUANTIZED:
            declaration = '"desc_act": true'
        raise BadCheckpoint(
            f"{name} reorders the inputs (act-order)",
            why="the quantization_config declares that their groups are neighbours",
            ways_out=(WayOut(f"if they are reordered, declare {declaration} there"),),
        )
    strange = index[(index < 0) | (index >= count)]
    if len(strange):
        raise BadCheckpoint(
            f"{name} names the group {strange[0]}",
            why=f"{len(index)} inputs have {count} groups of {size}, counted from 0",
            ways_out=(IN_ORDER, COPY_AGAIN),
        )
    sizes = np.bincount(index, minlength=count)
    if (sizes != size).any():
        other = int((sizes != size).argmax())
        raise BadCheckpoint(
            f"{name} gives {sizes[other]} inputs to the group {other}",
            why=f"each group has {size}",
            ways_out=(IN_ORDER, COPY_AGAIN),
        )
    return np.argsort(index, kind="stable")
