"""Types of the JSON of /v1/messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvant.sampling.sampling_params import INT64
from kvant.server.wire import Count


class Block(Struct, frozen=True):
    """A block of a message. Its type says which fields it has."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class Turn(Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(Struct, frozen=True):
    """A function that the client runs. type: "custom" or absent; other types are Anthropic's own tools."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,128}$")]
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class MessagesToolChoice(Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True):
    """Whether to think. budget_tokens: the most tokens of thinking, if the type is "enabled".

    display: omitted leaves thinking out of the answer; summarized shows it whole.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0, le=INT64 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(Struct, frozen=True, kw_only=True):
    messages: list[Turn]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesBody(CountBody, frozen=True, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=INT64 - 1)]
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT64 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool | None = None


class MessagesUsage(Struct):
    """Token counts. input_tokens: prompt tokens that the prefix cache did not have."""

    input_tokens: Count
    output_tokens: Count
    cache_read_input_tokens: Count = 0
    cache_creation_input_tokens: Count = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesAnswer(Struct, kw_only=True):
    """A whole answer. content: blocks of type text, thinking or tool_use."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class MessagesEvent(Struct):
    """The field of every event of a stream; the type determines the other fields."""

    type: str


class InputTokens(Struct):
    input_tokens: Count


class MessagesFault(Struct):
    """An error in Anthropic's shape. param, code: as in OpenAI's errors."""

    type: str
    message: str
    param: str | None
    code: str | None


class MessagesError(Struct):
    error: MessagesFault
    type: Literal["error"] = "error"
