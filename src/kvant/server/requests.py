"""Parses and checks the bodies of all endpoints that generate or tokenise.

The functions are pure. For any bytes they return or raise ApiError, before anything is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from kvant.errors import RequestError
from kvant.sampling.sampling_params import PARAMS, SamplingParams
from kvant.sampling.thinking import NO_THINKING, UNLIMITED
from kvant.server.api_error import ApiError, as_api_error, bad_request, shown
from kvant.server.checks import (
    at_most,
    check_metadata,
    check_model,
    check_tokens,
    read_salt,
    too_long,
)
from kvant.server.config import Limits
from kvant.server.conversations import BY_FORMAT, check_alone, conversation, forced_form, read_tools
from kvant.server.forms import read_form
from kvant.server.generation import Conversation, Facts, Generation, Prompt
from kvant.server.parameters import CHAT, COMPLETIONS
from kvant.server.reply import Tools, writes_reasoning
from kvant.server.unserved import refuse_unserved
from kvant.server.wire import ChatBody, CompletionBody, GenerationBody

COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not set it; OpenAI's default."""

_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MOST_DIGITS = 18  # of a token id as a key of JSON
_Body = TypeVar("_Body", bound=msgspec.Struct)

Raw = dict[str, Any]
"""A body as JSON, including fields that its type does not have."""


def parse(data: bytes, model: type[_Body]) -> tuple[_Body, Raw]:
    """Parses a body. Returns it as `model` and as JSON. Raises ApiError 400, naming a wrong field.

    The error never repeats the field's value.
    """
    try:
        raw = msgspec.json.decode(data)
    except msgspec.ValidationError:
        # A number is out of msgspec's range. Only the typed decoder says where it is.
        return _converted(lambda: msgspec.json.decode(data, type=model), model), {}
    except (UnicodeDecodeError, RecursionError):
        raise bad_request("the body is not valid JSON", None) from None
    except msgspec.DecodeError as fault:
        why = str(fault).removeprefix("JSON is malformed: ")
        raise bad_request(f"the body is not valid JSON: {why[0].lower()}{why[1:]}", None) from None
    return _converted(lambda: msgspec.convert(raw, model), model), raw


def _converted(read: Any, model: type[Any]) -> Any:
    try:
        return read()
    except msgspec.DecodeError as fault:
        param, message = _where(str(fault), model)
        raise bad_request(f"{param}: {message}" if param else message, param) from None


def _where(message: str, model: type[Any]) -> tuple[str | None, str]:
    """Returns the wrong field's path and the problem, from msgspec's message."""
    text, _, path = message.rpartition(" - at `")
    if not text:
        text, path = path, "$"
    path = path.rstrip("`").removeprefix("$").split("[...]")[0].lstrip(".")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", text):
        return f"{path}.{missing[1]}".lstrip("."), "this field is required"
    if unknown := re.fullmatch(r"Object contains unknown field `(.+)`", text, re.DOTALL):
        return f"{path}.{shown(unknown[1])}".lstrip("."), "this endpoint has no such parameter"
    if text.startswith("Invalid enum value"):
        allowed = sorted(_choices(msgspec.inspect.type_info(model), re.sub(r"\[\d+\]", "", path)))
        text = f"expected one of {', '.join(map(repr, allowed))}"
    text = text.replace(" | null`", "`").replace("`", "")
    return path or None, text[0].lower() + text[1:]


def _choices(kind: msgspec.inspect.Type, path: str) -> set[str]:
    """Returns the texts allowed for the field at a path; the path has no list indices."""
    if isinstance(kind, msgspec.inspect.UnionType):
        return {text for one in kind.types for text in _choices(one, path)}
    if isinstance(kind, msgspec.inspect.ListType):
        return _choices(kind.item_type, path)
    if isinstance(kind, msgspec.inspect.StructType):
        name, _, rest = path.partition(".")
        found = (field for field in kind.fields if field.encode_name == name)
        return {text for field in found for text in _choices(field.type, rest)}
    return {*map(str, kind.values)} if isinstance(kind, msgspec.inspect.LiteralType) else set()


def read_chat(data: bytes, limits: Limits, facts: Facts) -> Generation:
    """Parses and checks the body of /v1/chat/completions. Raises ApiError."""
    body, raw = parse(data, ChatBody)
    refuse_unserved(raw, ChatBody, CHAT)
    return _checked_chat(body, raw, limits, facts)


