"""Weight quantisation at load (`--quantization`): methods, devices and bytes.

Needs no torch, since plans use it. `kvant.models.cpu.weights` defines the layout of codes and scales.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import NotServable, WayOut
from kvant.kv.dtype import ComputeDtype
from kvant.models.geometry.parameters import Weight, WeightKind

_GROUP = 32


class Quantization(Enum):
    """Weights of linear layers are rounded, activations are not. Norms and embeddings stay."""

    INT8_WEIGHT_ONLY = "int8_weight_only"  # a scale for each output
    INT4_WEIGHT_ONLY = "int4_weight_only"  # scale and offset for 32 weights; the head is int8

    def row_bytes(self, columns: int, *, is_head: bool) -> int:
        """Bytes of one output's codes and scales."""
        if self is Quantization.INT4_WEIGHT_ONLY and not is_head:
            return columns // 2 + 4 * (columns // _GROUP)
        return columns + 4


def check_quantization(asked: Quantization, device: DeviceFacts, compute: ComputeDtype) -> None:
    """Raise NotServable, with ways out, if no kernel multiplies with such weights.

    Whether a forward runs the model with them is `kvant.models.select`'s to say.
    """
    flag = f"--quantization {asked.value}"
    without = WayOut("run without --quantization")
    if device.kind is not DeviceKind.CPU:
        raise NotServable(
            f"{flag} runs on CPUs only",
            why="there are no kernels for such weights on GPUs",
            ways_out=(without, WayOut("run on the CPU", ("--device", "cpu"))),
        )
    if compute is not ComputeDtype.FLOAT32:
        raise NotServable(
            f"{flag} does not compute in {compute.value}",
            why="its kernels decode weights to float32",
            ways_out=(WayOut("compute in float32", ("--dtype", "float32")), without),
        )


def quantized_bytes(
    asked: Quantization, weights: Iterable[Weight], tied_head: tuple[int, int] | None
) -> int:
    """Bytes of all weights in memory; weights that stay are float32.

    tied_head: (outputs, inputs) of a head that is the embedding; it is then stored twice.
    """
    found = 0
    for weight in weights:
        is_head = weight.name == "lm_head"
        if is_head or weight.kind is WeightKind.LINEAR:
            found += weight.rows * (asked.row_bytes(weight.columns, is_head=is_head) + 4)
        elif not weight.name.endswith(".bias"):  # which are counted with their products
            found += 4 * weight.numel
    if tied_head is not None:
        rows, columns = tied_head
        found += rows * (asked.row_bytes(columns, is_head=True) + 4)
    return found
