"""Estimates what formats cost on one layer and side, for any number of wide rows, from backward passes.

The model reads a window once, through transformers' modules and exact attention. It draws a next token at
every position. For small errors the KL divergence is half the mean square of what they change in the
log-likelihood of these tokens. A row changes it by its rounding error times the gradient of the row. So

    cost = 1/2 * sum over rows and KV heads of (gradient . error)^2 / positions

Errors are those of Kvant's codecs on the rows of this window, and taken as independent. A row that some
queries read wide has two gradients: of these queries, times the error of its wide form, and of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, Step, StepCall
from kvant.engine.llm import LLM
from kvant.kv.codecs import codec_for
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side
from kvant.kv.pool import SCRATCH_PAGE, KVPool, LayerCache
from kvant.kv.spec import KVPlan
from kvant.measure.own_engine import runner_of
from kvant.measure.quality.compare import OnProgress
from kvant.measure.quality.kept import Arrays
from kvant.measure.tuning.search import Place
from kvant.models.forward_info import ForwardChoice
from kvant.models.load import load_model
from kvant.models.loaded import LoadedModel
from kvant.models.modules.info import INFO as MODULES

SAMPLES = 2
"""Backward passes per window, each for other next tokens."""
_QUERIES = 256  # whose attention weights are in memory together

Reach = tuple[int, int]
"""First and last tokens that are read wide: key j by query i where j < first or i - j < last."""
_NONE: Reach = (0, 0)
Outside = Mapping[tuple[Side, KVDtype], KVPool]
"""Pools that have what the codec of a side's format takes from outside the pages, of every layer."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What one side of one layer stores. wide: the format of rows within `reach`, None for no such rows."""

    place: Place
    narrow: KVDtype
    wide: KVDtype | None
    reach: Reach


def stored_at(place: Place, plan: KVPlan) -> Stored:
    """Returns what a plan stores in this place."""
    index, side = place
    spec = plan.layers[index]
    choice = spec.k if side is Side.K else spec.v
    assert choice is not None
    rows = spec.wide
    wide = None if rows is None else rows.sides.get(side)
    if rows is None or wide is None:
        return Stored(place, choice.dtype, None, _NONE)
    return Stored(place, choice.dtype, wide.dtype, (rows.sink, rows.recent))


class Estimator:
    """Estimates costs by a second copy of the model, with decoded weights in transformers' modules.

    wide: the plan that stores the model dtype. plan_of: returns the plan that stores a format on one side of
    every layer. The model must be one that `checks.check_tunable` allows.
    """

    def __init__(self, llm: LLM, wide: KVPlan, plan_of: Callable[[Side, KVDtype], KVPlan]) -> None:
        self._llm = llm
        self._wide = wide
        self._plan_of = plan_of
        self._model: LoadedModel | None = None
        self._outside: dict[tuple[Side, KVDtype], KVPool] = {}

    def costs(
        self, asked: Sequence[Stored], ids: Tensor, seed: int, on_progress: OnProgress
    ) -> Arrays:
        """Returns `costs`, float64 [len(asked)]: estimated KL divergences per position of ids [T] int64."""
        if self._model is None:
            target = self._llm.planned.target
            self._model = load_model(
                target.local.path, self._wide, target.geometry, ForwardChoice(MODULES),
                device=runner_of(self._llm).device, rotary_length=self._llm.planned.rotary_length,
            )  # fmt: skip
        scales = runner_of(self._llm).model.scales_for
        for one in asked:
            key = one.place[1], one.narrow
            if key not in self._outside:
                plan = self._plan_of(*key)
                self._outside[key] = _no_pages(plan, scales(plan))
        sums = np.zeros(len(asked))
        backend = _Gradients(asked, self._outside, sums)
        call = StepCall(
            _step(len(ids)), _no_pages(self._wide, {}), (backend,) * len(self._wide.layers)
        )
        logits = self._model.forward_for_gradients(ids, call)
        gradient, drawn = _draw(logits, torch.Generator().manual_seed(seed))
        for sample, tokens in enumerate(drawn):
            others = gradient.gather(1, tokens)
            gradient.scatter_(1, tokens, others + 1)
            gradient[-1] = 0  # no token follows the last one
            logits.backward(gradient, retain_graph=sample < SAMPLES - 1)  # type: ignore[no-untyped-call]
            gradient.scatter_(1, tokens, others)
            on_progress(len(ids))
        return {"costs": sums / (2 * SAMPLES * (len(ids) - 1))}


def _no_pages(plan: KVPlan, scales: Mapping[tuple[int, Side], Tensor]) -> KVPool:
    return KVPool(plan, SCRATCH_PAGE + 1, device=torch.device("cpu"), scales=scales)