def read_conversation(
    raw: Raw, limits: Limits, facts: Facts, *, names: Mapping[str, str]
) -> Generation:
    """Checks a body of /v1/chat/completions that was converted from another endpoint's. Raises ApiError.

    names: the fields' names in that endpoint's body, for errors.
    """
    try:
        body = _converted(lambda: msgspec.convert(raw, ChatBody), ChatBody)
        found = _checked_chat(body, raw, limits, facts)
    except ApiError as fault:
        raise renamed(fault, names) from None
    form, name = found.sampling.structured_outputs, names.get("response_format")
    if form is not None and form.asked_as == "response_format" and name is not None:
        form = replace(form, asked_as=name)
        found = replace(found, sampling=replace(found.sampling, structured_outputs=form))
    return replace(found, source=names["messages"])


def renamed(fault: ApiError, names: Mapping[str, str]) -> ApiError:
    """Returns an error with its fields renamed. names: the new name of each field."""
    given, param = fault.param or "", fault.param
    field = re.split(r"[.\[]", given)[0]
    message = fault.message
    if names.get(field, field) != field:
        # The indices of messages differ from those of the list that the client sent, so they are dropped.
        param = names[field] if field == "messages" else names[field] + given[len(field) :]
        if message.startswith(given):
            message = param + message[len(given) :]
    if message.endswith(BY_FORMAT) and "response_format" in names:
        message = message.removesuffix("response_format") + names["response_format"]
    return ApiError(
        fault.status, message, type=fault.type, param=param, code=fault.code,
        retry_after=fault.retry_after,
    )  # fmt: skip


def _checked_chat(body: ChatBody, raw: Raw, limits: Limits, facts: Facts) -> Generation:
    """Checks a body of /v1/chat/completions. Raises ApiError."""
    check_model(body.model, facts)
    logprobs: int | None = None
    if body.logprobs:
        logprobs = at_most(body.top_logprobs or 0, limits.top_logprobs, "top_logprobs")
    elif body.top_logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    talk = conversation(body, facts)
    tools = read_tools(body, facts)
    if tools is not None:
        talk = replace(talk, tools=tools.specs)
    found = _generation(body, raw, (), talk, logprobs, _max_tokens(body), limits, facts)
    if tools is not None and tools.forced is not None:
        form = forced_form(tools, found.sampling, limits)
        found = replace(found, sampling=replace(found.sampling, structured_outputs=form))
    found, tools = _thinking_first(found, body, talk, tools, facts)
    if tools is not None and tools.is_strict:
        otherwise, alone = found.sampling.structured_outputs, found.sampling
        if (
            otherwise is not None and otherwise.schema is not None
        ):  # it applies to answers without a call
            alone = replace(alone, structured_outputs=None)
        check_alone(alone, "strict, with tool_choice auto,", "tools")
        if not talk.add_generation_prompt:
            raise bad_request(
                "strict tools with tool_choice auto need an answer from its beginning: leave "
                "continue_final_message and add_generation_prompt out",
                "tools",
            )
    reads = tools is not None or (
        facts.reply is not None and writes_reasoning(facts.template or "")
    )
    if reads:
        # The marks of reasoning and calls are special tokens in some families.
        found = replace(found, sampling=replace(found.sampling, skip_special_tokens=False))
    return replace(
        found, tools=tools, reads_reply=reads, include_reasoning=body.include_reasoning is not False
    )


def _thinking_first(
    found: Generation, body: ChatBody, talk: Conversation, tools: Tools | None, facts: Facts
) -> tuple[Generation, Tools | None]:
    """Sets the budget of thinking. A form of the whole answer begins behind it, if the model may think."""
    sampling = found.sampling
    names = ("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens")
    budget = _one_of(body, names)
    reasons = facts.reply is not None and writes_reasoning(facts.template or "")
    if budget is None and not (
        reasons
        and facts.thinks
        and sampling.structured_outputs is not None
        and talk.add_generation_prompt
    ):
        return found, tools
    _check_budget(
        budget, next((name for name in names if getattr(body, name) is not None), ""), facts
    )
    sampling = replace(sampling, thinking_token_budget=UNLIMITED if budget is None else budget)
    if tools is not None and tools.forced is not None:
        tools = replace(tools, thinks_first=reasons)
    return replace(found, sampling=sampling), tools


