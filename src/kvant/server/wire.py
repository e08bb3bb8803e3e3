"""Types of the JSON of OpenAI's and Kvant's own endpoints: bodies of requests, and answers.

msgspec reads and writes these types, and `kvant.server.openapi` describes them. Bodies are strict: an
integer cannot be given as a text, a boolean or a fraction. The sampling parameters of a body are derived from
`SamplingParams`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from kvant.sampling.sampling_params import INT64, PARAMS, TYPES, Param, scalar_type

# -- requests ----------------------------------------------------------------------------------


class ContentPart(Struct, frozen=True):
    """A part of a message. Only parts of type text are served."""

    type: str
    text: str | None = None


class CalledFunction(Struct, frozen=True):
    """A called function. arguments: a JSON object, as text."""

    name: str
    arguments: str = "{}"


class MadeCall(Struct, frozen=True):
    """A tool call in an assistant's message of the conversation."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionSpec(Struct, frozen=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Struct, frozen=True):
    function: FunctionSpec
    type: Literal["function"] = "function"


class NamedFunction(Struct, frozen=True):
    name: str


class NamedTool(Struct, frozen=True):
    function: NamedFunction
    type: Literal["function"] = "function"


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """include_obfuscation: OpenAI's padding of events, which has no effect here."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """schema: llama.cpp's name for the schema of type json_object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None


class StructuredBody(Struct, frozen=True):
    """vLLM's `structured_outputs`: exactly one field must be given."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def _body_type(name: str, param: Param) -> Any:
    """Returns the type of a parameter in a body. None is always allowed and means "not given"."""
    kind = scalar_type(name)
    if kind is bool:
        return bool | None
    if kind is not None:
        low, high = param.low, param.client_high or param.high
        bounds: dict[str, Any] = {"gt" if param.above_low else "ge": low, "le": high}
        if kind is int:
            bounds["le"] = int(min(high, INT64 - 1))
        return (
            Annotated[kind, Meta(**{k: v for k, v in bounds.items() if abs(v) < math.inf})] | None
        )
    return _BODY_TYPES[TYPES[name]]


_BODY_TYPES: Mapping[Any, Any] = {
    Sequence[str]: list[str] | None,
    str | Sequence[str]: str | list[str] | None,
    Sequence[int]: list[int] | None,
    Sequence[int] | None: list[int] | None,
    Mapping[int, float] | tuple[tuple[int, float], ...]: dict[str, float] | None,
    TYPES["structured_outputs"]: StructuredBody | None,
}


def sampling_fields(name: str, *, without: Collection[str] = ()) -> Any:
    """Returns a base class for bodies, with the sampling parameters except those in `without`."""
    fields = [(one, _body_type(one, param), None) for one, param in PARAMS.items()]
    return msgspec.defstruct(
        name, [field for field in fields if field[0] not in without], frozen=True, kw_only=True
    )


if TYPE_CHECKING:

    class _SamplingFields(Struct, frozen=True, kw_only=True):
        def __getattr__(self, name: str) -> Any: ...

else:
    _SamplingFields = sampling_fields("_SamplingFields")

_TOKENS = Annotated[int, Meta(ge=1, le=INT64 - 1)] | None
_BUDGET = Annotated[int, Meta(ge=-1, le=INT64 - 1)] | None
_LOGPROBS = Annotated[int, Meta(ge=0, le=INT64 - 1)] | None


class GenerationBody(_SamplingFields, frozen=True, kw_only=True):
    """The common fields of chat and completions. None means the model's default, else OpenAI's.

    max_tokens, max_completion_tokens and llama.cpp's n_predict are three names of one parameter.
    """

    model: str | None = None
    max_tokens: _TOKENS = None
    max_completion_tokens: _TOKENS = None
    n_predict: Annotated[int, Meta(ge=-1, le=INT64 - 1)] | None = None
    best_of: _TOKENS = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    metadata: dict[str, str] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """thinking_budget_tokens, reasoning_budget_tokens: llama.cpp's names of thinking_token_budget."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_budget_tokens: _BUDGET = None
    reasoning_budget_tokens: _BUDGET = None
    logprobs: bool | None = None
    top_logprobs: _LOGPROBS = None
    tools: list[ToolSpec] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


