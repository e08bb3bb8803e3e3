"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the sequence's last tokens.

Sources: arXiv 2304.04487, 2311.08252. It needs no model and no cache, since drafts are copied from the
sequence itself. It is good for answers that quote: summaries, code edits and repetitions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kvant.attention.base import Step
from kvant.speculative.base import Ask, Proposer, Setting


class NgramProposer:
    """Drafts by prompt lookup. min_tokens, max_tokens: the least and most last tokens that must match."""

    taps: tuple[int, ...] = ()

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min, self._max = min_tokens, max_tokens

    def zero(self, pages: Sequence[int]) -> None:
        """Does nothing: this proposer has no pages."""

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [look_up(ask.token_ids, ask.num_tokens, self._min, self._max) for ask in asks]

    def learn(self, step: Step, hidden: tuple[Tensor, ...]) -> None:
        """Does nothing with hidden [T, hidden_size]: each `Ask` has all tokens."""


def look_up(token_ids: Sequence[int], count: int, min_tokens: int, max_tokens: int) -> list[int]:
    """Returns up to `count` tokens after an earlier occurrence of the longest repeated suffix of `token_ids`.

    The suffix must have min_tokens tokens, else [] is returned; more than max_tokens are not compared. Among
    equally long matches, takes the last one that `count` tokens follow, else the first.
    """
    tokens = np.asarray(token_ids)
    last = len(tokens) - 1
    places = np.flatnonzero(tokens[:last] == tokens[last])  # ends of possible matches
    length, found = 1, places if min_tokens == 1 else places[:0]
    while len(places) and length < max_tokens:
        places = places[places >= length]
        places = places[tokens[places - length] == tokens[last - length]]
        length += 1
        if len(places) and length >= min_tokens:
            found = places
    if not len(found):
        return []
    followed = found[found + count <= last]
    start = int(followed[-1] if len(followed) else found[0]) + 1
    drafts: list[int] = tokens[start : start + count].tolist()
    return drafts


def build(setting: Setting) -> Proposer:
    options = setting.options
    return NgramProposer(options["prompt_lookup_min"], options["prompt_lookup_max"])
