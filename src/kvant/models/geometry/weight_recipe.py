"""Computes the bytes of quantised matrices in a checkpoint from its `quantization_config`.

Scales are counted too: they are up to an eighth of a 4-bit matrix. Matrices that a recipe does not name
keep the model's dtype, and so do embeddings, norms and, in almost all recipes, the head. For a recipe
whose bytes Kvant cannot compute, the result is a `NoRecipe` with the reason.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint
from kvant.models.geometry.fields import MAX_WIDTH, Fields, shown
from kvant.models.geometry.parameters import Weight, WeightKind
from kvant.models.geometry.weight_methods import COMPRESSED_TENSORS
from kvant.models.geometry.weight_names import (
    OF_TRANSFORMERS,
    by_precedence,
    exceptions,
    gptq_left_alone,
    names_chosen,
    names_left_alone,
)

MatrixBytes = Callable[[int, int], int]
"""Bytes of a matrix of rows x columns (out x in features), scales included."""

_QUANTISED = (WeightKind.LINEAR, WeightKind.EXPERT)
_F32 = 4
_F16 = 2
_WITHOUT_FP8 = ("sm_75", "sm_80", "sm_86", "sm_87")


@dataclass(frozen=True, slots=True)
class NoRecipe:
    """The reason why stored bytes cannot be counted."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Group:
    """Modules (by name, or None for all) and the bytes of their matrices."""

    chosen: Callable[[str], bool] | None
    matrix: MatrixBytes


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which matrices are quantised, and to how many bytes."""

    groups: tuple[_Group, ...]
    left_alone: Callable[[str], bool]
    kinds: tuple[WeightKind, ...] = _QUANTISED

    def stored_bytes(self, weight: Weight) -> int | None:
        """Returns the bytes of a weight in the checkpoint, or None if it keeps the model's dtype."""
        if weight.kind not in self.kinds or self.left_alone(weight.name):
            return None
        for group in self.groups:
            if group.chosen is None or group.chosen(weight.name):
                return weight.copies * group.matrix(weight.rows, weight.columns)
        return None


def read_recipe(config: Mapping[str, Any]) -> Recipe | NoRecipe | None:
    """Returns the recipe in `quantization_config`; None for weights in the model's dtype."""
    try:
        fields = Fields(config).inside("quantization_config")
        if fields is None:
            return None
        method = fields.text("quant_method")
        reader = _READERS.get(method or "")
        if reader is None:
            return NoRecipe(f"no closed form for weights quantised by {shown(method)}")
        return reader(fields)
    except (BadCheckpoint, re.error) as fault:
        # Weights are only one line of the plan; the loader refuses an unknown recipe.
        what = fault.what if isinstance(fault, BadCheckpoint) else str(fault)
        return NoRecipe(f"the weights' quantization_config cannot be read: {what}")


def are_decoded(config: Mapping[str, Any], device: DeviceFacts) -> bool:
    """Returns whether the checkpoint's codes are decoded to the compute dtype at load.

    compressed-tensors' (`quantized.decode_weights`) and GGUF's blocks always are. transformers decodes
    fp8 on devices without fp8 products, and mxfp4 without its separate kernel package.
    """
    declared = config.get("quantization_config")
    method = declared.get("quant_method") if isinstance(declared, Mapping) else None
    on_cpu = device.kind is DeviceKind.CPU
    return (
        isinstance(config.get("gguf_types"), Mapping)
        or method in COMPRESSED_TENSORS
        or (method == "fp8" and (on_cpu or device.arch in _WITHOUT_FP8))
        or (method == "mxfp4" and (on_cpu or importlib.util.find_spec("kernels") is None))
    )


def _fp8(fields: Fields) -> Recipe | NoRecipe:
    """Returns one byte per number; a float32 scale per block (DeepSeek) or per matrix."""
    block = fields.integers("weight_block_size", least=1)
    if block is not None and len(block) != 2:
        return NoRecipe(f"weight_block_size {shown(block)} is not two numbers")
    rows, columns = block or (MAX_WIDTH, MAX_WIDTH)
    return _whole(fields, _coded(8, rows, columns, _F32), *OF_TRANSFORMERS)


def _mxfp4(fields: Fields) -> Recipe:
    """Experts only: 4 bits per number, a one-byte scale per 32 (OCP Microscaling Formats 1.0)."""
    return Recipe(
        (_Group(None, _coded(4, 1, 32, 1)),),
        names_chosen(fields.words("modules_to_not_convert") or ()),
        (WeightKind.EXPERT,),
    )


def _gptq(fields: Fields) -> Recipe:
    """Packed integers, a float16 scale and a packed zero point per group, an index per column."""

    def matrix(of: Fields) -> MatrixBytes:
        bits, group = _bits(of, "bits"), _group_size(of, "group_size")
        codes = _coded(bits, 1, group, _F16, zero_bits=bits)
        return lambda rows, columns: codes(rows, columns) + 4 * columns

    own = [_Group(chosen, matrix(of)) for chosen, of in exceptions(fields) if of is not None]
    return Recipe((*own, _Group(None, matrix(fields))), gptq_left_alone(fields))


def _awq(fields: Fields) -> Recipe:
    """Packed integers, a float16 scale and a packed zero point per group."""
    bits, group = _bits(fields, "bits", "w_bit"), _group_size(fields, "group_size", "q_group_size")
    return _whole(fields, _coded(bits, 1, group, _F16, zero_bits=bits), "modules_to_not_convert")