# allOf, because msgspec writes anyOf itself, for a type whose lists may mix.
_PROMPT_FORMS = {
    "allOf": [
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ]
}


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    # Lists that mix forms are refused later: msgspec reads at most one array type in a union.
    prompt: Annotated[str | list[str | int | list[int]], Meta(extra_json_schema=_PROMPT_FORMS)]
    suffix: str | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=INT64 - 1)] | None = None
    echo: bool | None = None
    logprobs: _LOGPROBS = None


class TokenizeBody(Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolSpec] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


class EmbeddingBody(Struct, frozen=True, kw_only=True):
    input: Annotated[str | list[str | int | list[int]], Meta(extra_json_schema=_PROMPT_FORMS)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=INT64 - 1)] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class InfillFile(Struct, frozen=True):
    """Another file of the project, shown to the model."""

    filename: str
    text: str


if TYPE_CHECKING:
    _InfillSampling = _SamplingFields
else:
    _ELSEWHERE = {
        "n", "max_tokens", "logprobs", "prompt_logprobs", "structured_outputs", "thinking_token_budget",
    }  # fmt: skip
    _InfillSampling = sampling_fields("_InfillSampling", without=_ELSEWHERE)


class InfillBody(_InfillSampling, frozen=True, kw_only=True):
    """llama.cpp's body. prompt: the beginning of the answer. n_predict: -1 for no limit, 0 to fill the cache.

    n_indent: the answer ends before a line with less indentation. t_max_predict_ms: milliseconds after the
    first token at which the answer ends, if it has a whole line.
    """

    input_prefix: str
    input_suffix: str
    input_extra: list[InfillFile] | None = None
    prompt: str | None = None
    model: str | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=INT64 - 1)] | None = None
    max_tokens: _TOKENS = None
    n_indent: Annotated[int, Meta(ge=0, le=1000)] | None = None
    t_max_predict_ms: Annotated[float, Meta(ge=0)] | None = None
    grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None


# -- answers -----------------------------------------------------------------------------------

Count = Annotated[int, Meta(ge=0)]
Reason = Literal["stop", "length"]
ChatReason = Literal["stop", "length", "tool_calls"]


class ErrorInside(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    error: ErrorInside


class PromptDetails(Struct):
    cached_tokens: Count


class Usage(Struct):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[Count] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class PromptLogprob(Struct):
    logprob: float
    rank: Count
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None] | None
TokenIds = list[Count] | UnsetType


