"""Changes that one request makes to its logits before a token is chosen. One object per request.

Rules see one row and the request's own tokens, never a batch:

    edits = rules.edits(vocab_size)    returns the changes of all rules to the next row
    rules.advance(token)               appends a token to the answer

A row after drafts is handled once the drafts are accepted, so rules never have to go back. Changes are
data (`Edits`), so that many rows are changed at once (`edited`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvant.errors import RequestError
from kvant.kernels.transfer import to_device
from kvant.sampling.sampling_params import SamplingParams
from kvant.sampling.thinking import UNLIMITED, Thinking, ThinkingMarks

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvant.sampling.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes of one row of logits, in the order of application.

    allowed: [vocab] bool, the only tokens allowed; None allows all. banned: ids that get -inf. bias:
    (token id, value to add). seen: [s], penalised token ids. factors: [s], the repetition penalty of each
    (1 for none). amounts: [s], subtracted after that. asked_as: the field of the grammar, for messages.
    """

    allowed: Tensor | None
    banned: list[int]
    bias: tuple[tuple[int, float], ...]
    seen: NDArray[np.int64]
    factors: NDArray[np.float64]
    amounts: NDArray[np.float64]
    asked_as: str | None


class LogitRules:
    """The rules of one request, applied in the order that `SamplingParams` gives.

    prompt_token_ids: used by the repetition penalty only. ends: tokens that end the answer, which are banned
    until min_tokens. bad_words: token sequences that must not appear. grammar: the request's own matcher.
    thinking: follows the model's thinking, which a grammar waits for. ahead: how many tokens the device may
    choose before the host learns the first one.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        ends: Iterable[int],
        bad_words: Iterable[tuple[int, ...]] = (),
        grammar: Grammar | None = None,
        thinking: Thinking | None = None,
        ahead: int = 0,
    ) -> None:
        self._params = params
        self._grammar = grammar
        self._thinking = thinking
        self._ahead = ahead
        form = params.structured_outputs
        self._knows_thinking = form is not None and form.with_thinking
        self._is_only_thinking = (
            thinking is not None and grammar is None and not params.changes_logits
        )
        # Tokens of the marks around thinking that must come next, in order.
        self._forced: list[int] = []
        # The form begins once thinking is over; until then the model may still begin to think.
        self._waits = self._form_waits(thinking)
        if thinking is not None and self._waits and thinking.matched:
            self._forced = list(thinking.marks.opening[thinking.matched :])
        self._ends = sorted(set(ends))
        self._bad_words = tuple(set(bad_words))
        self._output: list[int] = []
        repeats = params.repetition_penalty != 1.0
        self._penalises = bool(repeats or params.frequency_penalty or params.presence_penalty)
        self._seen = SeenTokens(sorted(set(prompt_token_ids)) if repeats else ())

    @property
    def needs_host(self) -> bool:
        """False if the rules cannot change the next `ahead` tokens: the thinking has a budget for them."""
        if self._thinking is None or not self._is_only_thinking:
            return True
        return self._thinking.left is not None and self._thinking.left < self._ahead

    @property
    def is_complete(self) -> bool:
        """True if only the end may follow: the answer is complete in its grammar."""
        return self._grammar is not None and not self._waits and self._grammar.is_complete

    def advance(self, token: int) -> None:
        """Appends one token to the answer. Raises RequestError if the grammar does not allow it."""
        if self._thinking is not None:
            self._think(self._thinking, token)
        elif self._grammar is not None:
            self._grammar.advance(token)
        self._output.append(token)
        if self._penalises:
            self._seen.add(token, 1)

    def edits(self, vocab_size: int) -> Edits:
        """Returns the changes of the next row."""
        params, forced = self._params, self._next_forced
        if forced is not None:
            return _only(forced, vocab_size, self._asked_as)
        # A tokenizer may have tokens beyond the logits, which can never be chosen.
        banned = [token for token in self._banned() if token < vocab_size]
        if len(self._output) < params.min_tokens:
            banned += self._ends
        seen, times, is_prompt = self._seen.numbers
        factors = np.where((times > 0) | is_prompt, params.repetition_penalty, 1.0)
        amounts = params.frequency_penalty * times + params.presence_penalty * (times > 0)
        return Edits(
            self._allowed(vocab_size),
            banned,
            params.bias_pairs,
            seen,
            factors,
            amounts,
            self._asked_as,
        )

    @property
    def _asked_as(self) -> str | None:
        return None if self._grammar is None else self._grammar.asked_as

    # -- thinking ------------------------------------------------------------------------------

    @property
    def _is_thinking(self) -> bool:
        return self._thinking is not None and self._thinking.is_inside

    @property
    def _next_forced(self) -> int | None:
        if self._forced:
            return self._forced[0]
        return None if self._thinking is None else self._thinking.forced

    def _form_waits(self, thinking: Thinking | None) -> bool:
        """Returns whether a form that describes no thinking begins only behind it."""
        if self._grammar is None or self._knows_thinking or thinking is None:
            return False
        return thinking.is_inside or not thinking.has_thought

    def _think(self, thinking: Thinking, token: int) -> None:
        """Follows the thinking by one token. The grammar reads the token if it belongs to the form."""
        was_inside, was_forced = thinking.is_inside, bool(self._forced)
        if was_forced:
            self._forced.pop(0)
        if self._waits and not (was_inside or was_forced):
            self._waits = token == thinking.marks.opening[0]
        if self._knows_thinking:  # its text of thinking is free, so only the end is told
            is_of_form = not was_inside or token == thinking.marks.end
        else:
            is_of_form = not self._waits
        if self._grammar is not None and is_of_form:
            self._grammar.advance(token)
        thinking.advance(token)
        if not self._waits:
            return
        if was_inside and not thinking.is_inside:
            self._forced = list(thinking.marks.answer)
        elif thinking.matched == 1 and not was_forced:  # the form allows no part of the opening
            self._forced = list(thinking.marks.opening[1:])
        self._waits = thinking.is_inside or bool(self._forced)

    # -- the next row --------------------------------------------------------------------------

    def _allowed(self, vocab_size: int) -> Tensor | None:
        """Returns the tokens that the grammar and allowed_token_ids allow."""
        found: Tensor | None = None
        if self._params.allowed_token_ids is not None:
            found = torch.zeros(vocab_size, dtype=torch.bool)
            found[list(self._params.allowed_token_ids)] = True
        if self._grammar is not None and not self._is_thinking:
            by_form = self._grammar.allowed(vocab_size)
            if self._waits:
                assert self._thinking is not None
                by_form[self._thinking.marks.opening[0]] = True
            found = by_form if found is None else found & by_form
        return found

    def _banned(self) -> list[int]:
        """Returns the last token of each bad word whose other tokens the answer ends with, and tokens that
        thinking must not contain.
        """
        found = []
        if self._thinking is not None and (token := self._thinking.banned) is not None:
            found.append(token)
        if self._thinking is not None and self._grammar is not None and self._is_thinking:
            found += [*self._ends, *self._thinking.marks.barred]  # the form is still to come
        for word in self._bad_words:
            *before, last = word
            if not before or self._output[-len(before) :] == before:
                found.append(last)
        return found


class SeenTokens:
    """The distinct tokens of a prompt and an answer, with their counts in the answer."""

    def __init__(self, prompt: Sequence[int]) -> None:
        count = len(prompt)
        self._places = {token: place for place, token in enumerate(prompt)}
        self._num_prompt = count
        self._tokens = np.zeros(count + 16, np.int64)
        self._tokens[:count] = prompt
        self._times = np.zeros(count + 16, np.int64)

    def add(self, token: int, times: int) -> None:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
                self._times = np.concatenate([self._times, np.zeros_like(self._times)])
            self._tokens[place] = token
        self._times[place] += times

    @property
    def numbers(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """The distinct tokens, their counts in the answer, and whether the prompt contains them; [s] each."""
        count = len(self._places)
        return self._tokens[:count], self._times[:count], np.arange(count) < self._num_prompt


def edited(rows: Tensor, edits: Sequence[Edits]) -> Tensor:
    """Returns a copy of logits [n, vocab] with each row's own edits applied. edits: one per row."""
    rows = rows.clone()
    masked = [(place, one.allowed) for place, one in enumerate(edits) if one.allowed is not None]
    if masked:
        index = _there(np.array([place for place, _ in masked]), rows)
        allowed = to_device(torch.stack([mask for _, mask in masked]), rows.device)
        rows[index] = rows[index].masked_fill(~allowed, -torch.inf)
    banned = [(place, token) for place, one in enumerate(edits) for token in one.banned]
    if banned:
        at = _there(np.array(banned).T, rows)
        rows.index_put_((at[0], at[1]), rows.new_full((), -torch.inf))
    bias = [(place, *pair) for place, one in enumerate(edits) for pair in one.bias]
    if bias:
        at = _there(np.array([entry[:2] for entry in bias]).T, rows)
        values = _there(np.array([entry[2] for entry in bias]), rows).to(rows.dtype)
        rows[at[0], at[1]] += values  # a request names no token twice
    counts = [len(one.seen) for one in edits]
    if any(counts):
        owners = np.repeat(np.arange(len(edits)), counts)
        at = _there(np.stack([owners, np.concatenate([one.seen for one in edits])]), rows)
        both = np.stack(
            [
                np.concatenate([one.factors for one in edits]),
                np.concatenate([one.amounts for one in edits]),
            ]
        )
        factors, amounts = _there(both, rows).to(rows.dtype)
        values = rows[at[0], at[1]]
        values = torch.where(values > 0, values / factors, values * factors)
        rows[at[0], at[1]] = values - amounts
    return rows


