"""What a KV format *is*: its identity and its byte arithmetic, without torch.

A torch dtype is not a format: e4m3, e5m2, int8 and packed 4-bit codes are all stored in bytes. A format is
the whole rule by which one row (the key or the value of one token and one KV head, `head_dim`
numbers) becomes bytes and comes back. The bytes are laid out in *planes*, arrays with the same
leading shape [num_pages, page_size, num_kv_heads] and a width of their own:

    codes   [.., head_dim * bits / 8]      every format
    scales  [.., n]                        formats that carry scales beside the codes

Scales that belong to a whole tensor or a KV head (`ScalePlace.PARAMETER`) are not in the pages: they
come from the checkpoint, and the layer's spec holds them. Everywhere, stored * scale = value.

`kvant.kv.codecs` defines each format in torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from enum import Enum


class Element(Enum):
    """Type of one element of a plane; the value is its width in bytes and a distinct name."""

    UINT8 = ("uint8", 1)
    INT16 = ("int16", 2)
    FLOAT16 = ("float16", 2)
    BFLOAT16 = ("bfloat16", 2)
    FLOAT32 = ("float32", 4)

    @property
    def num_bytes(self) -> int:
        return self.value[1]


class Encoding(Enum):
    """How one number becomes one code: the encoding's name and the largest magnitude of a code.

    The largest is infinite where every number of a model is in range.
    """

    FLOAT32 = "float32", math.inf
    FLOAT16 = "float16", 65504.0
    BFLOAT16 = "bfloat16", math.inf  # float32's range
    E4M3FN = "e4m3fn", 448.0  # OCP 8-bit: bias 7, no infinities, NaN = 0x7f/0xff
    E4M3FNUZ = "e4m3fnuz", 240.0  # AMD gfx942: bias 8, one NaN = 0x80, no negative zero
    E5M2 = "e5m2", 57344.0  # OCP 8-bit: bias 15
    INT8 = "int8", 127.0  # two's complement, -127..127
    UINT4 = "uint4", 15.0  # 0..15 with a zero point, or with a minimum beside the scale
    UINT3 = "uint3", 7.0  # 0..7, with a minimum beside the scale
    NORMAL4 = (
        "normal4",
        700 / 256,
    )  # one of 16 centroids for standard normal numbers, sign bit first
    NORMAL3 = "normal3", 551 / 256  # one of 8
    NORMAL2 = "four_steps", 1.5  # -1.5, -0.5, 0.5 or 1.5, in this order
    SHORT = "short", 2.0**22 * (1 + 62 / 64)  # of scales: 6 bits of exponent, 6 of mantissa
    E2M1 = "e2m1", 6.0  # 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign bit

    largest: float

    def __new__(cls, name: str, largest: float) -> Encoding:
        member = object.__new__(cls)
        member._value_ = name
        member.largest = largest
        return member


_SCALE_ELEMENT = {
    Encoding.FLOAT32: Element.FLOAT32,
    Encoding.FLOAT16: Element.FLOAT16,
    Encoding.E4M3FN: Element.UINT8,
    Encoding.SHORT: Element.INT16,
}


class Side(Enum):
    K = "k"
    V = "v"


class Granularity(Enum):
    """Which numbers share a scale."""

    NONE = "none"
    TENSOR_OR_HEAD = "tensor_or_head"  # one for the layer, or one per KV head
    TOKEN_HEAD = "token_head"  # one per row
    BLOCK = "block"  # one per `block` neighbouring elements of a row


class ScalePlace(Enum):
    NONE = "none"
    PARAMETER = "parameter"  # in the layer's spec, from the checkpoint or fixed
    PLANE = "plane"  # beside the codes, in every page


class ZeroPoint(Enum):
    NONE = "none"
    SCALE_MANTISSA = "scale_mantissa"  # 4 bits, in the low mantissa bits of the float32 scale
    BELOW_SCALE = "below_scale"  # 4 bits, below the 12 bits of a short scale


class Packing(Enum):
    NONE = "none"
    ADJACENT_LOW_FIRST = (
        "adjacent_low_first"  # byte i: element 2i in the low nibble, 2i+1 in the high
    )
    FOURS = "fours"  # byte i: elements 4i to 4i + 3, the first in the lowest two bits
    BITS = "bits"  # element i at bit i * bits of the row, least significant bit first


class Rotation(Enum):
    NONE = "none"
    # Unnormalised Walsh-Hadamard transform over blocks of the largest power of two that divides
    # head_dim; decoding divides by the block length.
    HADAMARD = "hadamard"


class CheckpointScales(Enum):
    """How the format uses scales from a checkpoint."""

    NEVER = "never"  # the format computes a scale per row
    OPTIONAL = "optional"  # uses them; without them 1.0 or a fixed value, shown in the plan
    ROUNDING = "rounding"  # rounds keys with the checkpoint's matrices; refused without them


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of a layer's storage: `width` elements per token and KV head."""

    name: str
    element: Element
    width: int

    @property
    def row_bytes(self) -> int:
        return self.width * self.element.num_bytes


