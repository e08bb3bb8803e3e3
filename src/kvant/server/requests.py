"""Parses and checks the bodies of all endpoints that generate or tokenise.

The functions are pure. For any bytes they return or raise ApiError, before anything is allocated.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from kvant.errors import RequestError
from kvant.models.pooling import Pooling
from kvant.sampling.sampling_params import EMBEDDING, PARAMS, SamplingParams
from kvant.sampling.structured_outputs import StructuredOutputs
from kvant.sampling.thinking import NO_THINKING, UNLIMITED
from kvant.server.api_error import ApiError, as_api_error, bad_request, shown
from kvant.server.call_grammar import TokenId, call_grammar
from kvant.server.config import Limits
from kvant.server.fill import FillForm
from kvant.server.parameters import (
    CHAT,
    COMPLETIONS,
    RESERVED_TEMPLATE_NAMES,
)
from kvant.server.reply import Tools, writes_reasoning
from kvant.server.unserved import note_ignored, refuse_unserved
from kvant.server.wire import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    ContentPart,
    GenerationBody,
    MadeCall,
    ResponseFormat,
    StructuredBody,
    TokenizeBody,
    ToolSpec,
)

COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not set it; OpenAI's default."""

_SALT = re.compile(r"[A-Za-z0-9_-]+")
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MOST_DIGITS = 18
_MOST_TOOLS = 128
_log = logging.getLogger(__name__)
_Body = TypeVar("_Body", bound=msgspec.Struct)

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """The server's facts about its model.

    names: the served names. defaults: sampling parameters of requests that do not set them. template: the
    chat template, or None. template_values: defaults for the template's variables. reply: the format of its
    answers, see `kvant.server.reply`; None if unknown. thinks: its thinking has marks, so it can have a
    budget. infill: its form of fill-in-the-middle, or None.
    pooling: how an embedding engine makes a vector; None for an engine that generates.
    """

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    has_tokenizer: bool
    defaults: SamplingParams
    template: str | None = None
    template_values: Mapping[str, Any] = field(default_factory=dict)
    reply: dict[str, Any] | None = None
    thinks: bool = False
    infill: FillForm | None = None
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for the chat template. variables: further variables of the template.

    tools: functions that the template describes. add_generation_prompt: the prompt ends where the assistant's
    turn begins. continue_final_message: it ends within the last message instead.
    """

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request that generates: every prompt is run `n` times.

    conversation: replaces prompts, for the chat template. max_tokens: the client's own value, or None. echo:
    answers begin with their prompts. prompt_logprobs: the client's own value, without echo's. special_tokens:
    whether the tokenizer adds special tokens; None is the endpoint's default. token_ids: answers have token
    ids. tokens_as_ids: log-probabilities name tokens as "token_id:N". request_id: the client's id for the
    request. source: the body's field with the prompt, for errors. tools: tools that the answer may call.
    reads_reply: the answer is split into parts by `kvant.server.reply`.
    """

    prompts: tuple[Prompt, ...]
    conversation: Conversation | None
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    salt: str
    max_tokens: int | None
    echo: bool
    prompt_logprobs: int | None
    special_tokens: bool | None
    token_ids: bool
    tokens_as_ids: bool
    request_id: str | None
    source: str
    tools: Tools | None = None
    reads_reply: bool = False
    include_reasoning: bool = True

    @property
    def n(self) -> int:
        return self.sampling.n

    @property
    def num_sequences(self) -> int:
        return max(1, len(self.prompts)) * self.n


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


def check_model(name: str | None, facts: Facts) -> None:
    """Raises ApiError 404 for a model that is not served; None means the served model."""
    if name is not None and name not in facts.names:
        raise ApiError(
            404,
            f"the model {shown(name)!r} is not served here; served are: {', '.join(facts.names)}",
            param="model",
            code="model_not_found",
        )


def read_chat(data: bytes, limits: Limits, facts: Facts) -> Generation:
    """Parses and checks the body of /v1/chat/completions. Raises ApiError."""
    body, raw = parse(data, ChatBody)
    refuse_unserved(raw, ChatBody, CHAT)
    return _of_chat(body, raw, limits, facts)


def read_conversation(
    raw: Raw, limits: Limits, facts: Facts, *, names: Mapping[str, str]
) -> Generation:
    """Checks a body of /v1/chat/completions that was converted from another endpoint's. Raises ApiError.

    names: the fields' names in that endpoint's body, for errors.
    """
    try:
        body = _converted(lambda: msgspec.convert(raw, ChatBody), ChatBody)
        found = _of_chat(body, raw, limits, facts)
    except ApiError as fault:
        raise renamed(fault, names) from None
    form, name = found.sampling.structured_outputs, names.get("response_format")
    if form is not None and form.asked_as == "response_format" and name is not None:
        form = replace(form, asked_as=name)
        found = replace(found, sampling=replace(found.sampling, structured_outputs=form))
    return replace(found, source=names["messages"])


