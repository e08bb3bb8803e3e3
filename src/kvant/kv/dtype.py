"""KVDtype: the list of storage formats, one entry each; and the two names that are requests, not formats.

To add a format, add one entry here and one codec file in `kvant/kv/codecs/` (see CONTRIBUTING.md).
Members, never their names, travel through Kvant; `kvant.kv.names` is the only reader of names.
"""

from __future__ import annotations

from enum import Enum

from kvant.kv.format import (
    CheckpointScales,
    Element,
    Encoding,
    Granularity,
    KVFormat,
    Packing,
    Rotation,
    ScalePlace,
    ZeroPoint,
)


class KVDtype(Enum):
    """A storage format for keys or values. The value is its `KVFormat`."""

    FLOAT32 = KVFormat(
        "float32", "native", "no rounding", Encoding.FLOAT32, 32, Element.FLOAT32,
        aliases=("float", "fp32"),
    )  # fmt: skip
    FLOAT16 = KVFormat(
        "float16", "native", "11 significant bits, up to 65504", Encoding.FLOAT16, 16,
        Element.FLOAT16, aliases=("half", "fp16"),
    )  # fmt: skip
    BFLOAT16 = KVFormat(
        "bfloat16", "native", "8 significant bits, float32's range", Encoding.BFLOAT16, 16,
        Element.BFLOAT16, aliases=("bf16",),
    )  # fmt: skip
    FP8_E4M3 = KVFormat(
        "fp8_e4m3", "fp8", "one scale per tensor or KV head, from the checkpoint",
        Encoding.E4M3FN, 8, granularity=Granularity.TENSOR_OR_HEAD,
        scale_place=ScalePlace.PARAMETER, checkpoint_scales=CheckpointScales.OPTIONAL,
        aliases=("fp8",),
    )  # fmt: skip
    FP8_E4M3FNUZ = KVFormat(
        "fp8_e4m3fnuz", "fp8", "fp8_e4m3 as AMD gfx942 encodes it",
        Encoding.E4M3FNUZ, 8, granularity=Granularity.TENSOR_OR_HEAD,
        scale_place=ScalePlace.PARAMETER, checkpoint_scales=CheckpointScales.OPTIONAL,
        device_only="gfx942",
    )  # fmt: skip
    FP8_E5M2 = KVFormat(
        "fp8_e5m2", "fp8", "3 significant bits, wide range, no scale", Encoding.E5M2, 8,
    )  # fmt: skip
    FP8_PER_TOKEN_HEAD = KVFormat(
        "fp8_per_token_head", "fp8_per_token_head", "e4m3, a float32 scale per token and KV head",
        Encoding.E4M3FN, 8, granularity=Granularity.TOKEN_HEAD,
        scale_place=ScalePlace.PLANE, scale_encoding=Encoding.FLOAT32,
    )  # fmt: skip
    INT8_PER_TOKEN_HEAD = KVFormat(
        "int8_per_token_head", "int8_per_token_head", "a float32 scale per token and KV head",
        Encoding.INT8, 8, granularity=Granularity.TOKEN_HEAD,
        scale_place=ScalePlace.PLANE, scale_encoding=Encoding.FLOAT32,
    )  # fmt: skip
    INT4_PER_TOKEN_HEAD = KVFormat(
        "int4_per_token_head", "int4_per_token_head",
        "Hadamard-rotated, scale and zero point per token and KV head",
        Encoding.UINT4, 4, granularity=Granularity.TOKEN_HEAD, symmetric=False,
        zero_point=ZeroPoint.SCALE_MANTISSA, packing=Packing.ADJACENT_LOW_FIRST,
        rotation=Rotation.HADAMARD, scale_place=ScalePlace.PLANE, scale_encoding=Encoding.FLOAT32,
        head_dim_multiple=2,
    )  # fmt: skip
    INT4_FEEDBACK = KVFormat(
        "int4_feedback", "int4_feedback",
        "int4_per_token_head's bytes; keys are rounded with calibrated error feedback",
        Encoding.UINT4, 4, granularity=Granularity.TOKEN_HEAD, symmetric=False,
        zero_point=ZeroPoint.SCALE_MANTISSA, packing=Packing.ADJACENT_LOW_FIRST,
        rotation=Rotation.HADAMARD, scale_place=ScalePlace.PLANE, scale_encoding=Encoding.FLOAT32,
        head_dim_multiple=2, checkpoint_scales=CheckpointScales.ROUNDING,
    )  # fmt: skip
    INT4_SHORT = KVFormat(
        "int4_short", "int4_short",
        "Hadamard-rotated, scale and zero point in 16 bits per token and KV head",
        Encoding.UINT4, 4, granularity=Granularity.TOKEN_HEAD, symmetric=False,
        zero_point=ZeroPoint.BELOW_SCALE, packing=Packing.ADJACENT_LOW_FIRST,
        rotation=Rotation.HADAMARD, scale_place=ScalePlace.PLANE, scale_encoding=Encoding.SHORT,
        head_dim_multiple=2,
    )  # fmt: skip
    INT4_SHORT_FEEDBACK = KVFormat(
        "int4_short_feedback", "int4_short_feedback",
        "int4_short's bytes; keys are rounded with calibrated error feedback",
        Encoding.UINT4, 4, granularity=Granularity.TOKEN_HEAD, symmetric=False,
        zero_point=ZeroPoint.BELOW_SCALE, packing=Packing.ADJACENT_LOW_FIRST,
        rotation=Rotation.HADAMARD, scale_place=ScalePlace.PLANE, scale_encoding=Encoding.SHORT,
        head_dim_multiple=2, checkpoint_scales=CheckpointScales.ROUNDING,
    )  # fmt: skip
    NORMAL2 = KVFormat(
        "normal2", "normal2", "Hadamard-rotated, 4 equal steps, a float16 scale per row",
        Encoding.NORMAL2, 2, granularity=Granularity.TOKEN_HEAD, packing=Packing.FOURS,
        rotation=Rotation.HADAMARD, codebook="steps of 255/256 of a normal number",
        scale_place=ScalePlace.PLANE, scale_encoding=Encoding.FLOAT16, head_dim_multiple=4,
    )  # fmt: skip
    NVFP4 = KVFormat(
        "nvfp4", "nvfp4", "e2m1, an e4m3 scale per 16 elements and one global scale",
        Encoding.E2M1, 4, granularity=Granularity.BLOCK, block=16,
        packing=Packing.ADJACENT_LOW_FIRST, scale_place=ScalePlace.PLANE,
        scale_encoding=Encoding.E4M3FN, global_scale="stored * block * global = value",
        head_dim_multiple=16, checkpoint_scales=CheckpointScales.OPTIONAL,
    )  # fmt: skip
    TURBOQUANT_K8 = KVFormat(
        "turboquant_k8", "fp8", "e4m3 without a scale, on every device", Encoding.E4M3FN, 8,
        wide_ends=2,
    )  # fmt: skip
    TURBOQUANT_K4 = KVFormat(
        "turboquant_k4", "turboquant_k", "Hadamard-rotated, 16 centroids, a float16 scale per row",
        Encoding.NORMAL4, 4, granularity=Granularity.TOKEN_HEAD,
        packing=Packing.ADJACENT_LOW_FIRST, rotation=Rotation.HADAMARD,
        codebook="lloyd-max normal 16, steps of 1/256", scale_place=ScalePlace.PLANE,
        scale_encoding=Encoding.FLOAT16, head_dim_multiple=2, wide_ends=2,
    )  # fmt: skip
    TURBOQUANT_K3 = KVFormat(
        "turboquant_k3", "turboquant_k", "Hadamard-rotated, 8 centroids, a float16 scale per row",
        Encoding.NORMAL3, 3, granularity=Granularity.TOKEN_HEAD,
        packing=Packing.BITS, rotation=Rotation.HADAMARD,
        codebook="lloyd-max normal 8, steps of 1/256", scale_place=ScalePlace.PLANE,
        scale_encoding=Encoding.FLOAT16, head_dim_multiple=8, wide_ends=2,
    )  # fmt: skip
    TURBOQUANT_V4 = KVFormat(
        "turboquant_v4", "turboquant_v", "16 steps, float16 scale and minimum per row",
        Encoding.UINT4, 4, granularity=Granularity.TOKEN_HEAD, symmetric=False,
        packing=Packing.ADJACENT_LOW_FIRST, scale_place=ScalePlace.PLANE,
        scale_encoding=Encoding.FLOAT16, scales_per_row=2, head_dim_multiple=2, wide_ends=2,
    )  # fmt: skip
    TURBOQUANT_V3 = KVFormat(
        "turboquant_v3", "turboquant_v", "8 steps, float16 scale and minimum per row",
        Encoding.UINT3, 3, granularity=Granularity.TOKEN_HEAD, symmetric=False,
        packing=Packing.BITS, scale_place=ScalePlace.PLANE,
        scale_encoding=Encoding.FLOAT16, scales_per_row=2, head_dim_multiple=8, wide_ends=2,
    )  # fmt: skip

    @property
    def format(self) -> KVFormat:
        return self.value

    def __repr__(self) -> str:
        return f"KVDtype.{self.name}"

    def __str__(self) -> str:
        return self.value.name


