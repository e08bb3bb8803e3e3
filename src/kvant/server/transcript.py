"""Reads one answer's pieces as parts, with the tokens of each part, for the Messages and Responses APIs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvant.engine.text import Tokenizing
from kvant.sampling.logprobs import TokenLogprobs
from kvant.server.messages import Piece
from kvant.server.reply import Part, ReplyReader
from kvant.server.requests import Generation
from kvant.server.service import Running

_LEAST_LOGPROB = -9999.0
"""Stands for -Infinity, which JSON lacks, as in OpenAI's API."""


@dataclass(slots=True)
class Transcript:
    """Reads the pieces of a request with one answer. format: of its family, see `kvant.server.reply`.

    num_reasoning_tokens: tokens of pieces with reasoning. Pieces without visible text, such as marks, count
    with the next part.
    """

    generation: Generation
    format: dict[str, Any] | None
    num_reasoning_tokens: int = 0
    num_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    _reader: ReplyReader | None = None
    _held: list[TokenLogprobs] = field(default_factory=list)
    _num_held: int = 0

    def read(
        self, running: Running, pieces: list[Piece]
    ) -> Iterator[tuple[Part, list[TokenLogprobs]]]:
        """Yields each part with the log-probabilities of the tokens that came with it."""
        if self._reader is None and self.generation.reads_reply:
            self._reader = ReplyReader(self.format, self.generation.tools, running.rendered)
        for piece in pieces:
            parts = [Part("content", piece.text)] if piece.text else []
            if self._reader is not None:
                parts = self._reader.feed(piece.text)
                if piece.finish_reason is not None:
                    parts += self._reader.finish()
            self._num_held += len(piece.token_ids)
            self.num_tokens += len(piece.token_ids)
            self._held += piece.logprobs
            if piece.finish_reason is not None:
                self.finish_reason = piece.finish_reason.value
                self.stop_reason = piece.stop_reason
            for part in parts:
                if part.kind == "reasoning":
                    self.num_reasoning_tokens += self._num_held
                held, self._held = self._held, []
                self._num_held = 0
                if part.kind != "reasoning" or self.generation.include_reasoning:
                    yield part, held

    @property
    def is_cut(self) -> bool:
        """True if max_tokens or the context ended the answer."""
        return self.finish_reason == "length"

    @property
    def has_calls(self) -> bool:
        return self._reader is not None and self._reader.has_calls


def text_of(tokenizing: Tokenizing | None, token_id: int) -> str:
    """Returns the text of one token, or "token_id:N" without a tokenizer."""
    if tokenizing is None:
        return f"token_id:{token_id}"
    return tokenizing.backend.decode([token_id], skip_special_tokens=False)


def finite(logprob: float) -> float:
    """Returns a log-probability that JSON can write: at least _LEAST_LOGPROB, also for NaN."""
    return max(logprob, _LEAST_LOGPROB) if not math.isnan(logprob) else _LEAST_LOGPROB
