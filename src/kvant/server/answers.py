"""OpenAI's answers, from the engine's pieces: whole, and as server-sent events."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from kvant.engine.tokenizing import Tokenizing
from kvant.scheduling.request import TokenLogprobs
from kvant.server.messages import Piece
from kvant.server.service import Running, Sequence
from kvant.server.validate import Generation

_LEAST_LOGPROB = -9999.0
"""JSON has no -Infinity; OpenAI writes this."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How one endpoint answers one request. chat: messages and deltas, else text."""

    chat: bool
    model: str
    tokenizing: Tokenizing | None
    generation: Generation

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
        sequences = list(running.sequences.values())
        for place, sequence in enumerate(sequences):
            # Of the answers to one prompt the first has read it for all.
            first = sequences[place - place % running.copies]
            sequence.prompt_logprobs = first.prompt_logprobs
            ended = sequence.ended
            assert ended is not None
            assert ended.finish_reason is not None
            choice: dict[str, Any] = {"index": sequence.index}
            text = texts[sequence.index]
            if self.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = self._echoed(sequence) + text
            choice["logprobs"] = self._logprobs(sequence, sequence.logprobs)
            choice["finish_reason"] = ended.finish_reason.value
            choice["stop_reason"] = ended.stop_reason
            if not self.chat and self.generation.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._prompt_logprobs(sequence)
            choices.append(choice)
        kind = "chat.completion" if self.chat else "text_completion"
        answer = {**self.head(), "object": kind, "choices": choices, "usage": usage(running)}
        if self.chat and self.generation.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs(sequences[0])
        return answer

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
            choice["text"] = self._echoed(sequence) + text
        fresh = [one for piece in pieces for one in piece.logprobs]
        choice["logprobs"] = self._logprobs(sequence, fresh)
        choice["finish_reason"] = None if last.finish_reason is None else last.finish_reason.value
        if last.finish_reason is not None:
            choice["stop_reason"] = last.stop_reason
        sequence.begun = True
        return choice

    def chunk(self, head: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**head, "object": kind, "choices": choices}

    def _echoed(self, sequence: Sequence) -> str:
        """The prompt, at the beginning of an answer that repeats it."""
        if not self.generation.echo or sequence.begun:
            return ""
        prompt = self.generation.prompts[sequence.index // self.generation.n]
        if isinstance(prompt, str):
            return prompt
        return (
            "".join(self._text(token) for token in prompt)
            if self.tokenizing is None
            else (self.tokenizing.backend.decode(list(prompt), skip_special_tokens=False))
        )

    # -- log-probabilities ---------------------------------------------------------------------

    def _logprobs(self, sequence: Sequence, fresh: Items[TokenLogprobs]) -> dict[str, Any] | None:
        """Of the tokens that are shown now."""
        num_top = self.generation.sampling.logprobs
        if num_top is None:
            return None
        if self.chat:
            return self._chat_logprobs(fresh) if fresh or not self.generation.stream else None
        entries: list[tuple[int, TokenLogprobs | None]] = [(one.token_id, one) for one in fresh]
        if self.generation.echo and not sequence.begun:
            of_prompt = (None, *(sequence.prompt_logprobs or ()))
            entries = [*zip(sequence.prompt_token_ids, of_prompt, strict=True), *entries]
        if not entries and self.generation.stream:
            return None
        return self._completion_logprobs(sequence, entries, num_top)

    def _chat_logprobs(self, logprobs: Items[TokenLogprobs]) -> dict[str, Any]:
        content = [
            {
                **self._one(one.token_id, one.logprob),
                "top_logprobs": [self._one(token, value) for token, value in one.top],
            }
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _completion_logprobs(
        self, sequence: Sequence, entries: list[tuple[int, TokenLogprobs | None]], num_top: int
    ) -> dict[str, Any]:
        """The first token of a prompt follows nothing and has null."""
        tokens = [self._text(token) for token, _ in entries]
        offsets = []
        for token in tokens:
            offsets.append(sequence.num_logprob_chars)
            sequence.num_logprob_chars += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if one is None else _finite(one.logprob) for _, one in entries],
            "top_logprobs": [
                None
                if one is None
                else {self._text(token): _finite(value) for token, value in one.top[:num_top]}
                for _, one in entries
            ],
            "text_offset": offsets,
        }

    def _prompt_logprobs(self, sequence: Sequence) -> list[dict[str, Any] | None]:
        """vLLM's shape: for every prompt token its own entry and those of the likeliest, by id."""
        num_top = self.generation.prompt_logprobs
        found: list[dict[str, Any] | None] = [None]
        for one in sequence.prompt_logprobs or ():
            ranked = [(token, value, rank) for rank, (token, value) in enumerate(one.top, 1)]
            shown = {token: (value, rank) for token, value, rank in ranked[:num_top]}
            shown.setdefault(one.token_id, (one.logprob, one.rank))
            found.append(
                {
                    str(token): {
                        "logprob": _finite(value),
                        "rank": rank,
                        "decoded_token": self._text(token),
                    }
                    for token, (value, rank) in shown.items()
                }
            )
        return found

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