def _step(num_tokens: int) -> Step:
    """Returns the step that reads a whole text. Nothing is stored, so its page table is empty."""
    ends = torch.tensor([num_tokens], dtype=torch.int32)
    return Step(
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32),
        seqlens_kv=ends,
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.full((num_tokens,), -1),
        positions=torch.arange(num_tokens),
        max_seqlen_q=num_tokens,
        max_seqlen_kv=num_tokens,
        lengths=(num_tokens,),
    )


@torch.no_grad()
def _draw(logits: Tensor, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    """Draws next tokens: SAMPLES of int64 [T, 1].

    Also returns the gradient of a token's log-likelihood by logits [T, vocab_size], without the 1 at that
    token. It takes the memory of `logits`, which no backward pass reads.
    """
    gradient, drawn = logits.detach(), []
    for some in torch.split(gradient, _QUERIES):
        likely = some.float().softmax(-1)
        drawn.append(torch.multinomial(likely, SAMPLES, replacement=True, generator=generator))
        some.copy_(likely.neg_())
    return gradient, list(torch.split(torch.cat(drawn), 1, dim=1))


class _Gradients:
    """A backend that stores nothing. Its backward pass adds squares of (gradient . error) to `sums`."""

    name = "gradients"

    def __init__(self, asked: Sequence[Stored], outside: Outside, sums: Any) -> None:
        self._asked: dict[int, list[tuple[int, Stored]]] = {}
        for number, one in enumerate(asked):
            self._asked.setdefault(one.place[0], []).append((number, one))
        self._outside = outside
        self._sums = sums
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None:
        """Keeps k and v until `attend`."""
        assert v is not None, "latents are refused"
        self._rows[cache.spec.geometry.index] = k, v

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        """Attends with q [T, num_q_heads, head_dim] over all rows, exactly."""
        index = cache.spec.geometry.index
        k, v = (
            one if one.requires_grad else one.detach().requires_grad_()
            for one in self._rows.pop(index)
        )
        reaches = {one.reach for _, one in self._asked.get(index, ())} - {_NONE}
        layer = _Layer(index, params, tuple(reaches), self._add)
        out: Tensor = _Attention.apply(q, k, v, layer)  # type: ignore[no-untyped-call]
        return out

    def _add(
        self, index: int, rows: Mapping[Side, Tensor], found: Mapping[Reach, Mapping[Side, Tensor]]
    ) -> None:
        """rows, found: [T, num_kv_heads, head_dim]; found: gradients, by queries outside each reach."""
        errors: dict[tuple[Side, KVDtype], Tensor] = {}

        def error(side: Side, dtype: KVDtype, *, is_wide: bool) -> Tensor:
            if (side, dtype) not in errors:
                scale = None
                if not is_wide:
                    cache = self._outside[side, dtype][index]
                    scale = cache.k_outside if side is Side.K else cache.v_scale
                codec, x = codec_for(dtype), rows[side].float()
                read = codec.decode(codec.encode(x, scale), scale, torch.float32)
                errors[side, dtype] = read - x
            return errors[side, dtype]

        for number, one in self._asked.get(index, ()):
            side, far = one.place[1], found[one.reach][one.place[1]]
            changed = (far * error(side, one.narrow, is_wide=False)).sum(-1)
            if one.wide is not None:
                near = found[_NONE][side] - far
                changed += (near * error(side, one.wide, is_wide=True)).sum(-1)
            self._sums[number] += float(changed.double().square().sum())


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's attention. add: takes gradients of its rows, once per backward pass."""

    index: int
    params: AttentionParams
    reaches: tuple[Reach, ...]
    add: Callable[[int, Mapping[Side, Tensor], Mapping[Reach, Mapping[Side, Tensor]]], None]


class _Attention(torch.autograd.Function):
    """Causal attention of one text, with weights of few queries in memory at a time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layer: _Layer) -> Tensor:
        by_head, keys, values = _by_head(q, k), _by_head(k, k)[:, 0], _by_head(v, k)[:, 0]
        out = torch.empty(*by_head.shape[:3], v.shape[2])
        for some in _parts(q.shape[0], layer.params.window):
            p = _weights(by_head, keys, some, layer.params)
            out[:, :, some.queries] = some.split(p @ values[:, some.keys])
        ctx.save_for_backward(q, k, v, out)
        ctx.layer = layer
        return _by_token(out, q.dtype)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out = ctx.saved_tensors
        layer: _Layer = ctx.layer
        by_head, keys, values = _by_head(q, k), _by_head(k, k)[:, 0], _by_head(v, k)[:, 0]
        from_out = _by_head(given[0], k)
        # A softmax's gradient subtracts the mean gradient of its weights, which is out . from_out.
        mean = (from_out * out).sum(-1, keepdim=True)
        from_q = torch.empty_like(by_head)
        found = {
            reach: {Side.K: torch.zeros_like(keys), Side.V: torch.zeros_like(values)}
            for reach in (_NONE, *layer.reaches)
        }
        for some in _parts(q.shape[0], layer.params.window):
            p = _weights(by_head, keys, some, layer.params)
            above, asking = (x[:, :, some.queries].flatten(1, 2) for x in (from_out, by_head))
            scores = above @ values[:, some.keys].mT
            scores -= mean[:, :, some.queries].flatten(1, 2)
            scores *= p
            scores *= layer.params.scale
            from_q[:, :, some.queries] = some.split(scores @ keys[:, some.keys])
            _add_products(found, some, {Side.K: (scores, asking), Side.V: (p, above)})
        tokens_first = {
            reach: {side: one.transpose(0, 1) for side, one in gradients.items()}
            for reach, gradients in found.items()
        }
        layer.add(layer.index, {Side.K: k, Side.V: v}, tokens_first)
        every = tokens_first[_NONE]
        return (
            _by_token(from_q, q.dtype),
            every[Side.K].to(k.dtype),
            every[Side.V].to(v.dtype),
            None,
        )


def _by_head(x: Tensor, k: Tensor) -> Tensor:
    """Returns x [T, num_heads, D] as float32 [num_kv_heads, heads per KV head, T, D]."""
    tokens, heads, size = x.shape
    grouped = x.float().reshape(tokens, k.shape[1], heads // k.shape[1], size)
    return grouped.permute(1, 2, 0, 3).contiguous()


def _by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.permute(2, 0, 1, 3).flatten(1, 2).to(dtype)


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries start .. stop, and the keys from `first` on that they see."""

    start: int
    stop: int
    first: int

    @property
    def queries(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def keys(self) -> slice:
        return slice(self.first, self.stop)

    def split(self, rows: Tensor) -> Tensor:
        """Returns rows [num_kv_heads, queries per head * queries, m] by query head."""
        return rows.view(len(rows), -1, self.stop - self.start, rows.shape[-1])

    def distances(self, keys: slice) -> Tensor:
        """Returns how far these keys are behind the queries, [queries, keys]."""
        return torch.arange(self.start, self.stop)[:, None] - torch.arange(keys.start, keys.stop)


def _parts(num_tokens: int, window: int | None) -> Iterator[_Part]:
    for start in range(0, num_tokens, _QUERIES):
        first = 0 if window is None else max(0, start - window + 1)
        yield _Part(start, min(start + _QUERIES, num_tokens), first)


def _weights(q: Tensor, k: Tensor, some: _Part, params: AttentionParams) -> Tensor:
    """Returns attention weights [num_kv_heads, queries per head * queries, keys] of some queries."""
    scores = q[:, :, some.queries].flatten(1, 2) @ k[:, some.keys].mT
    scores *= params.scale
    by_query = some.split(scores)
    if params.window is not None:
        by_query.masked_fill_(some.distances(some.keys) >= params.window, -torch.inf)
    later = by_query[..., some.start - some.first :]
    later.masked_fill_(some.distances(some.queries) < 0, -torch.inf)
    return scores.softmax(-1)


def _add_products(
    found: Mapping[Reach, Mapping[Side, Tensor]],
    some: _Part,
    factors: Mapping[Side, tuple[Tensor, Tensor]],
) -> None:
    """Adds gradients of rows by some queries, outside each reach.

    factors: of each side [num_kv_heads, queries, keys] and [num_kv_heads, queries, D], whose product over
    queries is added.
    """
    for side, (weights, rows) in factors.items():
        whole = weights.mT @ rows
        for (sink, recent), gradients in found.items():
            if (sink, recent) == _NONE:
                gradients[side][:, some.keys] += whole
                continue
            # All queries read narrow keys from `begin` to `far`, and some queries those from there to `end`.
            begin = max(sink, some.first)
            far = max(begin, some.start - recent + 1)
            end = max(far, some.stop - recent)
            gradients[side][:, begin:far] += whole[:, begin - some.first : far - some.first]
            if end > far:
                near = some.split(weights[:, :, far - some.first : end - some.first])
                near = near * (some.distances(slice(far, end)) >= recent)
                gradients[side][:, far:end] += near.flatten(1, 2).mT @ rows