_BY_FORMAT = "or ask for the form of the answer with response_format"


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
    if message.endswith(_BY_FORMAT) and "response_format" in names:
        message = message.removesuffix("response_format") + names["response_format"]
    return ApiError(
        fault.status, message, type=fault.type, param=param, code=fault.code,
        retry_after=fault.retry_after,
    )  # fmt: skip


def _of_chat(body: ChatBody, raw: Raw, limits: Limits, facts: Facts) -> Generation:
    check_model(body.model, facts)
    logprobs: int | None = None
    if body.logprobs:
        logprobs = _at_most(body.top_logprobs or 0, limits.top_logprobs, "top_logprobs")
    elif body.top_logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    talk = conversation(body, facts)
    tools = _tools(body, facts)
    if tools is not None:
        talk = replace(talk, tools=tools.specs)
    found = _generation(body, raw, (), talk, logprobs, _max_tokens(body), limits, facts)
    if tools is not None and tools.forced is not None:
        form = _forced_form(tools, found.sampling, limits)
        found = replace(found, sampling=replace(found.sampling, structured_outputs=form))
    found, tools = _thinking_first(found, body, talk, tools, facts)
    if tools is not None and tools.is_strict:
        otherwise, alone = found.sampling.structured_outputs, found.sampling
        if (
            otherwise is not None and otherwise.schema is not None
        ):  # it applies to answers without a call
            alone = replace(alone, structured_outputs=None)
        _check_alone(alone, "strict, with tool_choice auto,", "tools")
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
        _at_most(body.logprobs, limits.top_logprobs, "logprobs")
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
    _check_metadata(body.metadata, limits)
    n = _at_most(body.n or 1, limits.n, "n")
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
        _at_most(body.prompt_logprobs, limits.top_logprobs, "prompt_logprobs")
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


# -- sampling ----------------------------------------------------------------------------------


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
    _at_most(len(body.allowed_token_ids or ()), facts.vocab_size, "allowed_token_ids", "ids")
    form = _form(body, limits)
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
        _at_most(len(value), limits.items_of(name), name, unit)
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


# -- forms -------------------------------------------------------------------------------------

_FORM_FIELDS = {
    "guided_json": "json",
    "json_schema": "json",  # llama.cpp, SGLang
    "guided_regex": "regex",
    "regex": "regex",  # SGLang
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",  # llama.cpp
    "ebnf": "grammar",  # SGLang
}


def _form(body: GenerationBody, limits: Limits) -> StructuredOutputs | None:
    """Returns the form of the answer that the body requires, or None. Raises ApiError 400.

    It may be given in one way only and must be within the limits.
    """
    try:
        forms = list(_forms(body))
        if forms:
            forms[0].require_within(limits.form)
    except RequestError as fault:
        raise as_api_error(fault) from None
    if len(forms) > 1:
        names = " and ".join(form.asked_as for form in forms)
        raise bad_request(f"{names} ask for one form each: give one", forms[1].asked_as)
    return forms[0] if forms else None


def _forms(body: GenerationBody) -> Iterator[StructuredOutputs]:
    if body.response_format is not None:
        yield from _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        yield _of_structured_outputs(body.structured_outputs)
    for name, kind in _FORM_FIELDS.items():
        value = getattr(body, name)
        if value is not None:
            yield StructuredOutputs(**{kind: _schema(value, name)}, asked_as=name)


def _of_response_format(given: ResponseFormat) -> Iterator[StructuredOutputs]:
    name = "response_format"
    if given.json_schema is not None and given.type != "json_schema":
        raise bad_request(f"{name}: json_schema does not belong to type {given.type}", name)
    if given.schema is not None and given.type != "json_object":
        raise bad_request(f"{name}: schema belongs to type json_object", f"{name}.schema")
    if given.schema is not None:
        yield StructuredOutputs(json=_schema(given.schema, name), asked_as=name)
    elif given.type == "json_object":
        yield StructuredOutputs(json_object=True, asked_as=name)
    elif given.type == "json_schema":
        if given.json_schema is None:
            raise bad_request(f"{name}: type json_schema needs json_schema", f"{name}.json_schema")
        # `strict` is ignored: the schema is always enforced.
        yield StructuredOutputs(json=_schema(given.json_schema.schema, name), asked_as=name)


