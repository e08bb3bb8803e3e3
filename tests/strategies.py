"""Hypothesis strategies that several rooms' tests share."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from kvant.kv.dtype import KVDtype

HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512, 576)
"""Head sizes of real models: 80 and 96 are no powers of two, 576 is MLA's latent + rotary part."""

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_ROW_KINDS = ("normal", "bits", "constant", "zeros", "outlier", "subnormal", "huge", "sparse")


def kv_dtypes() -> st.SearchStrategy[KVDtype]:
    """Every storage format."""
    return st.sampled_from(KVDtype)


def head_dims(dtype: KVDtype) -> st.SearchStrategy[int]:
    """Head sizes of real models that `dtype` can store."""
    return st.sampled_from([d for d in HEAD_DIMS if dtype.format.refuse_head_dim(d) is None])


def finite_row(kind: str, head_dim: int, seed: int, exponent: int) -> NDArray[np.float32]:
    """One finite float32 row [head_dim] of a kind that formats are known to stumble over."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(head_dim)
    size = np.ldexp(1.0, exponent)
    row = np.zeros(head_dim)
    if kind == "normal":
        row = normal * size
    elif kind == "bits":
        bits = rng.integers(0, 2**32, head_dim, dtype=np.uint32)
        found = bits.view(np.float32)
        return np.where(np.isfinite(found), found, np.float32(0)).astype(np.float32)
    elif kind == "constant":
        row[:] = normal[0] * size
    elif kind == "outlier":
        row = normal
        row[seed % head_dim] = 3e38 * np.sign(normal[0])
    elif kind == "subnormal":
        row = normal * 2.0**-140
    elif kind == "huge":
        row = np.sign(normal) * 3e38
    elif kind == "sparse":
        row[seed % head_dim] = normal[0] * size
        row[(seed // head_dim) % head_dim] = -0.0
    limit = float(np.finfo(np.float32).max)
    return np.clip(row, -limit, limit).astype(np.float32)


@st.composite
def finite_rows(draw: st.DrawFn, head_dim: int, max_rows: int = 4) -> Tensor:
    """Finite float32 rows [rows, head_dim], each of its own kind and magnitude."""
    one = st.tuples(st.sampled_from(_ROW_KINDS), st.integers(0, 2**32 - 1), st.integers(-149, 127))
    drawn = draw(st.lists(one, min_size=1, max_size=max_rows))
    return torch.from_numpy(np.stack([finite_row(k, head_dim, s, e) for k, s, e in drawn]))


@st.composite
def usual_rows(draw: st.DrawFn, head_dim: int, max_rows: int = 4) -> Tensor:
    """Float32 rows [rows, head_dim] of the magnitudes that models produce (2^-6 .. 2^9)."""
    one = st.tuples(st.integers(0, 2**32 - 1), st.integers(-6, 9))
    drawn = draw(st.lists(one, min_size=1, max_size=max_rows))
    return torch.from_numpy(np.stack([finite_row("normal", head_dim, s, e) for s, e in drawn]))


def outside_scale(dtype: KVDtype, num_kv_heads: int) -> st.SearchStrategy[Tensor | None]:
    """What stands in a layer's storage for `dtype`: None, or float32 [1] or [num_kv_heads]."""
    if not dtype.format.takes_outside_scale:
        return st.none()
    number = st.floats(2.0**-20, 2.0**20, width=32)
    lengths = st.sampled_from((1, num_kv_heads))
    lists = lengths.flatmap(lambda n: st.lists(number, min_size=n, max_size=n))
    return lists.map(lambda values: torch.tensor(values, dtype=torch.float32))