def _modelopt(fields: Fields) -> Recipe | NoRecipe | None:
    algorithm = fields.text("quant_algo")
    if algorithm is None:
        return None  # it describes the KV cache alone
    if algorithm == "FP8":
        matrix = _coded(8, MAX_WIDTH, MAX_WIDTH, _F32)
    elif algorithm == "NVFP4":
        matrix = _nvfp4(fields.optional_integer("group_size") or 16)
    else:
        return NoRecipe(f"no closed form for weights of ModelOpt's {shown(algorithm)}")
    return _whole(fields, matrix, "ignore", "exclude_modules")


def _compressed_tensors(fields: Fields) -> Recipe | NoRecipe | None:
    if is_sparse(fields):
        return NoRecipe("no closed form for sparse weights")
    found: list[tuple[tuple[str, ...], MatrixBytes]] = []
    for group, weights, layout in linear_groups(fields):
        matrix = _scheme(weights, layout)
        if isinstance(matrix, NoRecipe):
            return matrix
        found.append((group.words("targets") or (), matrix))
    if not found:
        return None  # it describes the KV cache alone
    groups = tuple(_Group(chosen, matrix) for chosen, matrix in by_precedence(found))
    return Recipe(groups, names_chosen(fields.words("ignore") or ()))


def is_sparse(fields: Fields) -> bool:
    """Returns whether compressed-tensors omitted weights that are zero."""
    sparse = fields.inside("sparsity_config")
    return sparse is not None and sparse.text("format") not in (None, "dense")


def linear_groups(fields: Fields) -> Iterator[tuple[Fields, Fields, str]]:
    """Yields compressed-tensors' groups that have weights: the group, its `weights` and its layout."""
    listed = fields.inside("config_groups")
    for name in () if listed is None else listed.names():
        assert listed is not None
        group = listed.inside(name)
        weights = None if group is None else arguments(group, "weights")
        if group is not None and weights is not None:
            yield group, weights, group.text("format") or fields.text("format") or ""


def arguments(group: Fields, name: str) -> Fields | None:
    """Returns a group's `weights` or `input_activations`, with compressed-tensors' values for missing fields.

    The strategy is that of the group size: -1 means a scale per output, and none a scale per matrix.
    """
    said = group.inside(name)
    if said is None:
        return None
    size = said.optional_integer("group_size", least=-1)
    strategy = "tensor" if size is None else "channel" if size < 0 else "group"
    return group.inside(name, {"num_bits": 8, "type": "int", "strategy": strategy})


def _scheme(weights: Fields, layout: str) -> MatrixBytes | NoRecipe:
    """Reads one `weights` entry of compressed-tensors: type, bits and places of scales."""
    bits, kind = _bits(weights, "num_bits"), weights.text("type")
    strategy = weights.text("strategy")
    if kind == "float" and bits == 4:
        if "nvfp4" in layout:
            return _nvfp4(weights.optional_integer("group_size") or 16)
        if "mxfp4" in layout:
            return _coded(4, 1, 32, 1)
        return NoRecipe(f"no closed form for 4-bit floats in format {shown(layout)}")
    zero_bits = 0 if weights.flag("symmetric", True) else bits
    if strategy == "block":
        block = weights.integers("block_structure", least=1) or ()
        if len(block) != 2:
            return NoRecipe("weights in blocks without block_structure")
        return _coded(bits, block[0], block[1], _F32)
    blocks = {
        "tensor": (MAX_WIDTH, MAX_WIDTH),
        "channel": (1, MAX_WIDTH),
        "group": (1, weights.optional_integer("group_size") or 128),
    }
    if strategy not in blocks:
        return NoRecipe(f"no closed form for weight scales of strategy {shown(strategy)}")
    rows, columns = blocks[strategy]
    return _coded(bits, rows, columns, _F16, zero_bits=zero_bits)


_READERS: Mapping[str, Callable[[Fields], Recipe | NoRecipe | None]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    **dict.fromkeys(COMPRESSED_TENSORS, _compressed_tensors),
}


def _coded(
    bits: int, block_rows: int, block_columns: int, scale_bytes: int, *, zero_bits: int = 0
) -> MatrixBytes:
    """Codes of `bits` each, and a scale (and zero point) per block of rows x columns."""

    def matrix(rows: int, columns: int) -> int:
        blocks = -(-rows // block_rows) * -(-columns // block_columns)
        return -(-rows * columns * bits // 8) + blocks * scale_bytes + -(-blocks * zero_bits // 8)

    return matrix


def _nvfp4(group: int) -> MatrixBytes:
    """4 bits per number, an e4m3 scale per group, two float32 numbers per matrix."""
    codes = _coded(4, 1, group, 1)
    return lambda rows, columns: codes(rows, columns) + 2 * _F32


def _whole(fields: Fields, matrix: MatrixBytes, *lists: str) -> Recipe:
    """Returns a recipe for all matrices except the head and the names in `lists`."""
    return Recipe((_Group(None, matrix),), names_left_alone(fields, lists))


def _bits(fields: Fields, *names: str) -> int:
    return fields.integer(*names, most=16)


def _group_size(fields: Fields, *names: str) -> int:
    """Reads the group size; -1 means one group as long as the row."""
    size = fields.optional_integer(*names, least=-1) or 128
    return MAX_WIDTH if size < 0 else size
