"""What a weight format is: its identity and its byte arithmetic, without torch.

A weight is a matrix [outputs, inputs]. A format is the rule by which its numbers become bytes and come back.
Numbers of one block share a scale: value = (code - zero point) * scale. `kvant.weights.codecs`
defines each format in torch; docs/formats.md has the layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Code(Enum):
    """How one number becomes a code. Values: a name, bits, and the largest magnitude of a code."""

    E4M3 = "e4m3", 8, 448.0
    INT8 = "int8", 8, 127.0
    INT4 = (
        "int4",
        4,
        7.0,
    )  # stored as code + 8, 0..15; with zero points or offsets 0..15 as they are
    INT6 = "int6", 6, 31.0  # stored as code + 32
    E2M1 = "e2m1", 4, 6.0

    @property
    def bits(self) -> int:
        return self.value[1]

    @property
    def largest(self) -> float:
        return self.value[2]


class Scale(Enum):
    """How a scale is stored. Values: a name, and bytes."""

    FLOAT32 = "float32", 4
    FLOAT16 = "float16", 2
    BFLOAT16 = "bfloat16", 2
    E4M3 = "e4m3", 1
    E8M0 = "e8m0", 1  # a power of two, 2^(code - 127)
    UINT6 = "uint6", 1  # 0..63 times the float16 of a superblock
    INT8 = "int8", 1  # -128..127 times the float16 of a superblock

    @property
    def num_bytes(self) -> int:
        return self.value[1]


WHOLE = 0
"""A block that spans the whole matrix in this direction."""


MOST_DECODED = 1 << 27
"""Numbers of a weight with a scale per output that a product of many rows decodes at a time."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One storage format of a weight [outputs, inputs].

    rows, columns: outputs and inputs that share a scale; `WHOLE` for all. zero_points: beside each scale
    stands the code of zero. global_scale: one float32 factor for the whole matrix. offsets: beside each scale
    stands a number that is added: value = code * scale + offset. superblock: inputs that share a float16
    factor of their scales, and one of their offsets, which are then small integers; 0 for no superblocks.
    """

    name: str
    code: Code
    rows: int
    columns: int
    scale: Scale
    zero_points: bool = False
    global_scale: bool = False
    offsets: bool = False
    superblock: int = 0

    @property
    def summary(self) -> str:
        """The format in words, for the plan."""
        per = {
            (WHOLE, WHOLE): "a scale per matrix",
            (1, WHOLE): "a scale per output",
        }.get((self.rows, self.columns))
        if per is None and self.rows == 1:
            per = f"a scale per {self.columns} inputs"
        if per is None:
            per = f"a scale per {self.rows} x {self.columns}"
        beside = (
            " and a zero point" if self.zero_points else " and an offset" if self.offsets else ""
        )
        return f"{self.name}, {per}{beside}"

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns the number of blocks of a matrix along its outputs and along its inputs."""
        down = 1 if self.rows == WHOLE else -(-rows // self.rows)
        along = 1 if self.columns == WHOLE else -(-columns // self.columns)
        return down, along

    def refuse(self, rows: int, columns: int) -> str | None:
        """Returns why a matrix of this shape cannot be stored, or None."""
        if self.code.bits == 4 and columns % 2:
            return f"{self.name} packs two inputs in a byte, and {columns} is odd"
        if self.rows == 1 and self.columns != WHOLE and columns % self.columns:
            return f"groups of {self.columns} do not divide {columns} inputs"
        if self.superblock and columns % self.superblock:
            return f"superblocks of {self.superblock} do not divide {columns} inputs"
        return None

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Returns the bytes of a matrix: codes, scales and everything else."""
        down, along = self.blocks(rows, columns)
        shared = self.scale.num_bytes * (2 if self.offsets else 1) + (1 if self.zero_points else 0)
        found = rows * columns * self.code.bits // 8 + down * along * shared
        if self.superblock:
            found += rows * (columns // self.superblock) * 2 * (2 if self.offsets else 1)
        return found + (4 if self.global_scale else 0)


class Dialect(Enum):
    """How a checkpoint stores a narrow weight; `kvant.weights.dialects` reads each dialect."""

    FP8 = "fp8"  # DeepSeek's and Qwen's: weight, weight_scale_inv
    FLOAT_QUANTIZED = "float-quantized"  # compressed-tensors: weight, weight_scale
    INT_QUANTIZED = "int-quantized"
    PACK_QUANTIZED = "pack-quantized"
    NVFP4_PACK = "nvfp4-pack-quantized"
    MXFP4_PACK = "mxfp4-pack-quantized"
    AWQ = "awq"
    GPTQ = "gptq"  # stores each zero point minus one
    GPTQ_V2 = "gptq_v2"
    MODELOPT_FP8 = "modelopt FP8"
    MODELOPT_NVFP4 = "modelopt NVFP4"
    GGUF = "gguf"  # one tensor of blocks, which hold codes and scales
    MXFP4_EXPERTS = "mxfp4"  # gpt-oss: blocks and scales of all experts of a layer


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint stores one layer's weight. format: its scale dtype is that of the file.

    rounds_inputs: the checkpoint has a scale with which the layer's inputs are rounded to e4m3. reordered:
    a tensor has the group of each input (act-order); else groups are neighbouring inputs. packed_bits: bits
    of a packed integer, if the format's codes are wider. no_product: why no product multiplies by such
    weights, which are then decoded; "" if one does.
    """

    dialect: Dialect
    format: WeightFormat
    rounds_inputs: bool = False
    reordered: bool = False
    packed_bits: int = 0
    no_product: str = ""

    @property
    def bits(self) -> int:
        """Bits of a code in the file."""
        return self.packed_bits or self.format.code.bits

    @property
    def summary(self) -> str:
        """The format in words, for the plan."""
        return self.format.summary + (", inputs in another order" if self.reordered else "")

    @property
    def input_scale(self) -> str:
        """The tensor name of the scale of `rounds_inputs`, after the layer's name."""
        return "activation_scale" if self.dialect is Dialect.FP8 else "input_scale"


FP8_TENSOR = WeightFormat("fp8_e4m3", Code.E4M3, WHOLE, WHOLE, Scale.FLOAT32)
FP8_CHANNEL = WeightFormat("fp8_e4m3", Code.E4M3, 1, WHOLE, Scale.FLOAT32)
FP8_BLOCK = WeightFormat("fp8_e4m3", Code.E4M3, 128, 128, Scale.FLOAT32)
INT8_CHANNEL = WeightFormat("int8", Code.INT8, 1, WHOLE, Scale.FLOAT32)
MXFP4 = WeightFormat("mxfp4", Code.E2M1, 1, 32, Scale.E8M0)
NVFP4 = WeightFormat("nvfp4", Code.E2M1, 1, 16, Scale.E4M3, global_scale=True)


def int4_groups(
    columns: int, *, zero_points: bool = False, scale: Scale = Scale.FLOAT16
) -> WeightFormat:
    """Returns the format of 4-bit integers in groups of `columns` inputs."""
    return WeightFormat("int4", Code.INT4, 1, columns, scale, zero_points)


def int8_groups(columns: int, *, scale: Scale = Scale.FLOAT16) -> WeightFormat:
    """Returns the format of 8-bit integers in groups of `columns` inputs."""
    return WeightFormat("int8", Code.INT8, 1, columns, scale)


Q4_1 = WeightFormat("int4", Code.INT4, 1, 32, Scale.FLOAT16, offsets=True)
Q4_K = WeightFormat("q4_k", Code.INT4, 1, 32, Scale.UINT6, offsets=True, superblock=256)
Q6_K = WeightFormat("q6_k", Code.INT6, 1, 16, Scale.INT8, superblock=256)


@dataclass(frozen=True, slots=True)
class BlockType:
    """One of GGUF's types: its format; a block has `inputs` inputs in `num_bytes` bytes of a file."""

    name: str
    format: WeightFormat
    inputs: int
    num_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Returns the bytes of one output's blocks in a file."""
        return columns // self.inputs * self.num_bytes


BLOCK_TYPES = {
    one.name: one
    for one in (
        BlockType("Q8_0", int8_groups(32), 32, 34),
        BlockType("Q4_0", int4_groups(32), 32, 18),
        BlockType("Q4_1", Q4_1, 32, 20),
        BlockType("Q4_K", Q4_K, 256, 144),
        BlockType("Q6_K", Q6_K, 256, 210),
    )
}
"""GGUF's types whose weights can stay as they are stored, by ggml's names."""


def block_type(fmt: WeightFormat) -> BlockType:
    """Returns GGUF's type with this format."""
    return next(one for one in BLOCK_TYPES.values() if one.format == fmt)