def _of_structured_outputs(given: StructuredBody) -> StructuredOutputs:
    name = "structured_outputs"
    return StructuredOutputs(
        json=_schema(given.json, name),
        json_object=bool(given.json_object),
        regex=given.regex,
        choice=None if given.choice is None else tuple(given.choice),
        grammar=given.grammar,
        asked_as=name,
    )


def _schema(value: Any, name: str) -> Any:
    """Returns a schema given as an object as text; any other value unchanged."""
    if not isinstance(value, dict):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise bad_request(f"{name}: the schema is not valid JSON", name) from None


# -- prompts and conversations -----------------------------------------------------------------


def read_prompts(given: str | list[Any], limits: Limits, facts: Facts) -> tuple[Prompt, ...]:
    """Returns the prompts from a text, texts, token ids, or lists of token ids. Raises ApiError 400.

    Errors name the field `prompt`.
    """
    if isinstance(given, list) and not given:
        raise bad_request("prompt is empty", "prompt")
    if isinstance(given, list) and len(given) > max(facts.max_model_len, limits.prompts):
        # Checked first: looking at millions of items would block all other requests.
        if isinstance(given[0], int):
            raise _too_long(len(given), 1, "prompt", facts)
        _at_most(len(given), limits.prompts, "prompt", "prompts")
    kinds = {str} if isinstance(given, str) else set(map(type, given))
    if len(kinds) > 1:
        raise bad_request("prompt mixes texts, token ids and lists", "prompt")
    several = [given] if isinstance(given, str) or kinds == {int} else given
    _at_most(len(several), limits.prompts, "prompt", "prompts")
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


def conversation(body: ChatBody | TokenizeBody, facts: Facts) -> Conversation:
    """Returns the messages for the chat template, with text parts joined and role developer as system."""
    if not body.messages:
        raise bad_request("messages is empty", "messages")
    if not facts.has_tokenizer:
        raise bad_request(
            "this model has no tokenizer: use /v1/completions with token ids", "messages"
        )
    found = []
    for index, message in enumerate(body.messages):
        role = "system" if message.role == "developer" else message.role
        text = message.content
        if text is None and (message.tool_calls or message.reasoning_content or message.reasoning):
            text = ""  # an assistant's message with only a call or reasoning
        one = {"role": role, "content": text if isinstance(text, str) else _joined(text, index)}
        if message.name is not None:
            one["name"] = message.name
        if role in ("assistant", "tool"):
            one |= _of_tools(message, index, facts)
        found.append(one)
    continues = bool(body.continue_final_message)
    adds = body.add_generation_prompt
    if continues and adds:
        raise bad_request(
            "continue_final_message contradicts add_generation_prompt", "continue_final_message"
        )
    if continues and found[-1]["role"] != "assistant":
        raise bad_request(
            "continue_final_message needs an assistant message at the end", "continue_final_message"
        )
    return Conversation(
        tuple(found), not continues and adds is not False, continues, _variables(body, facts)
    )


def _joined(parts: list[ContentPart] | None, index: int) -> str:
    """Returns the joined text of the parts of message `index`."""
    where = f"messages[{index}].content"
    if parts is None:
        raise bad_request(f"{where}: a text is required", where)
    texts = []
    for place, part in enumerate(parts):
        if part.type != "text":
            raise bad_request(
                f"a part of type {shown(part.type)!r} is not offered: this server takes text",
                f"{where}[{place}].type",
            )
        if part.text is None:
            name = f"{where}[{place}].text"
            raise bad_request(f"{name}: this field is required", name)
        texts.append(part.text)
    return "\n".join(texts)


def _of_tools(message: ChatMessage, index: int, facts: Facts) -> dict[str, Any]:
    """Returns the fields of message `index` for calls and reasoning, as chat templates read them."""
    where = f"messages[{index}]"
    found: dict[str, Any] = {}
    if message.tool_calls or message.role == "tool":
        name = f"{where}.tool_calls" if message.tool_calls else f"{where}.role"
        _require_tool_template(facts, name)
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        found["tool_calls"] = [_made(call, f"{where}.tool_calls[{place}]") for place, call in calls]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        found["reasoning_content"] = reasoning
    return found


def _made(call: MadeCall, where: str) -> dict[str, Any]:
    """Returns a call with its arguments as an object, since chat templates write the JSON themselves."""
    name = f"{where}.function.arguments"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        raise bad_request(f"{name}: this is not valid JSON", name) from None
    if not isinstance(arguments, dict):
        raise bad_request(f"{name}: this is not a JSON object", name)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or "", "type": "function", "function": function}