class Function(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(Struct):
    id: str
    function: Function
    type: Literal["function"] = "function"


class ToolCallPart(Struct, kw_only=True):
    """A part of a streamed call. The first part has the id and the name; clients join the arguments."""

    index: Count
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: Function


class Message(Struct):
    """An answer's message. reasoning_content and reasoning are equal, since clients read one or the other."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: Count
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason
    stop_reason: str | int | None
    token_ids: TokenIds = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    created: Count
    model: str
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None
    prompt_logprobs: PromptLogprobs
    prompt_token_ids: TokenIds = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: Count
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: TokenIds = UNSET


class ChatCompletionChunk(Struct, kw_only=True):
    id: str
    created: Count
    model: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None
    prompt_token_ids: TokenIds = UNSET


class CompletionChoice(Struct, kw_only=True):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET


class Completion(Struct, kw_only=True):
    id: str
    created: Count
    model: str
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: None = None


class CompletionChunkChoice(Struct, kw_only=True):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Reason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET


class CompletionChunk(Struct, kw_only=True):
    id: str
    created: Count
    model: str
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None


class Embedding(Struct):
    """One vector. embedding: numbers, or little-endian float32 in base64."""

    index: Count
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct):
    prompt_tokens: Count
    total_tokens: Count


class EmbeddingList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class InfillTimings(Struct):
    """Tokens, milliseconds and rates, under llama.cpp's names. cache_n: prompt tokens from the cache."""

    cache_n: Count
    prompt_n: Count
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: Count
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillAnswer(Struct, kw_only=True):
    """llama.cpp's answer. Fields may be missing, since a request can choose the fields of its answer."""

    content: str | UnsetType = UNSET
    tokens: list[Count] | UnsetType = UNSET
    stop: bool | UnsetType = UNSET
    index: Count | UnsetType = 0
    id_slot: int | UnsetType = -1
    model: str | UnsetType = UNSET
    tokens_predicted: Count | UnsetType = UNSET
    tokens_evaluated: Count | UnsetType = UNSET
    tokens_cached: Count | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Literal["eos", "limit", "word"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    timings: InfillTimings | UnsetType = UNSET


class StoredKV(Struct):
    stored_as: str
    bytes_per_token: Count
    capacity_tokens: Count
    page_size: Count


class ModelCard(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: str = "kvant"
    root: str
    parent: None = None
    max_model_len: Count
    kv_cache: StoredKV


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class PlanTarget(Struct):
    layers: list[dict[str, Any]]
    bytes_per_token: Count


class Plan(Struct):
    """The parts of `kvant plan --format json` that clients rely on."""

    schema: Count
    model: str
    fingerprint: str
    page_size: Count
    target: PlanTarget


class Tokens(Struct):
    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str | None] | None = None


class Text(Struct):
    prompt: str


class TokenizerInfo(Struct, kw_only=True):
    tokenizer_class: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    vocab_size: Count


class State(Struct):
    """The server's state. phase: the current task of a start. fraction: its progress, if known."""

    status: Literal["starting", "ready", "restarting", "stopped", "draining"]
    phase: str | UnsetType = UNSET
    fraction: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET


class LiveGroup(Struct):
    """Pages of one group of layers. kept: the tokens that it keeps, in words. shared: held by several
    sequences.
    """

    kept: str
    held: Count
    shared: Count
    idle: Count
    usable: Count


class LivePages(Struct):
    """Counts of pages. held: by sequences. idle: cached, without a sequence. usable: in total."""

    held: Count
    idle: Count
    usable: Count
    page_size: Count
    groups: list[LiveGroup]


class LiveRequest(Struct):
    """Tokens of one request. cached: None until the request has ended."""

    prompt: Count
    cached: int | None
    new: Count
    seconds: float


class LiveDrafts(Struct):
    drafted: Count
    accepted: Count
    mean_length: float


class Live(Struct, kw_only=True):
    """The current state of the cache. phase, fraction: as in `State`. seconds: a monotonic clock. requests:
    the running ones, then the last ended ones.

    prompt_tokens, cached_tokens: of ended requests. generated: new tokens of all requests.
    """

    status: Literal["starting", "ready", "restarting", "stopped", "draining"]
    phase: str | None
    fraction: float | None
    model: str
    fingerprint: str | None
    seconds: float
    running: Count
    waiting: Count
    pages: LivePages
    prompt_tokens: Count
    cached_tokens: Count
    generated: Count
    drafts: LiveDrafts | None
    requests: list[LiveRequest]


class Version(Struct):
    version: str


class Load(Struct):
    """The load. server_load: sequences that run or wait."""

    server_load: Count


class RankLoad(Struct, kw_only=True):
    """Load of one data-parallel rank. token_usage: share of the KV cache. utilization: share of places."""

    dp_rank: Count
    num_running_reqs: Count
    num_waiting_reqs: Count
    num_waiting_uncached_tokens: Count
    num_total_reqs: Count
    num_used_tokens: Count
    max_total_num_tokens: Count
    token_usage: float
    utilization: float
    max_running_requests: Count


class Loads(Struct):
    """The load in SGLang's form, for gateways. timestamp: ISO 8601, in UTC."""

    timestamp: str
    version: str
    model: str
    dp_rank_count: Count
    loads: list[RankLoad]


class Rendered(Struct):
    """The token ids of one prompt."""

    model: str
    token_ids: list[Count]


class SessionCard(Struct):
    """A saved session. saved_tokens: number of leading tokens whose pages are in files."""

    id: str
    saved: Count
    num_tokens: Count
    saved_tokens: Count


class RestoredSession(SessionCard, kw_only=True):
    """A session and its conversation."""

    messages: list[Any]


class SessionList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[SessionCard]


class DeletedSession(Struct):
    id: str
    deleted: Literal[True] = True


class ServerInfo(Struct):
    """The served model and its limits. fingerprint: of the plan, see /v1/kv/plan."""

    version: str
    models: list[str]
    root: str
    revision: str | None
    fingerprint: str
    max_model_len: Count
    max_num_seqs: Count
    vocab_size: Count
    kv_cache: StoredKV


class Document(Struct):
    """The top-level fields of an OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
