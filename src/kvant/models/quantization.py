"""Defines how weights are rounded while they are loaded (`--quantization`): methods, formats and bytes.

Needs no torch, since plans use it. On a GPU the formats are those of `kvant.weights`; on a CPU
`kvant.models.cpu.weights` defines the layout of codes and scales.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import NotServable, WayOut
from kvant.kv.dtype import ComputeDtype
from kvant.models.geometry.parameters import Weight, WeightKind
from kvant.weights.format import FP8_CHANNEL, INT8_CHANNEL, WeightFormat, int4_groups

_CPU_GROUP = 32
_GROUPS = (128, 64, 32)


class Quantization(Enum):
    """How weights of linear layers are rounded. Norms and embeddings are not.

    The head is int8: fp8 loses more there than in all layers. Several ranks do not round theirs.
    """

    FP8 = "fp8"  # e4m3, a scale for each output
    FP8_DYNAMIC = (
        "fp8_dynamic"  # weights as in FP8; in steps of many rows activations too, by token
    )
    INT8 = "int8"  # a scale for each output
    INT4 = "int4"  # on a GPU scale and zero point for 128 weights, on a CPU scale and offset for 32

    @property
    def rounds_activations(self) -> bool:
        return self is Quantization.FP8_DYNAMIC

    def cpu_row_bytes(self, columns: int, *, is_head: bool) -> int:
        """Returns the bytes of one output's codes and scales on a CPU."""
        if self is Quantization.INT4 and not is_head:
            return columns // 2 + 4 * (columns // _CPU_GROUP)
        return columns + 4


class Activations(Enum):
    """How `--weight-activations` rounds the activations of products with narrow weights."""

    INT8 = "int8"  # on a CPU: -127..127 and a scale for 32 numbers
    FP8 = "fp8"  # on a GPU, in steps of many tokens: e4m3, a scale per token or per 128 numbers
    FP8_FAST = (
        "fp8_fast"  # like FP8 by token, and tensor cores add products in fewer bits than float32
    )
    FP8_STATIC = "fp8_static"  # like FP8, with the checkpoint's scale for each layer
    EXACT = "exact"  # 16 bits, even if a checkpoint declares a rounding

    @property
    def is_fp8(self) -> bool:
        return self in (Activations.FP8, Activations.FP8_FAST, Activations.FP8_STATIC)


def format_of(asked: Quantization, columns: int, *, is_head: bool = False) -> WeightFormat:
    """Returns a weight's format on a GPU. Raises NotServable if no group size divides its `columns`."""
    if asked is Quantization.INT8 or is_head:
        return INT8_CHANNEL
    if asked in (Quantization.FP8, Quantization.FP8_DYNAMIC):
        return FP8_CHANNEL
    group = next((size for size in _GROUPS if columns % size == 0), None)
    if group is None:
        raise NotServable(
            f"--quantization {asked.value} cannot round a weight with {columns} inputs",
            why=f"its groups have {_GROUPS[-1]} inputs or more",
            ways_out=(WayOut("take 8 bits", ("--quantization", Quantization.INT8.value)),),
        )
    return int4_groups(group, zero_points=True)


def check_quantization(asked: Quantization, device: DeviceFacts, compute: ComputeDtype) -> None:
    """Raises NotServable, with ways out, if no kernel multiplies with such weights.

    `kvant.models.select` checks whether a forward runs the model with them.
    """
    flag = f"--quantization {asked.value}"
    without = WayOut("run without --quantization")
    if device.kind is DeviceKind.ROCM:
        raise NotServable(
            f"{flag} runs on NVIDIA GPUs and on CPUs",
            why="there are no kernels for such weights on this device",
            ways_out=(without, WayOut("run on the CPU", ("--device", "cpu"))),
        )
    if device.kind is DeviceKind.CUDA:
        if asked.rounds_activations and compute is not ComputeDtype.BFLOAT16:
            raise NotServable(
                f"{flag} does not compute in {compute.value}",
                why="products of two matrices of 8-bit floats give bfloat16",
                ways_out=(WayOut("compute in bfloat16", ("--dtype", "bfloat16")), without),
            )
        if compute not in (ComputeDtype.BFLOAT16, ComputeDtype.FLOAT16):
            raise NotServable(
                f"{flag} does not compute in {compute.value} on a GPU",
                why="its kernels decode weights to 16 bits",
                ways_out=(WayOut("compute in bfloat16", ("--dtype", "bfloat16")), without),
            )
        return
    if asked in (Quantization.FP8, Quantization.FP8_DYNAMIC):
        raise NotServable(
            f"{flag} runs on GPUs only",
            why="there are no kernels for such weights on CPUs",
            ways_out=(WayOut("take 8-bit integers", ("--quantization", "int8")), without),
        )
    if compute is not ComputeDtype.FLOAT32:
        raise NotServable(
            f"{flag} does not compute in {compute.value} on a CPU",
            why="its kernels decode weights to float32",
            ways_out=(WayOut("compute in float32", ("--dtype", "float32")), without),
        )


def bytes_on_gpu(
    asked: Quantization,
    weights: Iterable[Weight],
    tied_head: tuple[int, int] | None,
    *,
    layers: str,
    element_bytes: int,
    rounds_head: bool,
) -> int:
    """Returns the bytes of all weights in a GPU's memory.

    tied_head: (outputs, inputs) of a head that shares the embedding; if rounded, it is stored beside it.
    layers: see `rounds`. element_bytes: of an unrounded number. rounds_head: whether the head is rounded too.
    """
    found = 0
    for weight in weights:
        is_head = rounds_head and weight.name == "lm_head"
        if is_head or rounds(weight, layers):
            fmt = format_of(asked, weight.columns, is_head=is_head)
            found += weight.copies * fmt.matrix_bytes(weight.rows, weight.columns)
        else:
            found += weight.numel * element_bytes
    if rounds_head and tied_head is not None:
        rows, columns = tied_head
        found += format_of(asked, columns, is_head=True).matrix_bytes(rows, columns)
    return found


def bytes_on_cpu(
    asked: Quantization, weights: Iterable[Weight], tied_head: tuple[int, int] | None
) -> int:
    """Returns the bytes of all weights in a CPU's memory, where unrounded ones are float32.

    tied_head: (outputs, inputs) of a head that shares the embedding; it is stored beside it.
    """
    found = 0
    for weight in weights:
        is_head = weight.name == "lm_head"
        if is_head or weight.kind is WeightKind.LINEAR:
            found += weight.rows * (asked.cpu_row_bytes(weight.columns, is_head=is_head) + 4)
        elif not weight.name.endswith(".bias"):  # biases are counted with their products
            found += 4 * weight.numel
    if tied_head is not None:
        rows, columns = tied_head
        found += rows * (asked.cpu_row_bytes(columns, is_head=True) + 4)
    return found


def rounds(weight: Weight, layers: str) -> bool:
    """Returns whether rounding a model rounds this weight of its decoder layers. layers: their path."""
    return weight.is_product and weight.name.startswith(f"{layers}.")
