"""The tensors of a layer in each dialect of narrow weights: names, dtypes and shapes. No torch.

Layouts come from compressed-tensors 0.20, AutoAWQ, AutoGPTQ, ModelOpt and DeepSeek's checkpoints. Shapes are
[N, K]: outputs, inputs. G: inputs of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvant.errors import BadCheckpoint, WayOut
from kvant.kv.checkpoint.json_file import COMPARE_CONFIG, COPY_AGAIN
from kvant.weights.format import WHOLE, Dialect, Scheme, block_type

_FLOATS = ("F32", "F16", "BF16")


class Role(Enum):
    """What the numbers of a layer's tensor are."""

    CODES = "codes"
    SCALES = "scales"
    FACTORS = "factors of scales"
    ZERO_POINTS = "zero points"
    INPUT_SCALES = "scales of activations"
    ORDER = "order of inputs"
    SHAPES = "shapes"


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a layer: its allowed dtypes, as safetensors names them, and its allowed shapes.

    ways_out: what an error about this tensor suggests.
    """

    role: Role
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    optional: bool = False
    ways_out: tuple[WayOut, ...] = ()

    @property
    def is_scale(self) -> bool:
        """Whether `check_scales` must accept its numbers."""
        return self.role in (Role.SCALES, Role.FACTORS, Role.INPUT_SCALES)


EXACT_INPUTS = WayOut("take 16-bit activations", ("--weight-activations", "exact"))
"""The way out of broken scales of activations."""

IN_ORDER = WayOut("take a checkpoint without act-order, or one that is whole")
"""The way out of a broken order of inputs."""

_WHOLE: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
"""Shapes of a tensor with one number."""


def parts_of(scheme: Scheme, rows: int, columns: int) -> dict[str, Part]:
    """Returns the tensors of a layer [rows, columns] in a dialect, by their name after the layer's."""
    found = _parts_of_weight(scheme, rows, columns)
    if scheme.rounds_inputs:
        ways = (EXACT_INPUTS,)
        found[scheme.input_scale] = Part(Role.INPUT_SCALES, _FLOATS, _WHOLE, ways_out=ways)
    return found


