"""Weights of a decoder as matrices and vectors, to count them without loading.

Names are those of checkpoints (experts apart, q, k and v apart), because recipes that quantise
weights name modules by them. What a family's transformers class fuses has the same number of
elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kvant.kv.geometry import LayerGeometry


class WeightKind(Enum):
    """Kind of weight, as recipes for quantised weights distinguish them."""

    LINEAR = "linear"  # the matrix of a Linear module
    EXPERT = "expert"  # a matrix of an expert, one of `copies`
    ROUTER = "router"  # scores experts: a Linear in some checkpoints, left alone by most recipes
    EMBEDDING = "embedding"
    OTHER = "other"  # norms, biases, convolutions, scalars


@dataclass(frozen=True, slots=True)
class Weight:
    """`copies` matrices of rows x columns (out x in features); a vector has one row.

    name: the module's path; of experts, the path of expert 0. shape: as files have it, if it is neither
    a matrix nor a vector. columns_first: files have the matrices of all experts transposed, in one tensor.
    """

    name: str
    kind: WeightKind
    rows: int
    columns: int
    copies: int = 1
    shape: tuple[int, ...] | None = None
    columns_first: bool = False

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape of the tensor in files, of one expert."""
        if self.shape is not None:
            return self.shape
        is_vector = self.kind is WeightKind.OTHER and self.rows == 1
        return (self.columns,) if is_vector else (self.rows, self.columns)

    @property
    def numel(self) -> int:
        return self.rows * self.columns * self.copies

    @property
    def is_product(self) -> bool:
        """Whether activations are multiplied by it: a linear layer's matrix or an expert's, no router's."""
        return self.kind in (WeightKind.LINEAR, WeightKind.EXPERT)


class QKNorm(Enum):
    """Where queries and keys are normalised before attention."""

    NONE = "none"
    HEAD = "head"  # one weight per number of a head
    ROW = "row"  # one weight per number of all heads (OLMo 2)


def linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Iterator[Weight]:
    yield Weight(name, WeightKind.LINEAR, rows, columns)
    if bias:
        yield vector(f"{name}.bias", rows)


def vector(name: str, width: int) -> Weight:
    return Weight(name, WeightKind.OTHER, 1, width)


def norms(layer: str, width: int, *names: str, bias: bool = False) -> Iterator[Weight]:
    """Normalisations over the hidden size."""
    for name in names:
        yield vector(f"{layer}.{name}", width)
        if bias:
            yield vector(f"{layer}.{name}.bias", width)


def other(name: str, *shape: int) -> Weight:
    """Returns a convolution's kernel, or another tensor of a shape of its own."""
    return Weight(name, WeightKind.OTHER, math.prod(shape[:1]), math.prod(shape[1:]), shape=shape)


def attention(
    layer: LayerGeometry,
    hidden: int,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: QKNorm = QKNorm.NONE,
    gated: bool = False,
    k_eq_v: bool = False,
) -> Iterator[Weight]:
    """Projections of grouped-query attention. gated: q_proj makes an output gate too.

    A layer that reads another's KV has no projections for its own; k_eq_v: K's projection is V's.
    """
    g, name = layer, layer.name
    q_width = g.num_q_heads * g.head_dim_k
    k_width, v_width = g.num_kv_heads * g.head_dim_k, g.num_kv_heads * g.head_dim_v
    yield from linear(f"{name}.q_proj", q_width * (2 if gated else 1), hidden, bias=qkv_bias)
    if g.shared_with is None:
        yield from linear(f"{name}.k_proj", k_width, hidden, bias=qkv_bias)
        if not k_eq_v:
            yield from linear(f"{name}.v_proj", v_width, hidden, bias=qkv_bias)
    yield from linear(f"{name}.o_proj", hidden, g.num_q_heads * g.head_dim_v, bias=o_bias)
    if qk_norm is not QKNorm.NONE:
        per_row = qk_norm is QKNorm.ROW
        yield vector(f"{name}.q_norm", q_width if per_row else g.head_dim_k)
        if g.shared_with is None:
            yield vector(f"{name}.k_norm", k_width if per_row else g.head_dim_k)
    if g.sinks:
        yield vector(f"{name}.sinks", g.num_q_heads)


def mlp(name: str, hidden: int, intermediate: int, *, bias: bool = False) -> Iterator[Weight]:
    """Yields a gated feed-forward network: gate, up and down."""
    yield from linear(f"{name}.gate_proj", intermediate, hidden, bias=bias)
    yield from linear(f"{name}.up_proj", intermediate, hidden, bias=bias)
    yield from linear(f"{name}.down_proj", hidden, intermediate, bias=bias)


def experts(
    name: str,
    count: int,
    hidden: int,
    intermediate: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    columns_first: bool = False,
) -> Iterator[Weight]:
    """`count` gated feed-forward networks. names: of gate, up and down. columns_first: as in `Weight`."""
    gate, up, down = names
    for part, rows, columns in (
        (gate, intermediate, hidden),
        (up, intermediate, hidden),
        (down, hidden, intermediate),
    ):
        yield Weight(
            f"{name}.experts.0.{part}", WeightKind.EXPERT, rows, columns, count,
            columns_first=columns_first,
        )  # fmt: skip


def router(name: str, count: int, hidden: int) -> Weight:
    return Weight(name, WeightKind.ROUTER, count, hidden)


def embedding(name: str, rows: int, width: int) -> Weight:
    return Weight(name, WeightKind.EMBEDDING, rows, width)