def _check_budget(budget: int | None, name: str, facts: Facts) -> None:
    """Raises ApiError 400 for a budget of thinking if the model's thinking has no marks."""
    if budget not in (None, UNLIMITED) and not facts.thinks:
        raise bad_request(NO_THINKING.replace("thinking_token_budget", name, 1), name)


def read_completion(data: bytes, limits: Limits, facts: Facts) -> Generation:
    """Parses and checks the body of /v1/completions, with the prompt in any of its four forms."""
    body, raw = parse(data, CompletionBody)
    refuse_unserved(raw, CompletionBody, COMPLETIONS)
    check_model(body.model, facts)
    prompts = read_prompts(body.prompt, limits, facts)
    if body.suffix:
        prompts = tuple(_with_suffix(prompt, body, facts) for prompt in prompts)
    if body.logprobs is not None:
        at_most(body.logprobs, limits.top_logprobs, "logprobs")
    most = _max_tokens(body)
    most = COMPLETION_TOKENS if most is None else most
    if most == 0 and not body.echo and body.prompt_logprobs is None:
        raise bad_request("max_tokens 0 needs echo or prompt_logprobs", "max_tokens")
    return _generation(body, raw, prompts, None, body.logprobs, most, limits, facts)


def read_text(raw: Raw, limits: Limits, facts: Facts) -> Generation:
    """Checks a body of /v1/completions that was converted from another endpoint's. Without max_tokens, the
    answer continues to the end of the context.
    """
    body = _converted(lambda: msgspec.convert(raw, CompletionBody), CompletionBody)
    prompts = read_prompts(body.prompt, limits, facts)
    return _generation(body, raw, prompts, None, None, _max_tokens(body), limits, facts)


def _with_suffix(prompt: Prompt, body: CompletionBody, facts: Facts) -> str:
    """Returns the prompt that asks for the text between `prompt` and the body's suffix."""
    if facts.infill is None:
        raise bad_request("suffix: this model has no tokens for filling in the middle", "suffix")
    if not isinstance(prompt, str) or body.echo:
        raise bad_request("suffix needs a text as prompt, and no echo", "suffix")
    return facts.infill.prompt(prompt, body.suffix or "")


def _generation(
    body: GenerationBody,
    raw: Raw,
    prompts: tuple[Prompt, ...],
    talk: Conversation | None,
    logprobs: int | None,
    max_tokens: int | None,
    limits: Limits,
    facts: Facts,
) -> Generation:
    check_metadata(body.metadata, limits)
    n = at_most(body.n or 1, limits.n, "n")
    if n * max(1, len(prompts)) > limits.sequences:
        raise bad_request(
            f"{len(prompts)} prompts times n={n} are more than {limits.sequences} sequences", "n"
        )
    if body.best_of is not None and body.best_of != n:
        raise bad_request("best_of is not offered; it may only be equal to n", "best_of")
    stream, options = bool(body.stream), body.stream_options
    if options is not None and not stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    if stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs are not offered while streaming", "prompt_logprobs")
    if max_tokens == 0 and n > 1:
        raise bad_request("n must be 1 when max_tokens is 0", "n")
    if body.prompt_logprobs is not None:
        at_most(body.prompt_logprobs, limits.top_logprobs, "prompt_logprobs")
    if body.request_id is not None and not _ID.fullmatch(body.request_id):
        raise bad_request("request_id has 1 to 128 visible ASCII characters", "request_id")
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    return Generation(
        prompts=prompts,
        conversation=talk,
        sampling=_sampling(body, logprobs, max_tokens, echo, limits, facts),
        stream=stream,
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        salt=read_salt(body.cache_salt, limits),
        max_tokens=_max_tokens(body),
        echo=echo,
        prompt_logprobs=body.prompt_logprobs,
        special_tokens=body.add_special_tokens,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        request_id=body.request_id,
        source="prompt" if talk is None else "messages",
    )


