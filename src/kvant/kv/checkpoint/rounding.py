"""Matrices that keys are rounded with: `kvant calibrate` writes them, and formats with feedback need them.

    kvant-key-rounding.safetensors     <attention module>.k_feedback, float32 [num_kv_heads, D, D]

A file of its own that no index names, because other readers of the checkpoint do not know such tensors.
Each matrix is strictly upper triangular: element i takes over entry [j, i] of element j's error.
"""

from __future__ import annotations

from pathlib import Path

from kvant.errors import KV_FORMAT, BadCheckpoint, WayOut
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.kv.checkpoint.lookup import same_layer
from kvant.kv.checkpoint.safetensors_header import read_header
from kvant.kv.dtype import PAIR_NAMES, KVDtype
from kvant.kv.format import Side
from kvant.kv.geometry import LayerGeometry
from kvant.kv.spec import Scale, ScaleState, ScaleTensor

FILE_NAME = "kvant-key-rounding.safetensors"
SUFFIX = ".k_feedback"


def find_rounding(directory: Path) -> dict[str, ScaleTensor]:
    """Returns a checkpoint's matrices by attention module, without values.

    Raises BadCheckpoint for a broken file.
    """
    path = directory / FILE_NAME
    if not path.is_file():
        return {}
    return {
        name.removesuffix(SUFFIX): ScaleTensor(
            name, FILE_NAME, entry.shape, entry.dtype, name.removesuffix(SUFFIX), Side.K
        )
        for name, entry in read_header(path).tensors.items()
        if name.endswith(SUFFIX)
    }


def audit_rounding(
    layer: LayerGeometry, side: Side, dtype: KVDtype, checkpoint: CheckpointKV
) -> Scale:
    """Returns where one layer's matrices come from.

    Raises BadCheckpoint if there are none, or of another shape.
    """
    _, plain = PAIR_NAMES[str(dtype)]  # the same bytes, without matrices
    if side is not Side.K:
        raise BadCheckpoint(
            f"{dtype} was asked for values of layer {layer.index}",
            why="it rounds keys by the queries that read them, and values have none",
            ways_out=(WayOut("store values rotated", (KV_FORMAT, f"{dtype}/{plain}")),),
        )
    found = [t for name, t in checkpoint.rounding.items() if same_layer(name, layer.name)]
    if not found:
        raise BadCheckpoint(
            f"{dtype} needs the rounding matrices of layer {layer.index} ({layer.name})",
            why=f"the checkpoint has no {FILE_NAME}, which kvant calibrate writes",
            ways_out=(
                WayOut(
                    "measure them, and use that checkpoint",
                    ("kvant", "calibrate", "MODEL", "--save", "DIR"),
                ),
                WayOut("round without them", (KV_FORMAT, str(plain))),
            ),
        )
    (tensor, *rivals), size = found, layer.head_dim_k
    wanted = (layer.num_kv_heads, size, size)
    if rivals or tensor.dtype != "F32" or tensor.shape != wanted:
        raise BadCheckpoint(
            f"{tensor.name} in {tensor.file} cannot be used",
            why="another tensor claims to be the same"
            if rivals
            else f"it is {tensor.dtype} {list(tensor.shape)}, not F32 {list(wanted)}",
            ways_out=(
                WayOut("measure them again", ("kvant", "calibrate", "MODEL", "--save", "DIR")),
            ),
        )
    return Scale(ScaleState.FOUND, tensor, because=f"checkpoint's {tensor.name}")
