"""From bytes to a checked request: the one door for every endpoint that generates.

Pure functions. Whatever the bytes are, they return or raise ApiError, before anything is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from kvant.errors import RequestError
from kvant.sampling.sampling_params import PARAMS, SamplingParams
from kvant.server.api_error import ApiError, bad_request, of_request
from kvant.server.config import Limits
from kvant.server.protocol import ChatBody, ChatMessage, CompletionBody, GenerationBody
from kvant.server.structured import read_structured
from kvant.server.unsupported import IN_MESSAGES, IN_STREAM_OPTIONS, refuse_unsupported

COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not say; OpenAI's default."""

_SALT = re.compile(r"[A-Za-z0-9_-]+")
_MOST_SHOWN = 64
_MOST_DIGITS = 18
_Body = TypeVar("_Body", bound=BaseModel)

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the server knows of its model. defaults: what holds where a request does not say."""

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    has_tokenizer: bool
    defaults: SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    """A request as the server runs it: every prompt n times. conversation: instead of prompts, still to
    be written out by the chat template. max_tokens: asked by the client, so never cut. echo: begin the
    answers with their prompts. prompt_logprobs: asked for by themselves, not for echo. unknown: fields
    that nobody knows.
    """

    prompts: tuple[Prompt, ...]
    conversation: tuple[dict[str, str], ...] | None
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    salt: str
    max_tokens: int | None
    echo: bool
    prompt_logprobs: int | None
    unknown: tuple[str, ...]

    @property
    def n(self) -> int:
        return self.sampling.n

    @property
    def num_sequences(self) -> int:
        return max(1, len(self.prompts)) * self.n


def parse(body: bytes, model: type[_Body]) -> _Body:
    """The body as a strict model. ApiError 400 naming the field; the input is never repeated."""
    try:
        return model.model_validate_json(body)
    except ValidationError as fault:
        errors = fault.errors(include_url=False, include_input=False, include_context=False)
        # Where several forms are allowed, the one that was understood furthest says what is wrong.
        error = max(errors, key=lambda error: (len(error["loc"]), _indices(error["loc"])))
        param = _param(error["loc"])
        message = error["msg"]
        if error["type"] == "json_invalid":
            message = "the body is no valid JSON"
        raise bad_request(f"{param}: {message}" if param else message, param) from None


def check_model(name: str | None, facts: Facts) -> None:
    """None is the served model; ApiError 404 for one that is not served."""
    if name is not None and name not in facts.names:
        raise ApiError(
            404,
            f"the model {shown(name)!r} is not served here; served are: {', '.join(facts.names)}",
            param="model",
            code="model_not_found",
        )


def read_chat(body: bytes, limits: Limits, facts: Facts) -> Generation:
    """The body of /v1/chat/completions."""
    chat = parse(body, ChatBody)
    check_model(chat.model, facts)
    logprobs: int | None = None
    if chat.logprobs:
        logprobs = _at_most(chat.top_logprobs or 0, limits.top_logprobs, "top_logprobs")
    elif chat.top_logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    return _generation(
        chat, (), conversation(chat.messages, facts), logprobs, _max_tokens(chat), limits, facts
    )


def read_completion(body: bytes, limits: Limits, facts: Facts) -> Generation:
    """The body of /v1/completions, the prompt in any of its four forms."""
    completion = parse(body, CompletionBody)
    check_model(completion.model, facts)
    prompts = _prompts(completion, limits, facts)
    logprobs = completion.logprobs
    if logprobs is not None:
        _at_most(logprobs, limits.top_logprobs, "logprobs")
    most = _max_tokens(completion)
    most = COMPLETION_TOKENS if most is None else most
    if most == 0 and not completion.echo and completion.prompt_logprobs is None:
        raise bad_request("max_tokens 0 needs echo or prompt_logprobs", "max_tokens")
    return _generation(completion, prompts, None, logprobs, most, limits, facts)


def conversation(messages: list[ChatMessage], facts: Facts) -> tuple[dict[str, str], ...]:
    """Messages as the chat template takes them: text parts joined by newlines, developer as system."""
    if not messages:
        raise bad_request("messages is empty", "messages")
    if not facts.has_tokenizer:
        raise bad_request("this model has no tokenizer: use /v1/completions with ids", "messages")
    found = []
    for index, message in enumerate(messages):
        refuse_unsupported(message.model_extra, IN_MESSAGES, where=f"messages[{index}].")
        content = message.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        role = "system" if message.role == "developer" else message.role
        found.append({"role": role, "content": content})
    return tuple(found)


def check_tokens(tokens: Sequence[int], name: str, facts: Facts) -> None:
    if not tokens or (min(tokens) >= 0 and max(tokens) < facts.vocab_size):
        return  # there may be millions, and everybody waits
    token = next(token for token in tokens if not 0 <= token < facts.vocab_size)
    raise bad_request(
        f"{name} holds token {shown(str(token))}; ids go from 0 to {facts.vocab_size - 1}", name
    )


def check_length(count: int, generation: Generation, name: str, facts: Facts) -> None:
    """ApiError 400 where a prompt's tokens, with what it asks for, are more than a sequence may have."""
    if not count:
        raise bad_request(f"{name} has no tokens: there is nothing to go on from", name)
    wanted = 1 if generation.max_tokens is None else generation.max_tokens
    if count + wanted > facts.max_model_len:
        raise bad_request(
            f"a sequence may have {facts.max_model_len} tokens here; the prompt has {count} "
            f"and {wanted} new ones are asked for",
            name,
            code="context_length_exceeded",
        )


