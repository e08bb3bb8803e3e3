"""Types of the JSON of /v1/responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from kvant.sampling.sampling_params import INT64
from kvant.server.wire import Count, sampling_fields

_TOKENS = Annotated[int, Meta(ge=1, le=INT64 - 1)] | None


class Content(Struct, frozen=True):
    """A part of a message, of a function's output, or of reasoning."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(Struct, frozen=True):
    """One item of the input. Its type determines its fields; without a type it is a message."""

    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Content] | None = None
    summary: list[Content] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Content] | None = None


class Tool(Struct, frozen=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Struct, frozen=True):
    """A function that must be called, or the tools that may be called."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class Format(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True):
    format: Format | None = None
    verbosity: str | None = None


class Reasoning(Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(Struct, frozen=True):
    include_obfuscation: bool | None = None


if TYPE_CHECKING:

    class _Sampling(Struct, frozen=True, kw_only=True):
        def __getattr__(self, name: str) -> Any: ...

else:
    _Sampling = sampling_fields(
        "_ResponseSampling", without=("n", "max_tokens", "logprobs", "prompt_logprobs")
    )


class ResponseBody(_Sampling, frozen=True, kw_only=True):
    """A request. store: keep the response for later requests; the default is the server's setting."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: _TOKENS = None
    top_logprobs: Annotated[int, Meta(ge=0, le=INT64 - 1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class InputDetails(Struct):
    cached_tokens: Count
    cache_write_tokens: Count = 0


class OutputDetails(Struct):
    """Details of the answer's tokens. reasoning_tokens: tokens of the pieces that contained reasoning."""

    reasoning_tokens: Count


class ResponseUsage(Struct):
    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class ResponseFault(Struct):
    code: str
    message: str


class Incomplete(Struct):
    reason: str


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseAnswer(Struct, kw_only=True):
    """A whole response. output: items of type message, reasoning or function_call."""

    id: str
    object: Literal["response"] = "response"
    created_at: Count
    status: Status = "in_progress"
    background: bool = False
    error: ResponseFault | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt: None = None
    reasoning: dict[str, str | None]
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Count = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: None = None
    metadata: dict[str, str]


class ResponseEvent(Struct):
    """The fields of every event of a stream; the type determines the other fields."""

    type: str
    sequence_number: Count


class ResponseInputTokens(Struct):
    input_tokens: Count
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Deleted(Struct):
    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: Literal[True] = True


class InputItems(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False
