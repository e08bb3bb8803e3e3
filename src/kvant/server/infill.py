"""/infill, in the form that llama.cpp's editor plugins use: the text between a prefix and a suffix."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from kvant.scheduling.request import FinishReason
from kvant.server import wire
from kvant.server.answers import Call, generate
from kvant.server.api_error import ApiError, bad_request
from kvant.server.config import Limits
from kvant.server.fill import IndentedText
from kvant.server.messages import Piece
from kvant.server.parameters import INFILL
from kvant.server.requests import (
    Facts,
    Generation,
    check_model,
    parse,
    read_text,
)
from kvant.server.service import Running, Sequence
from kvant.server.unserved import refuse_unserved

_OWN = frozenset(
    {
        "input_prefix", "input_suffix", "input_extra", "prompt", "n_indent", "t_max_predict_ms",
        "return_tokens", "response_fields",
    }
)  # fmt: skip
_MOST_FIELDS = 64


async def infill(call: Call) -> Response:
    """Answers /infill."""
    service = call.service
    limits = service.config.limits
    generation, body = await call.read(lambda data: read_infill(data, limits, service.require()))
    writer = _Writer(
        service.config.served_names[0], generation, body, IndentedText(body.n_indent or 0)
    )
    return await generate(call, writer, key=call.key)


def read_infill(data: bytes, limits: Limits, facts: Facts) -> tuple[Generation, wire.InfillBody]:
    """Parses and checks a body of /infill. Raises ApiError."""
    body, raw = parse(data, wire.InfillBody)
    refuse_unserved(raw, wire.InfillBody, INFILL)
    check_model(body.model, facts)
    if facts.infill is None:
        raise bad_request(
            "this model has no tokens for filling in the middle: serve one that has, such as "
            "Qwen2.5-Coder, or use /v1/completions with the text before the gap as prompt",
            "input_prefix",
        )
    files = body.input_extra or ()
    if len(files) > limits.prompts:
        raise bad_request(
            f"input_extra: {len(files)} files; the limit is {limits.prompts}", "input_extra"
        )
    if len(body.response_fields or ()) > _MOST_FIELDS:
        raise bad_request(f"response_fields: the limit is {_MOST_FIELDS} names", "response_fields")
    prompt = facts.infill.prompt(
        body.input_prefix, body.input_suffix, [(one.filename, one.text) for one in files]
    )
    text = {name: raw[name] for name in wire.InfillBody.__struct_fields__ if name in raw}
    for name in _OWN:
        text.pop(name, None)
    if body.n_predict == 0:
        text["n_predict"] = 1  # the engine generates at least one token, and the writer drops it
    # `prompt` is the beginning of the answer: it comes after the marks, and the model continues it.
    found = read_text({**text, "prompt": prompt + (body.prompt or "")}, limits, facts)
    return replace(found, source="input_prefix"), body


@dataclass(slots=True)
class _Writer:
    """Writes llama.cpp's answers. A stream has no [DONE]: its last event has `stop` set."""

    model: str
    generation: Generation
    body: wire.InfillBody
    text: IndentedText
    tokens: list[int] = field(default_factory=list)
    is_late: bool = False
    ping: bytes = b": ping\n\n"

    def begin(self, running: Running) -> list[bytes]:
        return []

    def add(self, running: Running, sequence: Sequence, pieces: list[Piece]) -> list[bytes]:
        if self.body.n_predict == 0:
            return []
        tokens = [token for piece in pieces for token in piece.token_ids]
        self.tokens += tokens
        shown = self.text.feed("".join(piece.text for piece in pieces))
        limit = self.body.t_max_predict_ms or 0
        if limit and "\n" in self.text.text:
            self.is_late = (time.monotonic() - running.first_token) * 1000 > limit
        running.is_enough = self.text.is_over or self.is_late
        if not (self.generation.stream and shown):
            return []
        answer = wire.InfillAnswer(
            content=shown,
            tokens=tokens,
            stop=False,
            tokens_predicted=len(self.tokens),
            tokens_evaluated=running.num_prompt_tokens,
        )
        return [self._event(answer)]

    def end(self, running: Running) -> list[bytes]:
        return [self._event(self._last(running, self.text.finish()))]

    def fail(self, fault: ApiError) -> list[bytes]:
        return [b"data: " + msgspec.json.encode(fault.body) + b"\n\n"]

    def whole(self, running: Running) -> object:
        return self._chosen(self._last(running, self.text.text))

    def _last(self, running: Running, content: str) -> wire.InfillAnswer:
        (sequence,) = running.sequences.values()
        ended = sequence.ended
        kind, word = "limit", ""
        if ended is not None and ended.finish_reason is FinishReason.STOP:
            kind = "eos"
            if isinstance(ended.stop_reason, str):
                kind, word = "word", ended.stop_reason
        cached = UNSET if ended is None else ended.num_cached_tokens
        shows_tokens = self.body.return_tokens and not self.generation.stream
        return wire.InfillAnswer(
            content=content,
            tokens=self.tokens if shows_tokens else [],
            stop=True,
            model=self.model,
            tokens_predicted=len(self.tokens),
            tokens_evaluated=running.num_prompt_tokens,
            tokens_cached=cached,
            has_new_line="\n" in self.text.text,
            truncated=False,
            stop_type=kind,  # type: ignore[arg-type]
            stopping_word=word,
            timings=self._timings(running, 0 if ended is None else ended.num_cached_tokens),
        )

    def _timings(self, running: Running, cached: int) -> wire.InfillTimings:
        first = running.first_token or running.last_event
        prompt = running.num_prompt_tokens - cached
        # The first token comes with the prompt's last step.
        return wire.InfillTimings(
            cached,
            *_paced(prompt, first - running.started),
            *_paced(len(self.tokens), running.last_event - first),
        )

    def _chosen(self, answer: wire.InfillAnswer) -> object:
        """Returns the answer, or only the fields named in `response_fields`."""
        if self.body.response_fields is None:
            return answer
        found: dict[str, Any] = {}
        whole = msgspec.to_builtins(answer)
        for name in self.body.response_fields:
            value: Any = whole
            for step in name.split("/"):
                value = value.get(step) if isinstance(value, dict) else None
            if value is not None:
                found[name] = value
        return found

    def _event(self, answer: wire.InfillAnswer) -> bytes:
        return b"data: " + msgspec.json.encode(self._chosen(answer)) + b"\n\n"


def _paced(count: int, seconds: float) -> tuple[int, float, float, float]:
    """Returns the number of tokens, milliseconds, milliseconds per token, and tokens per second."""
    return (
        count,
        seconds * 1000,
        seconds * 1000 / count if count else 0.0,
        count / seconds if seconds > 0 else 0.0,
    )