def check_prompt_logprobs(prompts: list[tuple[int, ...]], wanted: Generation, most: int) -> None:
    """ApiError 400 where the log-probabilities of the prompts would be more numbers than `most`."""
    each = wanted.sampling.prompt_logprobs
    if each is None:
        return
    copies = wanted.n if wanted.stream else 1
    count = sum(len(prompt) for prompt in prompts) * (each + 1) * copies
    if count > most:
        raise bad_request(
            f"log-probabilities of so many prompt tokens are {count} numbers, at most {most} allowed",
            "logprobs" if wanted.prompt_logprobs is None else "prompt_logprobs",
        )


def shown(text: str) -> str:
    """Of a client's text, what fits into a message."""
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + ".."


def _generation(
    body: GenerationBody,
    prompts: tuple[Prompt, ...],
    talk: tuple[dict[str, str], ...] | None,
    logprobs: int | None,
    max_tokens: int | None,
    limits: Limits,
    facts: Facts,
) -> Generation:
    unknown = refuse_unsupported(body.model_extra)
    _check_metadata(body.metadata, limits)
    n = _at_most(body.n or 1, limits.n, "n")
    if n * max(1, len(prompts)) > limits.sequences:
        raise bad_request(
            f"{len(prompts)} prompts times n={n} are more than {limits.sequences} sequences", "n"
        )
    if body.best_of is not None and body.best_of != n:
        raise bad_request("best_of is not offered; it may only be equal to n", "best_of")
    stream = bool(body.stream)
    if body.stream_options is not None:
        if not stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")
        refuse_unsupported(
            body.stream_options.model_extra, IN_STREAM_OPTIONS, where="stream_options."
        )
    if stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs are not offered while streaming", "prompt_logprobs")
    if max_tokens == 0 and n > 1:
        raise bad_request("n must be 1 when max_tokens is 0", "n")
    if body.prompt_logprobs is not None:
        _at_most(body.prompt_logprobs, limits.top_logprobs, "prompt_logprobs")
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return Generation(
        prompts=prompts,
        conversation=talk,
        sampling=_sampling(body, logprobs, max_tokens, echo, limits, facts),
        stream=stream,
        include_usage=include_usage,
        salt=_salt(body.cache_salt, limits),
        max_tokens=_max_tokens(body),
        echo=echo,
        prompt_logprobs=body.prompt_logprobs,
        unknown=tuple(unknown),
    )


