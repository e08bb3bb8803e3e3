"""What one request changes in its logits before a token is chosen. One object for each request.

A rule sees one row and the request's own tokens, never a batch. Its state can go ahead and come back:

    row = rules.apply(logits)    the row with every rule applied
    rules.advance(token)         the answer has one more token
    rules.rollback(count)        the last `count` tokens are taken back

so that a row that lies some draft tokens beyond the answer gets the same rules as when it is reached
token by token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvant.engine.sampling_params import SamplingParams
from kvant.errors import RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvant.engine.grammar import Grammar


class LogitRules:
    """The rules of one request, in the order that `SamplingParams` names.

    prompt_token_ids: read by the repetition penalty alone. ends: tokens that end the answer, banned
    before min_tokens. bad_words: token sequences. grammar: the request's own matcher.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        ends: Iterable[int],
        bad_words: Iterable[tuple[int, ...]] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self._params = params
        self._grammar = grammar
        self._ends = sorted(set(ends))
        self._bad_words = tuple(set(bad_words))
        self._output: list[int] = []
        self._counts: Counter[int] = Counter()
        repeats = params.repetition_penalty != 1.0
        self._prompt = sorted(set(prompt_token_ids)) if repeats else []

    @property
    def is_complete(self) -> bool:
        """Nothing may follow but the end: the answer has the form that was asked for."""
        return self._grammar is not None and self._grammar.is_complete

    def advance(self, token: int) -> None:
        """The answer has one more token, which its row must have allowed. RequestError if it did not."""
        if self._grammar is not None:
            self._grammar.advance(token)
        self._output.append(token)
        self._counts[token] += 1

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        if count == 0:
            return
        assert count <= len(self._output)
        if self._grammar is not None:
            self._grammar.rollback(count)
        for token in self._output[-count:]:
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]
        del self._output[-count:]

    def apply(self, row: Tensor) -> Tensor:
        """The row, [vocab], as these rules leave it; `row` itself is not changed.

        RequestError where they leave no token.
        """
        row = self._allow(row)
        for token in self._banned():
            row[token] = -torch.inf
        pairs = self._params.bias_pairs
        if pairs:
            row[[token for token, _ in pairs]] += row.new_tensor([value for _, value in pairs])
        if len(self._output) < self._params.min_tokens and self._ends:
            row[self._ends] = -torch.inf
        self._penalise(row)
        if not torch.isfinite(row.max()):
            raise RequestError(
                "what this request allows and forbids leaves no token to go on with",
                param=None if self._grammar is None else self._grammar.asked_as,
            )
        return row

    def _allow(self, row: Tensor) -> Tensor:
        """A copy in which only what the grammar and allowed_token_ids allow is left."""
        allowed = self._params.allowed_token_ids
        if allowed is None:
            row = row.clone()
        else:
            index = list(allowed)
            kept = torch.full_like(row, -torch.inf)
            kept[index] = row[index]
            row = kept
        if self._grammar is not None:
            row.masked_fill_(~self._grammar.allowed(row.numel()).to(row.device), -torch.inf)
        return row

    def _banned(self) -> list[int]:
        """The last tokens of bad words whose other tokens stand at the answer's end."""
        found = []
        for word in self._bad_words:
            *before, last = word
            if not before or self._output[-len(before) :] == before:
                found.append(last)
        return found

    def _penalise(self, row: Tensor) -> None:
        params = self._params
        if params.repetition_penalty != 1.0:
            seen = sorted({*self._prompt, *self._counts})
            values = row[seen]
            scaled = values * params.repetition_penalty
            row[seen] = torch.where(values > 0, values / params.repetition_penalty, scaled)
        if self._counts and (params.frequency_penalty or params.presence_penalty):
            tokens = list(self._counts)
            counts = row.new_tensor([self._counts[token] for token in tokens])
            row[tokens] -= params.frequency_penalty * counts + params.presence_penalty


def make_rules(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    *,
    eos_token_ids: Iterable[int],
    tokenizer: Tokenizer | None,
    grammar: Grammar | None = None,
) -> LogitRules | None:
    """The rules that a request needs; None where its logits stay as they are.

    RequestError for bad_words without a tokenizer to read them with.
    """
    needed = (
        params.min_tokens > 0
        or params.bias_pairs
        or params.bad_texts
        or params.allowed_token_ids is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or grammar is not None
    )
    if not needed:
        return None
    ends = [*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids]
    words = [word for text in params.bad_texts for word in _spellings(text, tokenizer)]
    return LogitRules(params, prompt_token_ids, ends=ends, bad_words=words, grammar=grammar)


def _spellings(text: str, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """A bad word's tokens as the beginning of a text, and behind a space."""
    if tokenizer is None:
        raise RequestError("bad_words need a tokenizer, and this model has none", param="bad_words")
    bare = text.lstrip(" ") or text
    try:
        found = tokenizer.encode_batch_fast([bare, " " + bare], add_special_tokens=False)
    except TypeError:  # tokenizers takes no lone surrogates
        raise RequestError("bad_words holds no valid Unicode text", param="bad_words") from None
    spellings = [tuple(one.ids) for one in found]
    if not all(spellings):
        raise RequestError("bad_words holds a text that has no tokens", param="bad_words")
    return spellings
