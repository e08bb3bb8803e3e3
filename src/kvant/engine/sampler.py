"""From logits to tokens, one row at a time: no row's result depends on the rows beside it.

The only randomness is one number for each new token, a hash of the request's seed and the token's place
in the answer. So a token depends on its logits, its seed and its place alone: not on the batch, on
preemption, or on what was drawn for others. Nor on how its row came about: `sample_one` gives a row that
lies some draft tokens beyond the answer the token that would be chosen there without a draft.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.engine.logit_rules import LogitRules
from kvant.engine.request import Sequence, TokenLogprobs
from kvant.engine.sampling_params import SamplingParams
from kvant.errors import RequestError

_HEAD = 1024
"""Tokens that are sorted at first; only a flat distribution or a large top_k needs the whole row."""

_LOGPROB_ROWS = 8
"""Rows whose log-probabilities are computed at once: the working memory is three of these in float64."""

_LOGPROB_BYTES = 256 * 2**20
"""Working memory of prompt_logprobs: a row of logits is held as the model made it and in float32."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's token; None where there is none to choose.

    error: the request's own rules leave no token. Without it the logits are no numbers to choose from
    (NaN, +Inf, all -Inf).
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: RequestError | None = None


Greedy = tuple[list[bool], list[int]]
"""For each row of logits: whether its largest is a finite number, and where that stands."""


def greedy(logits: Tensor) -> Greedy:
    """Of rows of logits [n, vocab]."""
    best, argmax = logits.max(dim=-1)  # NaN and +Inf anywhere in a row become its maximum
    return torch.isfinite(best).tolist(), argmax.tolist()


def sample(logits: Tensor, sequences: Items[Sequence]) -> list[Sampled]:
    """One token for each row of logits [len(sequences), vocab]. The logits are not changed."""
    rows = Rows(logits)
    return [rows.sample(row, sequence) for row, sequence in enumerate(sequences)]


class Rows:
    """Rows of logits, [n, vocab], each to be sampled for its own sequence when its turn comes.

    known: what `greedy` says of them, where somebody knows it already.
    """

    def __init__(self, logits: Tensor, known: Greedy | None = None) -> None:
        self._logits = logits
        self._sound, self._greedy = known or greedy(logits)

    def sample(self, row: int, sequence: Sequence) -> Sampled:
        """The token that follows what the sequence has now."""
        if not self._sound[row]:
            return Sampled(None)
        if is_plain(sequence):
            return Sampled(self._greedy[row])
        return _sample(self._logits[row], sequence, self._greedy[row], ())


def is_plain(sequence: Sequence) -> bool:
    """Whether its next token is the likeliest and nothing else is asked about it."""
    params = sequence.request.params
    return params.is_greedy and sequence.rules is None and params.logprobs is None


def sample_one(row: Tensor, sequence: Sequence, ahead: Items[int] = ()) -> Sampled:
    """The token that follows the sequence's tokens and then those of `ahead`. row: [vocab].

    Every token of `ahead` must be one that its own row allowed, as it is where a draft is read from its
    beginning up to the first token that differs from the one sampled. The sequence is left as it was.
    """
    best, argmax = row.max(dim=-1)
    if not torch.isfinite(best):
        return Sampled(None)
    return _sample(row, sequence, int(argmax), ahead)


def uniform(seed: int, place: int) -> float:
    """The number in [0, 1) with 53 random bits that belongs to a place in a seed's answer."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, place), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def max_prompt_logprobs(vocab_size: int) -> int:
    """Prompt tokens of one step that can have log-probabilities in 256 MiB of working memory."""
    left = _LOGPROB_BYTES - _LOGPROB_ROWS * 3 * 8 * vocab_size
    return max(1, left // (8 * vocab_size))


def token_logprobs(rows: Tensor, tokens: Items[int], num_top: int) -> list[TokenLogprobs]:
    """What rows of logits [n, vocab] say of n tokens, and of the `num_top` likeliest of each row.

    In float64, a few rows at a time.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(tokens), _LOGPROB_ROWS):
        part = rows[start : start + _LOGPROB_ROWS].to(torch.float64)
        wanted = torch.tensor(tokens[start : start + _LOGPROB_ROWS], device=rows.device)[:, None]
        own = part.gather(1, wanted)
        ranks = (part > own).sum(1) + 1
        norms = part.logsumexp(1, keepdim=True)
        values, ids = part.topk(min(num_top, part.shape[1]))
        found += [
            TokenLogprobs(token, logprob, rank, tuple(zip(top, logprobs, strict=True)))
            for token, logprob, rank, top, logprobs in zip(
                wanted[:, 0].tolist(),
                (own - norms)[:, 0].tolist(),
                ranks.tolist(),
                ids.tolist(),
                (values - norms).tolist(),
                strict=True,
            )
        ]
    return found


def _sample(row: Tensor, sequence: Sequence, greedy: int, ahead: Items[int]) -> Sampled:
    """greedy: the row's argmax, which is what most requests want."""
    params, rules = sequence.request.params, sequence.rules
    token = greedy
    if rules is not None:
        try:
            left = _after(rules, ahead, row)
        except RequestError as fault:
            return Sampled(None, error=fault)
        token = int(left.argmax())
    else:
        left = row
    if not params.is_greedy:
        u = uniform(sequence.request.seed, sequence.num_output_tokens + len(ahead))
        token = _choose(left, params, u)
    if params.logprobs is None:
        return Sampled(token)
    (logprobs,) = token_logprobs(row[None], [token], params.logprobs)
    return Sampled(token, logprobs)


def _after(rules: LogitRules, ahead: Items[int], row: Tensor) -> Tensor:
    """The row under the rules as they are after the tokens of `ahead`; they come back to where they are."""
    gone = 0
    try:
        for token in ahead:
            rules.advance(token)
            gone += 1
        return rules.apply(row)
    finally:
        rules.rollback(gone)


def _choose(row: Tensor, params: SamplingParams, u: float) -> int:
    x = row.to(torch.float64)
    weights = ((x - x.max()) / params.temperature).exp_()
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
