"""What a checked request asks for, and what the server knows of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvant.models.pooling import Pooling
from kvant.sampling.sampling_params import SamplingParams
from kvant.server.fill import FillForm
from kvant.server.reply import Tools

Prompt = str | tuple[int, ...]
"""A text, or token ids."""


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
