"""From logits to tokens, one row at a time: no row's result depends on the rows beside it.

The only randomness is one number for each new token, a hash of the request's seed and the token's place
in the answer. So a token depends on its logits, its seed and its place alone: not on the batch, on
preemption, or on what was drawn for others.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.engine.request import Sequence, TokenLogprobs
from kvant.engine.sampling_params import SamplingParams

_HEAD = 1024
"""Tokens that are sorted at first; only a flat distribution or a large top_k needs the whole row."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's token; None where its logits are no numbers to choose from (NaN, +Inf, all -Inf)."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


def sample(
    logits: Tensor, sequences: list[Sequence], eos_token_ids: frozenset[int]
) -> list[Sampled]:
    """One token for each row of logits [len(sequences), vocab]. The logits are not changed."""
    if not sequences:
        return []
    best, argmax = logits.max(dim=-1)  # NaN and +Inf anywhere in a row become its maximum
    sound = torch.isfinite(best).tolist()
    greedy = argmax.tolist()
    found = []
    for row, sequence in enumerate(sequences):
        if not sound[row]:
            found.append(Sampled(None))
            continue
        token = greedy[row]
        if not sequence.request.params.is_greedy or _banned(sequence, eos_token_ids):
            token = _choose(logits[row], sequence, eos_token_ids)
        found.append(Sampled(token, _logprobs(logits[row], token, sequence.request.params)))
    return found


def uniform(seed: int, place: int) -> float:
    """The number in [0, 1) with 53 random bits that belongs to a place in a seed's answer."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, place), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def _banned(sequence: Sequence, eos_token_ids: frozenset[int]) -> list[int]:
    """Tokens that would end the answer before min_tokens."""
    params = sequence.request.params
    if sequence.num_output_tokens >= params.min_tokens:
        return []
    return [*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids]


def _choose(row: Tensor, sequence: Sequence, eos_token_ids: frozenset[int]) -> int:
    params = sequence.request.params
    banned = _banned(sequence, eos_token_ids)
    if banned:
        row = row.clone()
        row[banned] = -torch.inf
    if params.is_greedy:
        return int(row.argmax())
    x = row.to(torch.float64)
    weights = ((x - x.max()) / params.temperature).exp_()
    u = uniform(sequence.request.seed, sequence.num_output_tokens)
    if params.top_k <= 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _draw(weights.cumsum(0), u)
    tokens, mass = _kept(row, weights, params)
    return int(tokens[_draw(mass, u)])


def _draw(mass: Tensor, u: float) -> int:
    """The entry in which the share u of the total falls. mass: cumulative sums, [n] float64."""
    index = torch.searchsorted(mass, u * mass[-1], right=True)
    return min(int(index), mass.numel() - 1)


def _kept(row: Tensor, weights: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Tokens that the filters leave, likeliest first (smaller ids first among equals), and their
    cumulative weights. Each filter keeps a beginning of that order, so the shortest one decides.

    Sorting the whole vocabulary costs more than everything else here: the likeliest `_HEAD` are tried
    first, without those as unlikely as the last, whose equals may be missing. What they cannot settle
    is sorted in full; the result is the same.
    """
    size = weights.numel()
    if size > _HEAD:
        ids = row.topk(_HEAD).indices  # the same order as the weights', in a narrower dtype
        values = weights[ids]
        complete = values > values.min()
        ids, by_id = ids[complete].sort()
        values, by_value = values[complete][by_id].sort(descending=True, stable=True)
        kept = _num_kept(values, weights, params)
        if kept is not None:
            return ids[by_value][:kept], values[:kept].cumsum(0)
    values, ids = weights.sort(descending=True, stable=True)
    kept = _num_kept(values, weights, params)
    assert kept is not None, "the whole row settles every filter"
    return ids[:kept], values[:kept].cumsum(0)


def _num_kept(values: Tensor, weights: Tensor, params: SamplingParams) -> int | None:
    """How many of the first `values` the filters keep; None if that cannot be told from these alone."""
    if values.numel() == 0:
        return None
    kept = values.numel()
    settled = kept == weights.numel()
    if params.min_p > 0.0:
        likely = int((values >= params.min_p * values[0]).sum())
        settled |= likely < kept
        kept = likely
    if params.top_k > 0:
        settled |= params.top_k <= kept
        kept = min(kept, params.top_k)
    if params.top_p >= 1.0:
        return kept if settled else None
    cut_before = params.min_p > 0.0 or params.top_k > 0
    if cut_before and not settled:
        return None
    mass = values[:kept].cumsum(0)
    total = mass[-1] if cut_before else weights.sum()
    needed = int((mass < params.top_p * total).sum()) + 1
    if needed <= kept:
        return needed
    return kept if settled else None


def _logprobs(row: Tensor, token: int, params: SamplingParams) -> TokenLogprobs | None:
    if params.logprobs is None:
        return None
    logprobs = row.to(torch.float64).log_softmax(0)
    values, ids = logprobs.topk(min(params.logprobs, row.numel()))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token, float(logprobs[token]), top)