def _require_tool_template(facts: Facts, param: str) -> None:
    if "tools" not in (facts.template or ""):
        raise bad_request(
            f"{param}: this model's chat template takes no tools: serve a model whose template does, "
            f"{_BY_FORMAT}",
            param,
        )


def _variables(body: ChatBody | TokenizeBody, facts: Facts) -> dict[str, Any]:
    """Returns the template's variables. Refuses reasoning_effort if the template does not read it."""
    given = dict(body.chat_template_kwargs or {})
    for name in RESERVED_TEMPLATE_NAMES & given.keys():
        raise bad_request(
            f"chat_template_kwargs cannot set {name}: the server sets it", "chat_template_kwargs"
        )
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        if "reasoning_effort" not in (facts.template or ""):
            raise bad_request(
                "this model's chat template does not read reasoning_effort", "reasoning_effort"
            )
        given["reasoning_effort"] = body.reasoning_effort
    ignored = [name for name in given if name not in (facts.template or "")]
    note_ignored(f"chat_template_kwargs.{name}" for name in ignored)
    return {**facts.template_values, **given}


def _tools(body: ChatBody, facts: Facts) -> Tools | None:
    """Returns the tools that the answer may call, or None. Raises ApiError 400."""
    choice = body.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise bad_request("tool_choice is none, auto, required or a function", "tool_choice")
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return None
    if choice == "none":
        _at_most(len(body.tools), _MOST_TOOLS, "tools", "functions")
        return None
    specs = tool_specs(body.tools, facts)
    names = [tool.function.name for tool in body.tools]
    forced = None
    if not isinstance(choice, str) and choice is not None:
        forced = choice.function.name
        if forced not in names:
            raise bad_request("tool_choice names a function that is not in tools", "tool_choice")
    elif choice == "required":
        forced = ""
    if forced is None and facts.reply is None:
        raise bad_request(
            "the format in which this model calls tools is not known here; tool_choice required, or "
            "a function, works",
            "tools",
        )
    return Tools(specs, forced, body.parallel_tool_calls is not False)


def tool_specs(tools: Sequence[ToolSpec], facts: Facts) -> tuple[dict[str, Any], ...]:
    """Returns the tools as chat templates take them. Raises ApiError 400."""
    _at_most(len(tools), _MOST_TOOLS, "tools", "functions")
    _require_tool_template(facts, "tools")
    if len({tool.function.name for tool in tools}) < len(tools):
        raise bad_request("tools name a function twice", "tools")
    return tuple(_without_none(msgspec.to_builtins(tool)) for tool in tools)


def _without_none(value: Any) -> Any:
    """Returns an object without its null fields, which chat templates would write out."""
    if not isinstance(value, dict):
        return value
    return {name: _without_none(inner) for name, inner in value.items() if inner is not None}


def _forced_form(tools: Tools, sampling: SamplingParams, limits: Limits) -> StructuredOutputs:
    _check_alone(sampling, "tool_choice", "tool_choice")
    _check_parameters(tools, limits)
    return _tools_form(limits, json=json.dumps(tools.form))


def strict_form(
    tools: Tools,
    rendered: str,
    token_id: TokenId,
    facts: Facts,
    limits: Limits,
    otherwise: StructuredOutputs | None,
) -> StructuredOutputs:
    """Returns the form of an answer that may call strict tools. rendered: the conversation as text.
    otherwise: the form of an answer without a call, or None.

    Raises ApiError 400 if the model's way of writing calls cannot be enforced.
    """
    assert facts.reply is not None
    _check_parameters(tools, limits)
    schema = None if otherwise is None else otherwise.schema
    grammar = call_grammar(facts.reply, tools, rendered, token_id, schema=schema)
    return _tools_form(limits, grammar=grammar, with_thinking=True)


def _check_parameters(tools: Tools, limits: Limits) -> None:
    """Raises ApiError 400 if a function's schema exceeds the limits."""
    for spec in tools.specs:
        if parameters := spec["function"].get("parameters"):
            _tools_form(limits, json=parameters)


def _tools_form(limits: Limits, **form: Any) -> StructuredOutputs:
    try:
        found = StructuredOutputs(**form, asked_as="tools")
        found.require_within(limits.form)
    except RequestError as fault:
        raise as_api_error(fault) from None
    return found


