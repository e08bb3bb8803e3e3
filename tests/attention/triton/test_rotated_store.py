"""One launch from a product to a query and stored rows gives what its parts give, one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.attention.base import HeadNorm, HeadRotation
from kvant.attention.triton.backend import TritonBackend
from kvant.attention.triton.info import SERVED
from kvant.kernels.triton.device import multiprocessors
from kvant.kv.dtype import KVDtype
from kvant.models.fused.kernels import TorchKernels
from kvant.models.fused.layers import Norm, QKNorms
from kvant.models.fused.recipe import NormKind, Pairing
from tests.attention.triton import case

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cannot write bfloat16; e4m3fnuz is AMD's alone.
FORMATS = [
    name
    for name in KVDtype
    if name in SERVED - {KVDtype.FP8_E4M3FNUZ}
    and (DEVICE == "cuda" or name is not KVDtype.BFLOAT16)
]
EPS = 1e-6
KINDS = {
    HeadNorm.ROUNDED: NormKind.RMS, HeadNorm.WIDE: NormKind.RMS_WIDE, HeadNorm.ONE: NormKind.RMS_ONE,
}  # fmt: skip


def rotation(
    x: case.Case, *, by_position: bool, normed: bool, rotary: int | None = None, **options: Any
) -> HeadRotation:
    half = x.q.shape[-1] // 2
    weights = [(torch.rand(2 * half, device=DEVICE) + 0.5).to(x.q.dtype) for _ in range(2)]
    half = half if rotary is None else rotary // 2
    angles = torch.arange(100, device=DEVICE)[:, None] * torch.rand(half, device=DEVICE)
    if not by_position:
        angles = angles[x.step.positions]
    q_weight, k_weight = weights if normed else (None, None)
    dtype = x.q.dtype
    return HeadRotation(
        angles.cos().to(dtype),
        angles.sin().to(dtype),
        by_position,
        q_weight,
        k_weight,
        EPS,
        **options,
    )


def in_parts(x: case.Case, how: HeadRotation) -> tuple[Tensor, list[Tensor]]:
    """The query and the planes by plain torch and the writer alone."""
    cos, sin = how.cos, how.sin
    if how.by_position:
        cos, sin = cos[x.step.positions], sin[x.step.positions]
    heads = x.q.shape[1], x.k.shape[1]
    norms = None
    if how.q_weight is not None:
        q_norm, k_norm = (Norm(KINDS[how.norm], w, None, EPS) for w in (how.q_weight, how.k_weight))
        norms = QKNorms(q_norm, k_norm)
    pairing = Pairing.NEIGHBOURS if how.neighbours else Pairing.HALVES
    q, k, v = TorchKernels().rotate(qkv_of(x), cos, sin, *heads, norms, pairing)
    TritonBackend().write(x.cache, k.contiguous(), v, x.step)
    return q, [plane.clone() for plane in (*x.cache.k, *x.cache.v)]


def qkv_of(x: case.Case) -> Tensor:
    return torch.cat([part.flatten(1) for part in (x.q, x.k, x.v)], dim=1)


def check(
    name: KVDtype,
    *,
    by_position: bool = True,
    norm: bool = True,
    how: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    torch.manual_seed(0)
    # 18 rows of keys, the last 4 of padding: three programs, the last one not full.
    given: dict[str, Any] = {"sequences": ((40, 1), (4, 4), (17, 2)), "padding": 2, **options}
    x = case.prepare(name, dtype=torch.float32, device=DEVICE, **given)
    turned = rotation(x, by_position=by_position, normed=norm, **(how or {}))
    expected, planes = in_parts(x, turned)
    again = case.prepare(name, dtype=torch.float32, device=DEVICE, **given)
    qkv = qkv_of(again)
    if turned.gated:
        heads = torch.stack([again.q, torch.full_like(again.q, torch.nan)], 2).flatten(1)
        qkv = torch.cat([heads, qkv[:, again.q.shape[1] * again.q.shape[2] :]], dim=1)
    found = TritonBackend().write_rotated(again.cache, qkv, turned, again.step)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for plane, wanted in zip((*again.cache.k, *again.cache.v), planes, strict=True):
        # Sums in another order may move a number over an edge between two codes.
        same = plane.contiguous().view(torch.uint8) == wanted.contiguous().view(torch.uint8)
        assert same.float().mean() > (0.5 if plane.dtype.itemsize == 4 else 0.99)
    # Attention reads every byte, so its output shows any difference.
    q = found.double()
    a = case.EXACT.attend(again.cache, q, again.step, again.params)
    b = case.EXACT.attend(x.cache, q, x.step, x.params)
    assert case.error(a, b) < (2e-5 if name is KVDtype.FLOAT32 else 5e-3)


@pytest.mark.parametrize("name", FORMATS, ids=str)
def test_every_format_is_rotated_and_stored_at_once(name: KVDtype) -> None:
    check(name)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_with_and_without_norms_of_heads_and_angles_by_position(
    by_position: bool, norm: bool
) -> None:
    check(KVDtype.FLOAT32, by_position=by_position, norm=norm)


@pytest.mark.parametrize("norm", HeadNorm)
@pytest.mark.parametrize("rotary", [0, 8, None])
@pytest.mark.parametrize("neighbours", [False, True])
def test_parts_of_heads_neighbours_and_kinds_of_norms(
    norm: HeadNorm, rotary: int | None, neighbours: bool
) -> None:
    check(KVDtype.FLOAT32, how={"norm": norm, "rotary": rotary, "neighbours": neighbours})


def test_heads_of_80_and_a_scale_for_each() -> None:
    check(KVDtype.FP8_E4M3, head_dims=(80, 80), heads=(3, 3), per_head_scales=True)


@pytest.mark.parametrize("name", [KVDtype.FLOAT32, KVDtype.INT4_PER_TOKEN_HEAD], ids=str)
def test_programs_of_four_warps_for_many_rows(name: KVDtype) -> None:
    sequences = [(4, 4)] * (5 * multiprocessors(torch.device(DEVICE)))
    assert len(sequences) * 4 * 4 > 64 * multiprocessors(torch.device(DEVICE))
    check(name, sequences=sequences)


def test_queries_with_gates_between_them() -> None:
    check(KVDtype.FLOAT32, how={"gated": True})


if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
