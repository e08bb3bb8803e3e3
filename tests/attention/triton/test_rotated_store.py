"""One launch from a product to a query and stored rows gives what its parts give, one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.attention.base import HeadRotation
from kvant.attention.triton.backend import TritonBackend
from kvant.attention.triton.info import SERVED
from kvant.kv.dtype import KVDtype
from kvant.models.fused.kernels import TorchKernels
from tests.attention.triton import case

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Their encoders have a brother in the list, and the interpreter takes seconds.
SLOW = (KVDtype.TURBOQUANT_K8, KVDtype.TURBOQUANT_K4, KVDtype.TURBOQUANT_V3)
# The interpreter cannot write bfloat16; the last of these are AMD's alone.
FORMATS = [
    name
    for name in KVDtype
    if name in SERVED - {KVDtype.FP8_E4M3FNUZ}
    and (DEVICE == "cuda" or name not in (KVDtype.BFLOAT16, *SLOW))
]
EPS = 1e-6


def rotation(x: case.Case, *, by_position: bool, norm: bool) -> HeadRotation:
    half = x.q.shape[-1] // 2
    angles = torch.arange(100, device=DEVICE)[:, None] * torch.rand(half, device=DEVICE)
    if not by_position:
        angles = angles[x.step.positions]
    weights = [(torch.rand(2 * half, device=DEVICE) + 0.5).to(x.q.dtype) for _ in range(2)]
    q_weight, k_weight = weights if norm else (None, None)
    dtype = x.q.dtype
    return HeadRotation(
        angles.cos().to(dtype), angles.sin().to(dtype), by_position, q_weight, k_weight, EPS
    )


def in_parts(x: case.Case, how: HeadRotation) -> tuple[Tensor, list[Tensor]]:
    """The query and the planes by plain torch and the writer alone."""
    cos, sin = how.cos, how.sin
    if how.by_position:
        cos, sin = cos[x.step.positions], sin[x.step.positions]
    heads = x.q.shape[1], x.k.shape[1]
    q, k, v = TorchKernels().rotate(
        qkv_of(x), cos, sin, *heads, how.q_weight, how.k_weight, how.eps
    )
    TritonBackend().write(x.cache, k.contiguous(), v, x.step)
    return q, [plane.clone() for plane in (*x.cache.k, *x.cache.v)]


def qkv_of(x: case.Case) -> Tensor:
    return torch.cat([part.flatten(1) for part in (x.q, x.k, x.v)], dim=1)


def check(name: KVDtype, *, by_position: bool = True, norm: bool = True, **options: Any) -> None:
    torch.manual_seed(0)
    given: dict[str, Any] = {"sequences": ((40, 1), (23, 23), (17, 2)), "padding": 3, **options}
    x = case.prepare(name, dtype=torch.float32, device=DEVICE, **given)
    how = rotation(x, by_position=by_position, norm=norm)
    expected, planes = in_parts(x, how)
    again = case.prepare(name, dtype=torch.float32, device=DEVICE, **given)
    found = TritonBackend().write_rotated(again.cache, qkv_of(again), how, again.step)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for plane, wanted in zip((*again.cache.k, *again.cache.v), planes, strict=True):
        # Sums in another order may move a number over an edge between two codes.
        same = plane.contiguous().view(torch.uint8) == wanted.contiguous().view(torch.uint8)
        assert same.float().mean() > (0.5 if plane.dtype.itemsize == 4 else 0.99)
    # Through attention all of it counts, whatever a byte is.
    q = found.contiguous()
    a = TritonBackend().attend(again.cache, q, again.step, again.params)
    b = TritonBackend().attend(x.cache, q, x.step, x.params)
    assert case.error(a, b.double()) < (2e-5 if name is KVDtype.FLOAT32 else 5e-3)


@pytest.mark.parametrize("name", FORMATS, ids=str)
def test_every_format_is_rotated_and_stored_at_once(name: KVDtype) -> None:
    check(name)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_with_and_without_norms_of_heads_and_angles_by_position(
    by_position: bool, norm: bool
) -> None:
    check(KVDtype.FLOAT32, by_position=by_position, norm=norm)


def test_heads_of_80_and_a_scale_for_each() -> None:
    check(KVDtype.FP8_E4M3, head_dims=(80, 80), heads=(3, 3), per_head_scales=True)


if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