def _check_alone(sampling: SamplingParams, what: str, param: str) -> None:
    """Raises ApiError 400 if another parameter contradicts enforced calls. what: names them in the error."""
    if sampling.structured_outputs is not None:
        form = sampling.structured_outputs.asked_as
        raise bad_request(f"{what} contradicts a form of the answer: leave {form} out", param)
    for name in ("min_tokens", "ignore_eos"):
        if getattr(sampling, name):
            raise bad_request(f"{name} contradicts {what}", name)


# -- checks ------------------------------------------------------------------------------------


def check_tokens(tokens: Sequence[int], name: str, facts: Facts) -> None:
    """Raises ApiError 400 for a token id outside the vocabulary. name: the field, for the error."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < facts.vocab_size):
        return  # fast, because there may be millions and the event loop waits
    token = next(token for token in tokens if not 0 <= token < facts.vocab_size)
    raise bad_request(
        f"{name} contains token {shown(str(token))}; ids go from 0 to {facts.vocab_size - 1}", name
    )


def check_task(generation: Generation, facts: Facts) -> None:
    """Raises ApiError 400 if an embedding engine should generate, or a generating one should embed."""
    embeds = generation.sampling == EMBEDDING
    if facts.pooling is not None and not embeds:
        raise bad_request(
            "this server gives embeddings and generates nothing: use /v1/embeddings, or start it with "
            "--task generate",
            generation.source,
        )
    if facts.pooling is None and embeds and generation.source == "input":
        raise bad_request(
            "this server generates text and gives no embeddings: serve an embedding model, or start it "
            "with --task embed",
            "model",
        )


def check_length(count: int, generation: Generation, name: str, facts: Facts) -> None:
    """Raises ApiError 400 if a prompt of `count` tokens and its max_tokens exceed the context."""
    if not count:
        raise bad_request(f"{name} has no tokens: there is nothing to go on from", name)
    wanted = 1 if generation.max_tokens is None else generation.max_tokens
    if count + wanted > facts.max_model_len:
        raise _too_long(count, wanted, name, facts)


def _too_long(count: int, wanted: int, name: str, facts: Facts) -> ApiError:
    return bad_request(
        f"a sequence may have {facts.max_model_len} tokens here; the prompt has {count} "
        f"and {wanted} new ones are asked for",
        name,
        code="context_length_exceeded",
    )


def check_prompt_logprobs(prompts: list[tuple[int, ...]], wanted: Generation, most: int) -> None:
    """Raises ApiError 400 if the prompts' log-probabilities would be more than `most` values."""
    each = wanted.sampling.prompt_logprobs
    if each is None:
        return
    copies = wanted.n if wanted.stream else 1
    count = sum(len(prompt) for prompt in prompts) * (each + 1) * copies
    if count > most:
        name = "logprobs" if wanted.prompt_logprobs is None else "prompt_logprobs"
        raise bad_request(
            f"{name} of the prompt would return {count} values; the limit is {most}", name
        )


def needed(given: msgspec.Struct, field: str, where: str) -> str:
    """Returns a field's text. Raises ApiError 400 if it is None. where: the path of `given` in the body."""
    value = getattr(given, field)
    if value is None:
        raise bad_request(f"{where}.{field}: this field is required", f"{where}.{field}")
    assert isinstance(value, str)
    return value


def function_tool(
    name: str, description: str | None, parameters: object, strict: bool | None
) -> dict[str, object]:
    """Returns a function as a tool of a chat request."""
    function = {
        "name": name,
        "description": description,
        "parameters": parameters,
        "strict": strict,
    }
    return {"type": "function", "function": function}


def read_salt(given: str | None, limits: Limits) -> str:
    """Returns the client's salt, or "". Raises ApiError 400 for other characters or if it is too long."""
    if given is None:
        return ""
    if not _SALT.fullmatch(given) or len(given) > limits.cache_salt_chars:
        raise bad_request(
            f"cache_salt has 1 to {limits.cache_salt_chars} characters of A-Z a-z 0-9 _ -",
            "cache_salt",
        )
    return given


def _check_metadata(given: Mapping[str, str] | None, limits: Limits) -> None:
    """Raises ApiError 400 if metadata, which has no other effect, exceeds the limits."""
    _at_most(len(given or ()), limits.metadata_entries, "metadata", "entries")
    for key, value in (given or {}).items():
        _at_most(len(key), limits.metadata_key_chars, "metadata", "characters of a key")
        _at_most(len(value), limits.metadata_value_chars, "metadata", "characters of a value")


def _at_most(value: int, most: int, name: str, unit: str = "") -> int:
    if value > most:
        raise bad_request(f"{name}: {value} {unit}".strip() + f"; the limit is {most}", name)
    return value
