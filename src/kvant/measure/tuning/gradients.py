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
from kvant.errors import NotServable, WayOut
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
from kvant.models.stored import lists_experts

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


def check_gradients(llm: LLM) -> None:
    """Raises NotServable, with measured costs as the way out, for a model without such estimates."""
    reason = _refuse(llm)
    if reason is not None:
        raise NotServable(
            f"--costs gradients is not available for {llm.planned.target.local.name} here",
            why=reason,
            ways_out=(WayOut("measure each cost", ("--costs", "measured")),),
        )


def _refuse(llm: LLM) -> str | None:
    model, geometry = runner_of(llm).model, llm.planned.target.geometry
    if model.device.type != "cpu":
        return f"gradients are computed on a CPU, and the model runs on {model.device}"
    if model.choice.quantization is not None or model.choice.activations is not None:
        return "its products round weights or activations, which transformers' modules do not"
    if geometry.has_states:
        return "it has recurrent layers, of which Kvant has no gradients"
    if lists_experts(llm.planned.target.config):
        return "other errors choose other experts, which no gradient shows"
    for layer in geometry.layers:
        if layer.shared_with is not None:
            return f"layer {layer.index} reads the rows of layer {layer.shared_with}"
        for what, has in (
            ("a soft cap", layer.softcap), ("sinks", layer.sinks), ("no causal mask", not layer.causal)
        ):  # fmt: skip
            if has:
                return (
                    f"attention of layer {layer.index} has {what}, of which Kvant has no gradients"
                )
    return None


class Estimator:
    """Estimates costs by a second copy of the model, with decoded weights in transformers' modules.

    wide: the plan that stores the model dtype. plan_of: returns the plan that stores a format on one side of
    every layer.
    """

    def __init__(self, llm: LLM, wide: KVPlan, plan_of: Callable[[Side, KVDtype], KVPlan]) -> None:
        self._llm = llm
        self._wide = wide
        self._plan_of = plan_of
        self._model: LoadedModel | None = None
        self._outside: dict[tuple[Side, KVDtype], KVPool] = {}

    def costs(self, asked: Sequence[Stored], ids: Tensor, seed: int, told: OnProgress) -> Arrays:
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
        generator = torch.Generator().manual_seed(seed)
        for sample in range(SAMPLES):
            gradient = _of_drawn_tokens(logits, generator)
            logits.backward(gradient, retain_graph=sample < SAMPLES - 1)  # type: ignore[no-untyped-call]
            told(len(ids))
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
def _of_drawn_tokens(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draws a token at each position but the last; returns the gradient of their log-likelihood by logits."""
    found = torch.zeros_like(logits)
    for part, rows in zip(
        torch.split(logits[:-1], _QUERIES), torch.split(found[:-1], _QUERIES), strict=True
    ):
        likely = part.float().softmax(-1)
        drawn = torch.multinomial(likely, 1, generator=generator)
        rows.copy_(-likely)
        rows.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=rows.dtype))
    return found


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
        ctx.save_for_backward(q, k, v)
        ctx.layer = layer
        by_head, keys, values = _by_head(q, k), k.transpose(0, 1).float(), v.transpose(0, 1).float()
        out = torch.empty(*by_head.shape[:3], v.shape[2])
        for some in _parts(q.shape[0]):
            out[:, :, some] = (
                _weights(by_head, keys, some, layer.params) @ values[:, None, : some.stop]
            )
        return _by_token(out, q.dtype)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        layer: _Layer = ctx.layer
        by_head, keys, values = _by_head(q, k), k.transpose(0, 1).float(), v.transpose(0, 1).float()
        from_out = _by_head(given[0], k)
        from_q = torch.empty_like(by_head)
        found = {
            reach: {Side.K: torch.zeros_like(keys), Side.V: torch.zeros_like(values)}
            for reach in (_NONE, *layer.reaches)
        }
        for some in _parts(q.shape[0]):
            p = _weights(by_head, keys, some, layer.params)
            above, asking = from_out[:, :, some], by_head[:, :, some]
            from_p = above @ values[:, None, : some.stop].mT
            scores = p * (from_p - (p * from_p).sum(-1, keepdim=True)) * layer.params.scale
            from_q[:, :, some] = scores @ keys[:, None, : some.stop]
            distance, key = _distances(some)
            for (first, last), gradients in found.items():
                narrow = ((distance >= last) & (key >= first)).float()
                gradients[Side.K][:, : some.stop] += (scores * narrow).flatten(
                    1, 2
                ).mT @ asking.flatten(1, 2)
                gradients[Side.V][:, : some.stop] += (p * narrow).flatten(1, 2).mT @ above.flatten(
                    1, 2
                )
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
    """Returns x [T, num_q_heads, D] as float32 [num_kv_heads, queries per head, T, D]."""
    tokens, heads, size = x.shape
    grouped = x.float().reshape(tokens, k.shape[1], heads // k.shape[1], size)
    return grouped.permute(1, 2, 0, 3).contiguous()


def _by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.permute(2, 0, 1, 3).flatten(1, 2).to(dtype)


def _parts(num_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, _QUERIES):
        yield slice(start, min(start + _QUERIES, num_tokens))


def _distances(some: slice) -> tuple[Tensor, Tensor]:
    """Returns how far keys are behind queries, [n, m], and the keys' places, [m]."""
    key = torch.arange(some.stop)
    return torch.arange(some.start, some.stop)[:, None] - key, key


def _weights(q: Tensor, k: Tensor, some: slice, params: AttentionParams) -> Tensor:
    """Returns attention weights [num_kv_heads, queries per head, n, m] of some queries."""
    distance, _ = _distances(some)
    hidden = distance < 0
    if params.window is not None:
        hidden |= distance >= params.window
    scores = q[:, :, some] @ k[:, None, : some.stop].mT * params.scale
    return scores.masked_fill_(hidden, -torch.inf).softmax(-1)
