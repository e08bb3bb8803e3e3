"""The bodies of requests, as strict models: whole numbers are no texts, no booleans and no fractions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_INT64 = 2**63


class _Body(BaseModel):
    # What is not declared here is looked up in `kvant.server.unsupported`.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class StreamOptions(_Body):
    include_usage: bool | None = None


class GenerationBody(_Body):
    """What both ways to generate take. None: the model's generation config, else OpenAI's default."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1)
    best_of: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=_INT64)]] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None


class ChatBody(GenerationBody):
    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)


class CompletionBody(GenerationBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0)


class TokenizeBody(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: list[int]
