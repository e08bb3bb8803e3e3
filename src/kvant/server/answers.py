"""OpenAI's answers, from the engine's pieces: whole, and as server-sent events."""

from __future__ import annotations

import math
import time
import uuid
from dataclasses import dataclass
from typing import Any

from kvant.engine.tokenizing import Tokenizing
from kvant.server.messages import Logprobs, Piece
from kvant.server.service import Running, Sequence

_LEAST_LOGPROB = -9999.0
"""JSON has no -Infinity; OpenAI writes this."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How one endpoint answers. chat: messages and deltas, else text."""

    chat: bool
    model: str
    tokenizing: Tokenizing | None

    def head(self) -> dict[str, Any]:
        """What the whole answer, or every chunk of it, begins with; ids are the server's own."""
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.model,
        }

    def whole(self, running: Running, texts: dict[int, str]) -> dict[str, Any]:
        """The answer of a request that has ended."""
        choices = []
        for sequence in running.sequences.values():
            ended = sequence.ended
            assert ended is not None
            assert ended.finish_reason is not None
            choice: dict[str, Any] = {"index": sequence.index}
            text = texts[sequence.index]
            if self.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
                choice["logprobs"] = self._chat_logprobs(ended.logprobs)
            else:
                choice["text"] = text
                choice["logprobs"] = self._completion_logprobs(ended.logprobs)
            choice["finish_reason"] = ended.finish_reason.value
            choice["stop_reason"] = ended.stop_reason
            choices.append(choice)
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self.head(), "object": kind, "choices": choices, "usage": usage(running)}

    def roles(self, running: Running) -> list[dict[str, Any]]:
        """What a stream of a chat begins with, for every choice."""
        if not self.chat:
            return []
        return [
            {"index": s.index, "delta": {"role": "assistant", "content": ""}, **_NOTHING_YET}
            for s in running.sequences.values()
        ]

    def part(self, sequence: Sequence, pieces: list[Piece]) -> dict[str, Any]:
        """One chunk's choice: all that has come for one sequence."""
        text, last = "".join(piece.text for piece in pieces), pieces[-1]
        choice: dict[str, Any] = {"index": sequence.index}
        if self.chat:
            choice["delta"] = {"content": text} if text else {}
        else:
            choice["text"] = text
        choice["logprobs"] = None
        choice["finish_reason"] = None if last.finish_reason is None else last.finish_reason.value
        if last.finish_reason is not None:
            choice["stop_reason"] = last.stop_reason
        return choice

    def chunk(self, head: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**head, "object": kind, "choices": choices}

    # -- log-probabilities ---------------------------------------------------------------------

    def _chat_logprobs(self, logprobs: tuple[Logprobs, ...] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        content = [
            {
                **self._one(one.token_id, one.logprob),
                "top_logprobs": [self._one(token, value) for token, value in one.top],
            }
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, logprobs: tuple[Logprobs, ...] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        tokens = [self._text(one.token_id) for one in logprobs]
        offsets, place = [], 0
        for token in tokens:
            offsets.append(place)
            place += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": [
                {self._text(token): _finite(value) for token, value in one.top} for one in logprobs
            ],
            "text_offset": offsets,
        }

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._text(token_id)
        broken = "\N{REPLACEMENT CHARACTER}" in text  # part of a character: its bytes are not known
        return {
            "token": text,
            "logprob": _finite(logprob),
            "bytes": None if broken else list(text.encode()),
        }

    def _text(self, token_id: int) -> str:
        if self.tokenizing is None:
            return f"token_id:{token_id}"
        return self.tokenizing.backend.decode([token_id], skip_special_tokens=False)


_NOTHING_YET: dict[str, Any] = {"logprobs": None, "finish_reason": None}


def usage(running: Running) -> dict[str, Any]:
    """Prompts are counted once each, however many answers they get; so are their cached tokens."""
    sequences = list(running.sequences.values())
    first = sequences[:: running.copies]
    cached = sum(s.ended.num_cached_tokens for s in first if s.ended is not None)
    answer = sum(s.num_tokens for s in sequences)
    return {
        "prompt_tokens": running.num_prompt_tokens,
        "completion_tokens": answer,
        "total_tokens": running.num_prompt_tokens + answer,
        "prompt_tokens_details": {"cached_tokens": min(cached, running.num_prompt_tokens)},
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB) if not math.isnan(logprob) else _LEAST_LOGPROB
