"""One trial: a backend writes and reads a small step over poisoned storage; compare with the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvant.attention.base import AttentionBackend, AttentionParams, ExpandingBackend, Step
from kvant.attention.long import list_long
from kvant.attention.need import Need
from kvant.attention.verify import definition, rounded
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.format import Side
from kvant.kv.pool import SCRATCH_PAGE, KVPool, LayerCache
from kvant.kv.spec import Choice, KVPlan, LayerSpec, Role, Scale, ScaleState, Source

# Maximum error of one output row (a query's result in one head), relative to its length. Products
# with float32 sums leave a few rounding errors of the narrowest operand. A wrong mask, page, scale or code
# gives errors of 3e-2 and more in these trials.
_BOUND = {
    ComputeDtype.FLOAT32: 5e-5,
    ComputeDtype.FLOAT16: 3e-3,
    ComputeDtype.BFLOAT16: 1.5e-2,
    ComputeDtype.FLOAT64: 1e-9,
}
_ROUNDED_BOUND = 1e-2
"""Bound for rows with rounded queries and probabilities, whose rounding is defined."""
_SCALE = 0.013
"""About the largest of a thousand normal numbers over e4m3's largest value."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The input of a trial. sequences: (stored tokens, new tokens in this step), few new tokens first.

    odd_rows: also write difficult rows, and tokens without a slot. longest: the step's `max_seqlen_kv`, if
    that is more than its longest sequence.
    rounds_long: as in the backend's `BackendInfo`.
    """

    need: Need
    sequences: tuple[tuple[int, int], ...]
    odd_rows: bool = False
    rounds_long: bool = False
    longest: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a trial.

    error: error of the worst row. bound: its limit. wrong: what is wrong, or None.
    """

    error: float
    bound: float
    wrong: str | None


def bound_of(need: Need) -> float:
    """Returns the maximum error between the stored bytes and the result."""
    stored = {need.k, need.v or need.k}
    if need.wide is not None:
        stored |= {choice.dtype for choice in need.wide.sides.values()}
    bound = _BOUND[need.compute]
    if need.compute is ComputeDtype.FLOAT16 and KVDtype.BFLOAT16 in stored:
        bound = _BOUND[ComputeDtype.BFLOAT16]
    return bound


@torch.no_grad()
def run_trial(backend: AttentionBackend, trial: Trial, device: torch.device) -> Outcome:
    """Writes, compares all storage byte by byte, attends, and compares every number.

    Takes any backend that serves `trial.need`; allocates the trial's own pages on `device`.
    """
    made = _Case(trial, device)
    expected = [
        plane
        for cache in made.caches
        for plane in definition.stored_planes(cache, made.k, made.v, made.step.slot_mapping)
    ]
    backend.write(made.cache, made.k, made.v, made.step)
    bound = bound_of(trial.need)
    labels = [label for cache in made.caches for label, _ in cache.spec.planes]
    for label, found, right in zip(labels, made.cache_planes(), expected, strict=True):
        differing = _bytes(found) != _bytes(right)
        if bool(differing.any()):
            count = int(differing.any(-1).sum())
            text = f"{count} rows of {label} are stored with other bytes than the format defines"
            return Outcome(float("nan"), bound, text)
    _poison_free_memory(made.q, trial.need.layer.head_dim_v)
    found = backend.attend(made.cache, made.q, made.step, made.params).double()
    exact = made.asked
    worst = 0.0
    if trial.rounds_long and made.step.long:
        right, undecided = rounded.attend(made.cache, made.q, made.step, made.params)
        exact = made.step.long[0].first_token
        rows = slice(exact, made.asked)
        worst = _worst(found[rows], right[rows], undecided[rows])
        if not worst <= _ROUNDED_BOUND:
            return Outcome(worst, _ROUNDED_BOUND, _errs(worst, _ROUNDED_BOUND))
    else:
        right = definition.attend(made.cache, made.q, made.step, made.params)
    if exact:
        worst_exact = _worst(found[:exact], right[:exact])
        worst = max(worst, worst_exact)
        if not worst_exact <= bound:
            return Outcome(worst_exact, bound, _errs(worst_exact, bound))
    worst_expanded = _expanded(backend, made)
    worst = max(worst, worst_expanded)
    if not worst_expanded <= bound:
        return Outcome(worst, bound, _errs(worst, bound) + ", over expanded latents")
    if bool((found[made.asked :] != 0).any()):
        return Outcome(worst, bound, "tokens that belong to no sequence get numbers")
    return Outcome(worst, bound, None)