def _sampling(
    body: GenerationBody,
    logprobs: int | None,
    max_tokens: int | None,
    echo: bool,
    limits: Limits,
    facts: Facts,
) -> SamplingParams:
    given = ((name, getattr(body, name)) for name in PARAMS)
    said = {name: _collected(name, value, limits) for name, value in given if value is not None}
    for name, value in said.items():
        if PARAMS[name].needs_text and value and not facts.has_tokenizer:
            raise bad_request(f"{name} needs a tokenizer; this model has none", name)
    for stop in said.get("stop", ()):
        if not 0 < len(stop) <= limits.stop_chars:
            raise bad_request(f"a stop string has 1 to {limits.stop_chars} characters", "stop")
    at_most(len(body.allowed_token_ids or ()), facts.vocab_size, "allowed_token_ids", "ids")
    form = read_form(body, limits)
    if form is not None and not facts.has_tokenizer:
        raise bad_request(f"{form.asked_as} needs a tokenizer; this model has none", form.asked_as)
    prompt_logprobs = body.prompt_logprobs
    if echo and (logprobs is not None or max_tokens == 0):
        prompt_logprobs = max(logprobs or 0, prompt_logprobs or 0)
    said |= {
        "max_tokens": max_tokens,
        "structured_outputs": form,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    try:
        sampling = replace(facts.defaults, **said)
    except RequestError as fault:
        raise as_api_error(fault) from None
    for name, tokens in sampling.token_ids.items():
        check_tokens(tokens, name, facts)
    _check_budget(sampling.thinking_token_budget, "thinking_token_budget", facts)
    if max_tokens is None and sampling.min_tokens >= facts.max_model_len:
        raise bad_request(
            f"min_tokens is not less than the {facts.max_model_len} tokens of a sequence",
            "min_tokens",
        )
    return sampling


def _collected(name: str, value: Any, limits: Limits) -> Any:
    """Returns a parameter's value, with one text as a list, and with JSON's texts as keys as token ids.

    Raises ApiError 400 for too many items, and for a key that is no plain decimal number.
    """
    if isinstance(value, str):
        value = [value]
    if unit := PARAMS[name].items:
        at_most(len(value), limits.items_of(name), name, unit)
    if not isinstance(value, dict):
        return value
    for key in value:
        if not key.isascii() or not key.isdigit() or len(key) > _MOST_DIGITS:
            raise bad_request(f"{name}: {shown(key)!r} is not a token id", name)
    return {int(key): number for key, number in value.items()}


def _max_tokens(body: GenerationBody) -> int | None:
    """Returns the limit on new tokens, which has three names. -1 means none."""
    most = _one_of(body, ("max_tokens", "max_completion_tokens", "n_predict"), nothing=-1)
    if most == 0 and not isinstance(body, CompletionBody):
        raise bad_request("n_predict is 0; it must be at least 1", "n_predict")
    return most


def _one_of(
    body: GenerationBody, names: Sequence[str], *, nothing: int | None = None
) -> int | None:
    """Returns a number that has several names. Given values must agree. nothing: means "not given"."""
    given = {name: value for name in names if (value := getattr(body, name)) not in (None, nothing)}
    if len(set(given.values())) > 1:
        *_, last = given
        raise bad_request(f"{' and '.join(given)} are names of one number, and differ", last)
    found: int | None = next(iter(given.values()), None)
    return found


def read_prompts(given: str | list[Any], limits: Limits, facts: Facts) -> tuple[Prompt, ...]:
    """Returns the prompts from a text, texts, token ids, or lists of token ids. Raises ApiError 400.

    Errors name the field `prompt`.
    """
    if isinstance(given, list) and not given:
        raise bad_request("prompt is empty", "prompt")
    if isinstance(given, list) and len(given) > max(facts.max_model_len, limits.prompts):
        # Checked first: looking at millions of items would block all other requests.
        if isinstance(given[0], int):
            raise too_long(len(given), 1, "prompt", facts)
        at_most(len(given), limits.prompts, "prompt", "prompts")
    kinds = {str} if isinstance(given, str) else set(map(type, given))
    if len(kinds) > 1:
        raise bad_request("prompt mixes texts, token ids and lists", "prompt")
    several = [given] if isinstance(given, str) or kinds == {int} else given
    at_most(len(several), limits.prompts, "prompt", "prompts")
    found: list[Prompt] = []
    for item in several:
        if isinstance(item, str):
            if not facts.has_tokenizer:
                raise bad_request("this model has no tokenizer: give token ids", "prompt")
            found.append(item)
        else:
            if len(item) < facts.max_model_len:  # longer prompts are refused later for their length
                check_tokens(item, "prompt", facts)
            found.append(tuple(item))
    return tuple(found)
