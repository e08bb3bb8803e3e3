"""Follows the thinking in one answer: counts its tokens, and ends it when a budget is used up.

Models mark their thinking with tokens of their own. `thinking_marks` finds them in a vocabulary; a model that
writes such marks as plain text has none, because text can be cut into tokens in many ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNLIMITED = -1
"""The budget of a request whose thinking is followed and never ended."""

NO_THINKING = (
    "thinking_token_budget: no token of this model is known to end its thinking; max_tokens bounds thinking "
    "and answer together"
)


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The tokens by which a model marks its thinking.

    opening: the tokens that begin it. end: the token that ends it. closing: the tokens that end it when the
    budget is used up; the last one is `end`. turns: tokens that begin a turn of the conversation. fork: the
    index in `opening` of the first token that begins nothing else. answer: tokens between thinking and a
    required form. barred: tokens that would leave thinking in another way.
    """

    opening: tuple[int, ...]
    end: int
    closing: tuple[int, ...]
    turns: frozenset[int] = frozenset()
    fork: int = 0
    answer: tuple[int, ...] = ()
    barred: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Family:
    """The texts of a family's marks. Every text of `tokens` must be one token; see `ThinkingMarks`."""

    tokens: tuple[str, ...]
    opening: str
    end: str
    turns: tuple[str, ...]
    closing: str = ""
    fork: int = 0
    answer: str = ""
    barred: tuple[str, ...] = ()


_FAMILIES = (
    _Family(
        ("<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
        "<|channel|>analysis<|message|>", "<|end|>", ("<|start|>",),
        fork=1,
        answer="<|start|>assistant<|channel|>final<|message|>",
        barred=("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>"),
    ),
    _Family(
        ("<|channel>", "<channel|>"),
        "<|channel>thought", "<channel|>", ("<|turn>", "<tool_response|>"),
        closing="\n<channel|>",
    ),
    _Family(("[THINK]", "[/THINK]"), "[THINK]", "[/THINK]", ("[/INST]",)),
    _Family(
        ("<think>", "</think>"),
        "<think>", "</think>",
        ("<|im_start|>", "<｜Assistant｜>", "<|assistant|>", "<|start_header_id|>"),  # noqa: RUF001
    ),
)  # fmt: skip


def thinking_marks(tokenizer: Tokenizer, vocab_size: int) -> ThinkingMarks | None:
    """Returns the marks of the model with this tokenizer, or None. vocab_size: the width of its logits."""
    for family in _FAMILIES:
        if all(tokenizer.token_to_id(text) is not None for text in family.tokens):
            found = _marks(tokenizer, family)
            used = (*found.opening, *found.closing, *found.answer)
            return found if max(used) < vocab_size else None
    return None


def _marks(tokenizer: Tokenizer, family: _Family) -> ThinkingMarks:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    def known(texts: Sequence[str]) -> list[int]:
        found = (tokenizer.token_to_id(text) for text in texts)
        return [token for token in found if token is not None]

    end = tokenizer.token_to_id(family.end)
    assert end is not None
    closing = ids(family.closing) if family.closing else (end,)
    return ThinkingMarks(
        opening=ids(family.opening),
        end=end,
        closing=closing,
        turns=frozenset(known(family.turns)),
        fork=family.fork,
        answer=ids(family.answer) if family.answer else (),
        barred=tuple(known(family.barred)),
    )


class Thinking:
    """Where one answer stands, token by token.

    budget: the most tokens of thinking in the whole answer, without marks; `UNLIMITED` for any number. Tokens
    of thinking in the prompt do not count. is_inside: the next token is one of thinking, or of its end.
    has_thought: thinking began, in the prompt's last turn or in the answer. matched: how many tokens of
    `opening` the answer ends with, while they are not complete.
    """

    def __init__(self, marks: ThinkingMarks, budget: int, prompt_token_ids: Sequence[int]) -> None:
        self.marks = marks
        self._left = None if budget == UNLIMITED else budget
        self._closed = 0  # tokens of `closing` that were forced
        self.matched = 0
        self.is_inside = self.has_thought = False
        turn = next(
            (
                place + 1
                for place in range(len(prompt_token_ids) - 1, -1, -1)
                if prompt_token_ids[place] in marks.turns
            ),
            0,
        )
        for token in prompt_token_ids[turn:]:
            if self.is_inside:
                self.is_inside = token != marks.end
            else:
                self._look_for_opening(token)

    @property
    def left(self) -> int | None:
        """How many more tokens of thinking are allowed; None for any number."""
        return self._left

    @property
    def forced(self) -> int | None:
        """The token that must come next because the budget is used up; else None."""
        if not self.is_inside or self._left != 0:
            return None
        return self.marks.closing[self._closed]

    @property
    def banned(self) -> int | None:
        """The token that must not come next: it would begin thinking again with nothing left; else None."""
        if self.is_inside or self._left != 0 or not self.has_thought:
            return None
        return self.marks.opening[self.marks.fork] if self.matched == self.marks.fork else None

    def advance(self, token: int) -> None:
        """Appends one token to the answer."""
        if not self.is_inside:
            self._look_for_opening(token)
        elif token == self.marks.end:
            self.is_inside, self._closed = False, 0
        elif self._left == 0:
            self._closed += 1
        elif self._left is not None:
            self._left -= 1

    def _look_for_opening(self, token: int) -> None:
        opening = self.marks.opening
        if token != opening[self.matched]:
            self.matched = 0
        self.matched += token == opening[self.matched]
        if self.matched == len(opening):
            self.matched = 0
            self.is_inside = self.has_thought = True