def _expanded(backend: AttentionBackend, made: _Case) -> float:
    """Returns the worst error of long queries over expanded latents; 0 if the backend expands none."""
    if made.cache.spec.v is not None or not made.step.long:
        return 0.0
    g = made.cache.spec.geometry
    heads, rank, rotary = g.num_q_heads, g.head_dim_v, g.head_dim_k - g.head_dim_v
    nope = 2 * rotary
    q = made.normal(len(made.q), heads, nope + rotary).to(made.q.device)
    if not isinstance(backend, ExpandingBackend) or not backend.expands(q):
        return 0.0
    weight = made.normal(heads, 2 * nope, rank).to(made.q.device) * rank**-0.5

    def expand(rows: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.einsum("ml,hwl->mhw", rows[:, :rank], weight.to(rows.dtype))
        turned = rows[:, None, rank:].expand(-1, heads, -1)
        return torch.cat([both[..., :nope], turned], -1), both[..., nope:]

    out = q.new_empty(len(q), heads, nope)
    params = replace(made.params, scale=(nope + rotary) ** -0.5)
    backend.attend_expanded(made.cache, q, out, made.step, params, expand)
    right = definition.attend_expanded(made.cache, q, made.step, params, expand)
    rows = slice(made.step.long[0].first_token, made.asked)
    return _worst(out[rows].double(), right[rows])


def _worst(found: Tensor, right: Tensor, undecided: Tensor | float = 0.0) -> float:
    """Returns the largest relative error of rows [n, num_q_heads, head_dim_v] by row length; inf for NaN.

    undecided: [n, num_q_heads], error that is allowed for ties.
    """
    errors = ((found - right).norm(dim=-1) - undecided).clamp(min=0) / right.norm(dim=-1)
    return float(errors.nan_to_num(nan=float("inf")).max())


def _errs(worst: float, bound: float) -> str:
    return f"a row errs by {worst:.2g} of its length, where {bound:.2g} is rounding"


class _Case:
    """Storage full of NaN except for the rows of earlier steps, and a step that writes the rest.

    q: [T, num_q_heads, head_dim_k]; k and v have the same T. The first `asked` tokens belong to the
    sequences, the others are odd rows and tokens that are written nowhere.
    """

    def __init__(self, trial: Trial, device: torch.device) -> None:
        need, g = trial.need, trial.need.layer
        self._random = torch.Generator().manual_seed(trial.seed)
        self._dtype = getattr(torch, need.compute.value)
        self._device = device
        size = need.page_size
        counts = [-(-length // size) for length, _ in trial.sequences]
        odd = _odd_rows(g.head_dim_k, self._dtype), _odd_rows(g.head_dim_v, self._dtype)
        num_odd = odd[0].shape[0] if trial.odd_rows else 0
        spare = -(-num_odd // size)  # pages outside all sequences, for the odd rows
        order = torch.randperm(sum(counts) + spare + 1, generator=self._random) + SCRATCH_PAGE + 1
        self._pages = order.tolist()
        tables = [[self._pages.pop() for _ in range(count)] for count in counts]
        self.cache = self._storage(need, len(order) + 1)
        for plane in self.cache_planes():
            plane.view(torch.uint8).fill_(0xFF)  # NaN in every float

        places = list(zip(trial.sequences, tables, strict=True))
        old = [(0, length - new, table) for (length, new), table in places]
        self._write_by_definition(_slots_of(old, size))
        slots = _slots_of([(length - new, length, t) for (length, new), t in places], size)
        self.asked = len(slots)
        extra = _slots_of([(0, num_odd, self._pages)], size)
        if trial.odd_rows:
            extra += [-1, -1, -1]
        k, v = (self.normal(len(slots), g.num_kv_heads, d) for d in (g.head_dim_k, g.head_dim_v))
        if trial.odd_rows:
            k, v = (
                torch.cat([x, part[:, None].expand(-1, g.num_kv_heads, -1), x[:3]])
                for x, part in ((k, odd[0]), (v, odd[1]))
            )
        self.k, self.v = k.to(device), None if need.v is None else v.to(device)
        self.q = self.normal(len(slots) + len(extra), g.num_q_heads, g.head_dim_k).to(device)
        self.step = replace(
            _step(trial.sequences, tables, slots + extra, g.causal, device),
            max_seqlen_kv=max(trial.longest, *(length for length, _ in trial.sequences)),
        )
        self.params = AttentionParams(
            scale=g.head_dim_k**-0.5,
            window=g.window,
            softcap=g.softcap,
            sinks=self.normal(g.num_q_heads).to(device) if g.sinks else None,
        )

    @property
    def caches(self) -> list[LayerCache]:
        """Returns the layer's storage, and that of its wide rows."""
        return [self.cache, *([] if self.cache.wide is None else [self.cache.wide])]

    def cache_planes(self) -> list[Tensor]:
        return [plane for cache in self.caches for plane in (*cache.k, *cache.v)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random).to(self._dtype)

    def _storage(self, need: Need, num_pages: int) -> LayerCache:
        """Returns a pool of one layer. Scales from outside: one per head for K, one for all of V."""
        scales = {}
        for side, dtype, count in (
            (Side.K, need.k, need.layer.num_kv_heads),
            (Side.V, need.v, 1),
        ):
            if dtype is None:
                continue
            if dtype.format.takes_outside_scale:
                scales[(0, side)] = _SCALE * (1 + torch.rand(count, generator=self._random))
            if dtype.format.takes_rounding and side is Side.K:
                head = need.layer.head_dim_k
                dense = 0.3 * torch.randn(
                    need.layer.num_kv_heads, head, head, generator=self._random
                )
                scales[(0, side)] = dense.triu(1)
        plan = _plan(need)
        return KVPool(plan, num_pages, device=self._device, scales=scales)[0]

    def _write_by_definition(self, slots: list[int]) -> None:
        g = self.cache.spec.geometry
        k, v = (
            self.normal(len(slots), g.num_kv_heads, d).to(self._device)
            for d in (g.head_dim_k, g.head_dim_v)
        )
        where = torch.tensor(slots, dtype=torch.int64, device=self._device)
        written = v if self.cache.spec.v is not None else None
        for cache in self.caches:
            stored = definition.stored_planes(cache, k, written, where)
            for plane, after in zip((*cache.k, *cache.v), stored, strict=True):
                plane.copy_(after)


def _plan(need: Need) -> KVPlan:
    def choice(dtype: KVDtype) -> Choice:
        return Choice(dtype, Source.EXPLICIT, "verification", (), Scale(ScaleState.NONE))

    layer = replace(need.layer, index=0, shared_with=None)
    v = None if need.v is None else choice(need.v)
    spec = LayerSpec(layer, choice(need.k), v, None, wide=need.wide)
    return KVPlan(Role.TARGET, "verification", need.compute, "", need.page_size, (spec,))


def _step(
    sequences: Sequence[tuple[int, int]],
    tables: list[list[int]],
    slots: list[int],
    causal: bool,
    device: torch.device,
) -> Step:
    lengths = np.array([length for length, _ in sequences])
    new = np.array([count for _, count in sequences])
    width = max(len(table) for table in tables)
    padded = [table + [SCRATCH_PAGE] * (width - len(table)) for table in tables]
    step = Step(
        cu_seqlens_q=torch.tensor([0, *np.cumsum(new)], dtype=torch.int32, device=device),
        seqlens_kv=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_table=torch.tensor(padded, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        positions=torch.zeros(len(slots), dtype=torch.int64, device=device),
        max_seqlen_q=int(new.max()),
        max_seqlen_kv=int(lengths.max()),
        causal=causal,
    )
    return list_long(step, new, lengths)


def _slots_of(parts: Sequence[tuple[int, int, list[int]]], page_size: int) -> list[int]:
    """Returns slots of the tokens first..end of each sequence, by its pages."""
    return [
        pages[position // page_size] * page_size + position % page_size
        for first, end, pages in parts
        for position in range(first, end)
    ]


def _odd_rows(head_dim: int, dtype: torch.dtype) -> Tensor:
    """Returns finite rows [n, head_dim] that are difficult for formats."""
    largest = torch.finfo(dtype).max
    ramp = torch.linspace(-1, 1, head_dim, dtype=torch.float64)
    outlier = ramp.clone()
    outlier[head_dim // 3] = largest
    rows = [
        torch.zeros(head_dim, dtype=torch.float64),
        torch.full((head_dim,), 0.7, dtype=torch.float64),
        torch.full((head_dim,), -3.0, dtype=torch.float64),
        outlier,
        ramp.sign() * largest,
        ramp * 2.0**-14,
        ramp * 1000,
        ramp.abs(),
    ]
    return torch.stack(rows).to(dtype)


def _poison_free_memory(q: Tensor, head_dim_v: int) -> None:
    """Makes an unwritten row likely to read NaN, because the allocator returns this memory next."""
    torch.full((*q.shape[:2], head_dim_v), float("nan"), dtype=q.dtype, device=q.device)


def _bytes(plane: Tensor) -> Tensor:
    return plane.contiguous().view(torch.uint8)