PAIR_NAMES: dict[str, tuple[KVDtype, KVDtype]] = {
    "int4_feedback": (KVDtype.INT4_FEEDBACK, KVDtype.INT4_PER_TOKEN_HEAD),
    "int4_short_feedback": (KVDtype.INT4_SHORT_FEEDBACK, KVDtype.INT4_SHORT),
    "turboquant_k8v4": (KVDtype.TURBOQUANT_K8, KVDtype.TURBOQUANT_V4),
    "turboquant_4bit_nc": (KVDtype.TURBOQUANT_K4, KVDtype.TURBOQUANT_V4),
    "turboquant_k3v4_nc": (KVDtype.TURBOQUANT_K3, KVDtype.TURBOQUANT_V4),
    "turboquant_3bit_nc": (KVDtype.TURBOQUANT_K3, KVDtype.TURBOQUANT_V3),
}
"""Names for a pair: one format of K and another of V. A pair may have the name of K's format."""


class Follow(Enum):
    """Requests that name no format. Neither survives resolution."""

    CHECKPOINT = "auto"  # what the checkpoint wishes, else the model dtype
    MODEL = "model"  # the layer's compute dtype, always

    def __str__(self) -> str:
        return self.value


class ComputeDtype(Enum):
    """The dtype a model computes in; the value is torch's name for it."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"  # for verification: no KV format stores it

    @property
    def kv_dtype(self) -> KVDtype:
        """The format that stores this dtype; float64 is stored as float32, which the plan says."""
        return _STORED_AS[self]


_STORED_AS = {
    ComputeDtype.FLOAT32: KVDtype.FLOAT32,
    ComputeDtype.FLOAT16: KVDtype.FLOAT16,
    ComputeDtype.BFLOAT16: KVDtype.BFLOAT16,
    ComputeDtype.FLOAT64: KVDtype.FLOAT32,
}