_LABELS = ("name", "codec", "summary", "wide_ends", "aliases", "device_only")


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Identity and byte arithmetic of one storage format of K or of V.

    Every field but those in `_LABELS` is identity: two formats that agree in them store the same bytes
    for the same numbers, and `fingerprint` depends on nothing else.
    """

    name: str
    codec: str  # name of the module in kvant.kv.codecs, and of the kernel files of every backend
    summary: str
    encoding: Encoding
    bits: int
    element: Element = Element.UINT8  # what the codes plane is made of
    granularity: Granularity = Granularity.NONE
    block: int = 0  # elements that share a scale, for Granularity.BLOCK
    symmetric: bool = True
    zero_point: ZeroPoint = ZeroPoint.NONE
    packing: Packing = Packing.NONE
    rotation: Rotation = Rotation.NONE
    codebook: str = ""
    scale_place: ScalePlace = ScalePlace.NONE
    scale_encoding: Encoding | None = None  # of the scales in the plane
    scales_per_row: int = 1  # for Granularity.TOKEN_HEAD; a second one would be a minimum, say
    global_scale: str = ""  # convention of the scale above the block scales
    token_span: int = 1  # tokens that share state; 1 = any row can be overwritten or cut off alone
    head_dim_multiple: int = 1
    checkpoint_scales: CheckpointScales = CheckpointScales.NEVER
    wide_ends: int = (
        0  # layers at each end of a model that keep the model dtype unless told otherwise
    )
    aliases: tuple[str, ...] = ()
    device_only: str = ""  # the one GPU architecture that has this encoding; users never ask for it

    @property
    def is_native(self) -> bool:
        """Whether numbers are stored as they are, in a float of 16 bits or more."""
        return self.element is not Element.UINT8

    @property
    def takes_outside_scale(self) -> bool:
        """True if encode and decode need a scale that is not in the pages."""
        return self.scale_place is ScalePlace.PARAMETER or bool(self.global_scale)

    @property
    def takes_rounding(self) -> bool:
        """True if encoding needs matrices from the checkpoint. Decoding does not."""
        return self.checkpoint_scales is CheckpointScales.ROUNDING

    @property
    def largest(self) -> float | None:
        """The largest magnitude that can be stored, in units of the scale from outside the pages.

        None if no number is too large: the encoding has float32's range, or every row computes its own
        scale. (turboquant's float16 row scales end at 65504, which 16-bit models do not reach.)
        """
        if self.granularity is Granularity.TOKEN_HEAD:
            return None
        largest = self.encoding.largest
        if self.granularity is Granularity.BLOCK:
            assert self.scale_encoding is not None
            largest *= self.scale_encoding.largest
        return None if math.isinf(largest) else largest

    def refuse_head_dim(self, head_dim: int) -> str | None:
        """Returns why rows of this length cannot be stored, or None."""
        if head_dim % self.head_dim_multiple:
            return f"{self.name} needs a head size divisible by {self.head_dim_multiple}, not {head_dim}"
        return None

    def planes(self, head_dim: int) -> tuple[Plane, ...]:
        """Returns the arrays that hold rows of `head_dim` numbers, codes first."""
        codes = Plane("codes", self.element, head_dim * self.bits // (8 * self.element.num_bytes))
        if self.scale_place is not ScalePlace.PLANE:
            return (codes,)
        assert self.scale_encoding is not None
        blocks = self.granularity is Granularity.BLOCK
        width = head_dim // self.block if blocks else self.scales_per_row
        return (codes, Plane("scales", _SCALE_ELEMENT[self.scale_encoding], width))

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one row: one token, one KV head, K or V alone."""
        return sum(plane.row_bytes for plane in self.planes(head_dim))

    @property
    def fingerprint(self) -> str:
        """Stable short hash of the identity; part of every key under which KV is kept."""
        facts = asdict(self)
        for label in _LABELS:
            del facts[label]
        plain = {k: v.value if isinstance(v, Enum) else v for k, v in facts.items()}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