def _only(token: int, vocab_size: int, asked_as: str | None) -> Edits:
    """Returns the changes that leave one token."""
    allowed = torch.zeros(vocab_size, dtype=torch.bool)
    allowed[token] = True
    none = np.zeros(0, np.int64)
    return Edits(allowed, [], (), none, none.astype(np.float64), none.astype(np.float64), asked_as)


def nothing_left(edits: Edits) -> RequestError:
    return RequestError(
        "what this request allows and forbids leaves no token to go on with", param=edits.asked_as
    )


def _there(numbers: NDArray[Any], rows: Tensor) -> Tensor:
    return to_device(torch.from_numpy(np.ascontiguousarray(numbers)), rows.device)


def make_rules(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    *,
    eos_token_ids: Iterable[int],
    tokenizer: Tokenizer | None,
    grammar: Grammar | None = None,
    marks: ThinkingMarks | None = None,
    ahead: int = 0,
) -> LogitRules | None:
    """Builds the rules of a request; None if its logits stay unchanged.

    marks: of the model's thinking. ahead: see `LogitRules`. Raises RequestError for bad_words without a
    tokenizer.
    """
    budget, thinking = params.thinking_token_budget, None
    if marks is not None and budget is not None and (budget != UNLIMITED or grammar is not None):
        thinking = Thinking(marks, budget, prompt_token_ids)
    if grammar is None and thinking is None and not params.changes_logits:
        return None
    ends = [*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids]
    words = [word for text in params.bad_texts for word in _spellings(text, tokenizer)]
    return LogitRules(
        params, prompt_token_ids, ends=ends, bad_words=words, grammar=grammar, thinking=thinking,
        ahead=ahead,
    )  # fmt: skip


def _spellings(text: str, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """Returns the token sequences of a bad word at the start of a text and after a space."""
    if tokenizer is None:
        raise RequestError("bad_words need a tokenizer, and this model has none", param="bad_words")
    bare = text.lstrip(" ") or text
    try:
        found = tokenizer.encode_batch_fast([bare, " " + bare], add_special_tokens=False)
    except TypeError:  # tokenizers takes no lone surrogates
        raise RequestError(
            "bad_words contains text that is not valid Unicode", param="bad_words"
        ) from None
    spellings = [tuple(one.ids) for one in found]
    if not all(spellings):
        raise RequestError("bad_words holds a text that has no tokens", param="bad_words")
    return spellings