def _sampling(
    body: GenerationBody,
    logprobs: int | None,
    max_tokens: int | None,
    echo: bool,
    limits: Limits,
    facts: Facts,
) -> SamplingParams:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    _at_most(len(stops), limits.stops, "stop", "strings")
    for stop in stops:
        if not 0 < len(stop) <= limits.stop_chars:
            raise bad_request(f"a stop string has 1 to {limits.stop_chars} characters", "stop")
    if stops and not facts.has_tokenizer:
        raise bad_request("stop strings need a tokenizer, and this model has none", "stop")
    stop_ids = tuple(body.stop_token_ids or ())
    check_tokens(stop_ids, "stop_token_ids", facts)
    allowed = None if body.allowed_token_ids is None else tuple(body.allowed_token_ids)
    _at_most(len(allowed or ()), facts.vocab_size, "allowed_token_ids", "ids")
    check_tokens(allowed or (), "allowed_token_ids", facts)
    bad_words = tuple(body.bad_words or ())
    _at_most(len(bad_words), limits.bad_words, "bad_words", "texts")
    if bad_words and not facts.has_tokenizer:
        raise bad_request("bad_words need a tokenizer, and this model has none", "bad_words")
    form = read_structured(body, limits.form)
    if form is not None and not facts.has_tokenizer:
        raise bad_request(f"{form.asked_as} needs a tokenizer; this model has none", form.asked_as)
    prompt_logprobs = body.prompt_logprobs
    if echo and (logprobs is not None or max_tokens == 0):
        prompt_logprobs = max(logprobs or 0, prompt_logprobs or 0)

    said = {name: value for name in _AS_THEY_ARE if (value := getattr(body, name)) is not None}
    try:
        sampling = replace(
            facts.defaults,
            **said,
            max_tokens=max_tokens,
            logit_bias=_logit_bias(body.logit_bias, limits, facts),
            structured_outputs=form,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    except RequestError as fault:
        raise of_request(fault) from None
    if max_tokens is None and sampling.min_tokens >= facts.max_model_len:
        raise bad_request(
            f"min_tokens is not less than the {facts.max_model_len} tokens of a sequence",
            "min_tokens",
        )
    return sampling


_AS_THEY_ARE = PARAMS.keys() - {
    "max_tokens", "logit_bias", "structured_outputs", "logprobs", "prompt_logprobs"
}  # fmt: skip
"""Parameters that a body has under the same name and in the same form."""


def _logit_bias(
    given: Mapping[str, float] | None, limits: Limits, facts: Facts
) -> tuple[tuple[int, float], ...]:
    """JSON has texts for keys: they must be plain decimal ids."""
    _at_most(len(given or ()), limits.logit_bias, "logit_bias", "entries")
    found = {}
    for key, value in (given or {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > _MOST_DIGITS:
            raise bad_request(f"logit_bias: {shown(key)!r} is no token id", "logit_bias")
        found[int(key)] = value
    check_tokens(tuple(found), "logit_bias", facts)
    return tuple(sorted(found.items()))


def _prompts(body: CompletionBody, limits: Limits, facts: Facts) -> tuple[Prompt, ...]:
    given = body.prompt
    one = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int))
    return _prompts_of([given] if one else given, limits, facts)


def _prompts_of(several: Sequence[object], limits: Limits, facts: Facts) -> tuple[Prompt, ...]:
    if not several:
        raise bad_request("prompt is empty", "prompt")
    _at_most(len(several), limits.prompts, "prompt", "prompts")
    found: list[Prompt] = []
    for item in several:
        if isinstance(item, str):
            if not facts.has_tokenizer:
                raise bad_request("this model has no tokenizer: give token ids", "prompt")
            found.append(item)
        else:
            assert isinstance(item, list)
            tokens = tuple(item)
            if len(tokens) < facts.max_model_len:  # else refused for its length
                check_tokens(tokens, "prompt", facts)
            found.append(tokens)
    return tuple(found)


def _max_tokens(body: GenerationBody) -> int | None:
    """Two names for one thing; both may be given if they agree."""
    a, b = body.max_tokens, body.max_completion_tokens
    if a is not None and b is not None and a != b:
        raise bad_request(
            "max_tokens and max_completion_tokens are two names for one number, and differ",
            "max_completion_tokens",
        )
    return b if a is None else a


def _salt(given: str | None, limits: Limits) -> str:
    if given is None:
        return ""
    if not _SALT.fullmatch(given) or len(given) > limits.cache_salt_chars:
        raise bad_request(
            f"cache_salt has 1 to {limits.cache_salt_chars} characters of A-Z a-z 0-9 _ -",
            "cache_salt",
        )
    return given


def _check_metadata(given: Mapping[str, str] | None, limits: Limits) -> None:
    """A client's own notes on its request: nothing is done with them."""
    _at_most(len(given or ()), limits.metadata_entries, "metadata", "entries")
    for key, value in (given or {}).items():
        _at_most(len(key), limits.metadata_key_chars, "metadata", "characters of a key")
        _at_most(len(value), limits.metadata_value_chars, "metadata", "characters of a value")


def _at_most(value: int, most: int, name: str, unit: str = "") -> int:
    if value > most:
        raise bad_request(f"{name}: {value} {unit}".strip() + f", at most {most} allowed", name)
    return value


_BELOW_A_FIELD = frozenset(
    {"role", "content", "type", "text", "include_usage", "json_schema", "schema", "strict", "name",
     "json", "json_object", "regex", "choice", "grammar"}
)  # fmt: skip


def _indices(loc: tuple[int | str, ...]) -> list[int]:
    return [step for step in loc if isinstance(step, int)]


def _param(loc: tuple[int | str, ...]) -> str | None:
    """`("messages", 0, "content", "str")` as `messages[0].content`: names of branches left out."""
    if not loc:
        return None
    path = str(loc[0])
    for step in loc[1:]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step in _BELOW_A_FIELD:
            path += f".{step}"
    return path
