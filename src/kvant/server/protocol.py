"""The bodies of requests, as strict models: whole numbers are no texts, no booleans and no fractions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field

_INT64 = 2**63
_Item = TypeVar("_Item")


class _AtTheFirst(FailFast):
    """Hashable, as part of a union must be."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


Items = Annotated[list[_Item], _AtTheFirst()]
"""A list that is refused at its first wrong item: a million wrong ones make one error."""


class _Body(BaseModel):
    # What is not declared here is looked up in `kvant.server.unsupported`.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[TextPart]


class StreamOptions(_Body):
    include_usage: bool | None = None


class JsonSchema(_Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredBody(_Body):
    """vLLM's `structured_outputs`: exactly one of these."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None


class GenerationBody(_Body):
    """What both ways to generate take. None: the model's generation config, else OpenAI's default."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, lt=_INT64)
    max_completion_tokens: int | None = Field(None, ge=1, lt=_INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    min_tokens: int | None = Field(None, ge=0, lt=_INT64)
    n: int | None = Field(None, ge=1, lt=_INT64)
    best_of: int | None = Field(None, ge=1, lt=_INT64)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: Items[str] | None = None
    allowed_token_ids: Items[int] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredBody | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = Field(None, ge=0, lt=_INT64)
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    metadata: dict[str, str] | None = None


class ChatBody(GenerationBody):
    messages: Items[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, lt=_INT64)


class CompletionBody(GenerationBody):
    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: int | None = Field(None, ge=0, lt=_INT64)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, lt=_INT64)


class TokenizeBody(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: Items[int]