def _parts_of_weight(scheme: Scheme, rows: int, columns: int) -> dict[str, Part]:
    fmt, dialect = scheme.format, scheme.dialect
    whole = _WHOLE
    down, along = fmt.blocks(rows, columns)
    shared = whole
    if (fmt.rows, fmt.columns) == (1, WHOLE):
        shared = ((rows, 1), (rows,))
    elif fmt.rows != WHOLE:
        shared = ((down, along),)
    scale = Part(Role.SCALES, _FLOATS, shared)
    one = Part(Role.FACTORS, _FLOATS, whole)
    codes = Part(Role.CODES, ("F8_E4M3",), ((rows, columns),))
    if dialect is Dialect.GGUF:
        return {"weight": Part(Role.CODES, ("U8",), ((rows, block_type(fmt).row_bytes(columns)),))}
    if dialect is Dialect.FP8:
        return {"weight": codes, "weight_scale_inv": scale}
    if dialect in (Dialect.FLOAT_QUANTIZED, Dialect.MODELOPT_FP8):
        return {"weight": codes, "weight_scale": scale}
    if dialect is Dialect.INT_QUANTIZED:
        found = {"weight": Part(Role.CODES, ("I8",), ((rows, columns),)), "weight_scale": scale}
        if fmt.zero_points:
            found["weight_zero_point"] = Part(Role.ZERO_POINTS, ("I8",), shared)
        return found
    if dialect in (Dialect.NVFP4_PACK, Dialect.MXFP4_PACK, Dialect.MODELOPT_NVFP4):
        packed = Part(Role.CODES, ("U8",), ((rows, columns // 2),))
        if dialect is Dialect.MXFP4_PACK:
            return {"weight_packed": packed, "weight_scale": Part(Role.SCALES, ("U8",), shared)}
        scale = Part(Role.SCALES, ("F8_E4M3",), shared)
        if dialect is Dialect.NVFP4_PACK:
            return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": one}
        return {"weight": packed, "weight_scale": scale, "weight_scale_2": one}
    if dialect is Dialect.PACK_QUANTIZED:
        words, zero_words = (-(-count * scheme.bits // 32) for count in (columns, rows))
        found = {
            "weight_packed": Part(Role.CODES, ("I32",), ((rows, words),)),
            "weight_scale": scale,
            "weight_shape": Part(Role.SHAPES, ("I64", "I32"), ((2,),), optional=True),
        }
        if fmt.columns != WHOLE:
            found["weight_g_idx"] = _order(scheme, columns)
        if fmt.zero_points:
            found["weight_zero_point"] = Part(Role.ZERO_POINTS, ("I32",), ((zero_words, along),))
        return found
    group = Part(Role.SCALES, _FLOATS, ((along, rows),))
    zeros = Part(Role.ZERO_POINTS, ("I32",), ((along, rows // 8),), optional=not fmt.zero_points)
    if dialect is Dialect.AWQ:
        return {
            "qweight": Part(Role.CODES, ("I32",), ((columns, rows // 8),)),
            "scales": group,
            "qzeros": zeros,
        }
    return {
        "qweight": Part(Role.CODES, ("I32",), ((columns // 8, rows),)), "scales": group, "qzeros": zeros,
        "g_idx": _order(scheme, columns),
    }  # fmt: skip


def _order(scheme: Scheme, columns: int) -> Part:
    ways = (IN_ORDER,) if scheme.reordered else ()
    return Part(Role.ORDER, ("I32",), ((columns,),), optional=not scheme.reordered, ways_out=ways)


def scale_fault(
    name: str,
    *,
    is_finite: bool,
    is_positive: bool = True,
    small: bool = False,
    ways_out: tuple[WayOut, ...] = (),
) -> BadCheckpoint | None:
    """Returns the error of a tensor of scales. small: 8-bit floats, of which 0 is a scale."""
    if is_finite and is_positive:
        return None
    what, why = f"{name} holds NaN or infinite scales", "its numbers would be NaN"
    if is_finite:
        what = f"{name} holds scales that are {'' if small else 'zero or '}negative"
        why = "whole blocks would be lost or change their signs"
    return BadCheckpoint(what, why=why, ways_out=(*ways_out, COPY_AGAIN))


def expert_parts(scheme: Scheme, count: int, rows: int, columns: int) -> dict[str, Part]:
    """Returns the tensors of `count` experts' matrices [rows, columns] that a dialect stores together."""
    assert scheme.dialect is Dialect.MXFP4_EXPERTS
    groups = columns // scheme.format.columns
    return {
        "blocks": Part(Role.CODES, ("U8",), ((count, rows, groups, 16),)),
        "scales": Part(Role.SCALES, ("U8",), ((count, rows, groups),)),
    }


def check_part(name: str, part: Part, dtype: str | None, shape: tuple[int, ...] | None) -> None:
    """Raises BadCheckpoint, naming the tensor, if its dtype or shape is wrong or it is missing."""
    if dtype is None or shape is None:
        if part.optional:
            return
        raise BadCheckpoint(
            f"the tensor {name} is missing",
            why="its layer needs it",
            ways_out=(*part.ways_out, COPY_AGAIN),
        )
    if shape not in part.shapes:
        fits = " or ".join(str(list(one)) for one in part.shapes)
        raise BadCheckpoint(
            f"{name} has the shape {list(shape)}",
            why=f"its layer needs {fits}",
            ways_out=(*part.ways_out, COMPARE_CONFIG),
        )
    if dtype not in part.dtypes:
        raise BadCheckpoint(
            f"{name} has the dtype {dtype}",
            why=f"its dialect stores {' or '.join(part.dtypes)}",
            ways_out=(*part.ways_out, COMPARE_CONFIG),
        )
