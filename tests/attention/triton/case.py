"""Steps over poisoned pages, on any device, and what the reference backend makes of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, Step
from kvant.attention.reference.backend import ReferenceBackend
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.format import Side
from kvant.kv.geometry import Attention
from kvant.kv.pool import KVPool, LayerCache
from kvant.kv.spec import KVPlan, Role, WideRows
from tests.attention import driver

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EXACT = ReferenceBackend(torch.float64)


@dataclass(frozen=True)
class Case:
    cache: LayerCache
    step: Step
    params: AttentionParams
    q: Tensor
    k: Tensor
    v: Tensor | None

    def expected(self) -> Tensor:
        """The float64 reference over the bytes that are stored now."""
        return EXACT.attend(self.cache, self.q.double(), self.step, self.params)


def cut_with(monkeypatch: pytest.MonkeyPatch, **bounds: int) -> None:
    """Launches are cut with these bounds of `kvant.attention.triton.cut` in place of its own."""
    from kvant.attention.triton import backend, cut

    for name, value in bounds.items():
        monkeypatch.setattr(cut, name, value)
    monkeypatch.setattr(backend, "cut_step", cut.cut_step.__wrapped__)  # nothing kept from before


def poison(cache: LayerCache) -> None:
    """Fill all storage with NaN (0xff in bytes: NaN as e4m3 and e5m2, -1 as int8)."""
    for plane in (*cache.k, *cache.v):
        plane.view(torch.uint8).fill_(0xFF)  # NaN in every float


def far_away(cache: LayerCache, skipped: int) -> LayerCache:
    """The same contents in a pool with `skipped` pages of NaN before them."""
    plan = KVPlan(
        Role.TARGET, "far", ComputeDtype.BFLOAT16, "far", cache.page_size, (cache.spec,)
    )  # fmt: skip
    pages = skipped + len(cache.k[0])
    pool = KVPool(plan, pages, device=cache.k[0].device, scales={})
    pool.arena.bytes.fill_(0xFF)
    far = pool[cache.spec.geometry.index]
    for to, plane in zip((*far.k, *far.v), (*cache.k, *cache.v), strict=True):
        to[skipped:] = plane
    return replace(far, k_scale=cache.k_scale, v_scale=cache.v_scale)


def prepare(
    k: KVDtype,
    v: KVDtype | None = None,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dims: tuple[int, int] = (64, 64),
    page_size: int = 16,
    sequences: Sequence[tuple[int, int]] = ((40, 1), (23, 23)),
    causal: bool = True,
    window: int | None = None,
    sinks: bool = False,
    softcap: float = 0.0,
    padding: int = 0,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    per_head_scales: bool = False,
    latent: bool = False,
    seed: int = 0,
    wide: WideRows | None = None,
) -> Case:
    """sequences: (stored tokens, of them new). Everything before the step is stored by the reference;
    all other storage is poison. The step's own rows are returned, not yet written. latent: rows of K
    alone, whose first head_dims[1] numbers are values.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    geometry = driver.layer(
        num_q_heads=heads[0], num_kv_heads=heads[1], head_dim_k=head_dims[0],
        head_dim_v=head_dims[1], window=window, sinks=sinks, softcap=softcap, causal=causal,
    )  # fmt: skip
    if latent:
        geometry = replace(geometry, attention=Attention.MLA)
    made = driver.plan([geometry], k, v, page_size=page_size)
    made = replace(made, layers=(replace(made.layers[0], wide=wide),))
    needed = [-(-length // page_size) for length, _ in sequences]
    order = (torch.randperm(sum(needed) + 3, generator=generator) + 1).tolist()
    tables = [[order.pop() for _ in range(n)] for n in needed]
    scales = {}
    for side, name in ((Side.K, k), (Side.V, v or k)):
        if name.format.takes_outside_scale:
            count = heads[1] if per_head_scales else 1
            base = 0.004 if name is KVDtype.NVFP4 else 0.02
            scales[(0, side)] = base * (1 + torch.rand(count, generator=generator))
    pool = KVPool(made, sum(needed) + 4, device=torch.device(device), scales=scales)
    cache = pool[0]
    poison(cache)
    if cache.wide is not None:
        poison(cache.wide)
    lengths = [length for length, _ in sequences]

    def step_of(new: Sequence[int], stored: Sequence[int], padding: int = 0) -> Step:
        cpu = driver.step(tables, stored, new, page_size=page_size, causal=causal, padding=padding)
        return Step(
            cpu.cu_seqlens_q.to(device), cpu.seqlens_kv.to(device), cpu.page_table.to(device),
            cpu.slot_mapping.to(device), cpu.positions.to(device),
            max_seqlen_q=cpu.max_seqlen_q, max_seqlen_kv=cpu.max_seqlen_kv, causal=causal,
        )  # fmt: skip

    before = [length - new for length, new in sequences]
    if sum(before):
        rows = sum(before)
        EXACT.write(
            cache, normal(rows, heads[1], head_dims[0]).to(device),
            None if latent else normal(rows, heads[1], head_dims[1]).to(device),
            step_of(before, before),
        )  # fmt: skip
    new = [n for _, n in sequences]
    tokens = sum(new) + padding
    return Case(
        cache,
        step_of(new, lengths, padding),
        AttentionParams(
            head_dims[0] ** -0.5, window, softcap,
            normal(heads[0]).to(device) if sinks else None,
        ),
        normal(tokens, heads[0], head_dims[0]).to(device),
        normal(tokens, heads[1], head_dims[0]).to(device),
        None if latent else normal(tokens, heads[1], head_dims[1]).to(device),
    )  # fmt: skip


def one_token(x: Case) -> Case:
    """The step of a case's last token alone. x: one sequence, all of whose rows are stored."""
    step = replace(
        x.step,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32, device=x.q.device),
        slot_mapping=x.step.slot_mapping[-1:],
        positions=x.step.positions[-1:],
        max_seqlen_q=1,
    )
    v = None if x.v is None else x.v[-1:]
    return replace(x, step=step, q=x.q[-1:], k=x.k[-1:], v=v)


def rounding(heads: int, size: int, device: str = "cpu") -> Tensor:
    """Matrices that keys are rounded with, strictly upper triangular: [heads, size, size]."""
    generator = torch.Generator().manual_seed(3)
    return (0.2 * torch.randn(heads, size, size, generator=generator)).triu(1).to(device)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error; infinite where anything is NaN."""
    value = float((found.double() - expected).norm() / expected.norm())
    return value if value == value else float("inf")


def same_bytes(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(a, b, strict=True)
    )
