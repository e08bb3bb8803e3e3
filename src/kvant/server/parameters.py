"""Tables of the parameters that each endpoint refuses or that have no effect.

A body's type has the parameters that work; the tables here have the others. Unknown parameters are refused.
docs/parameters.md is written from this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvant.errors import BadValue, WayOut
from kvant.kv.checkpoint.json_file import parse_option_object

IsNeutral = Callable[[object], bool]


def _is(*allowed: object) -> IsNeutral:
    """Returns a test for these values that also compares types: False is not 0."""
    return lambda value: any(type(value) is type(a) and value == a for a in allowed)


def _number(*neutral: float) -> IsNeutral:
    return lambda value: type(value) in (int, float) and value in neutral


_NOTHING = _is()


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused parameter. is_neutral: tests for values that ask for nothing, which pass, as null does.

    way_out: what to do instead, for the error message.
    """

    is_neutral: IsNeutral = _NOTHING
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """The parameters of one endpoint that its body's type does not have. no_effect: name -> the reason."""

    refused: Mapping[str, Refused] = field(default_factory=dict)
    no_effect: Mapping[str, str] = field(default_factory=dict)


_NEVER = Refused()
_EMPTY_LIST = Refused(_is([]))
_EMPTY_OBJECT = Refused(_is({}))
_FALSE = Refused(_is(False))
_ONE = Refused(_number(1))
_ZERO = Refused(_number(0))
_TEXT_ONLY = Refused(_is({}, []), "this server takes text only")
_LORA = Refused(_is([], ""), "merge the adapter into the weights first")
_NO_PARTS = Refused(_is({}), "this server does not send KV cache pages anywhere")
_EXPERTS = Refused(_number(0), "this server does not return expert routes")

_CLIENT = "describes the client or the bill"
_CACHE = "describes the cache, which is always on"

_SHARED: Mapping[str, Refused] = {
    # OpenAI
    "suffix": Refused(_is(""), "use /v1/completions"),
    "functions": Refused(_is([]), "use tools"),
    "function_call": Refused(_is("none", "auto"), "use tool_choice"),
    "audio": _TEXT_ONLY,
    "modalities": Refused(_is(["text"]), "this server takes text only"),
    "moderation": _NEVER,
    "prediction": Refused(way_out="start the server with --speculative-config"),
    "web_search_options": Refused(way_out="declare the search as a function in tools"),
    "verbosity": Refused(_is("medium"), "say it in the system message"),
    "store": Refused(_is(False), "/v1/responses stores answers"),
    # vLLM
    "length_penalty": _ONE,
    "early_stopping": _FALSE,
    "use_beam_search": Refused(_is(False), "ask for several answers with n"),
    "chat_template": Refused(way_out="put it into chat_template.jinja of the model's directory"),
    "guided_decoding_backend": Refused(_is("guidance", "auto")),
    "guided_whitespace_pattern": _NEVER,
    "structural_tag": Refused(way_out="give a grammar in structured_outputs"),
    "documents": Refused(_is([]), "put the documents into a message"),
    "media_io_kwargs": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "return_mm_kwargs": Refused(_is(True, False)),
    "logits_processors": Refused(_is([]), "use logit_bias, bad_words or allowed_token_ids"),
    "truncate_prompt_tokens": Refused(way_out="shorten the prompt; /tokenize counts its tokens"),
    "truncation_side": _NEVER,
    "priority": Refused(_is(0)),
    "kv_transfer_params": _NO_PARTS,
    "ec_transfer_params": _NO_PARTS,
    "spaces_between_special_tokens": Refused(_is(True)),
    "prompt_embeds": Refused(way_out="send the text, or its token ids"),
    "logprob_token_ids": Refused(_is([]), "ask for top_logprobs"),
    "repetition_detection": Refused(way_out="use repetition_penalty or frequency_penalty"),
    "watermarking": _FALSE,
    "vllm_xargs": _EMPTY_OBJECT,
    "return_token_offsets": _FALSE,
    "return_prompt_text": Refused(_is(False), "POST /detokenize the prompt's token ids"),
    "routed_experts_prompt_start": _EXPERTS,
    "stream_interval": Refused(_is(1)),
    # llama.cpp
    "samplers": _EMPTY_LIST,
    "repeat_penalty": Refused(_number(1), "use repetition_penalty"),
    "typical_p": _ONE,
    "tfs_z": _ONE,
    "top_n_sigma": Refused(_number(-1)),
    "mirostat": _ZERO,
    "xtc_probability": _ZERO,
    "dry_multiplier": _ZERO,
    "dynatemp_range": _ZERO,
    "n_probs": Refused(_number(0), "use logprobs"),
    "n_keep": _ZERO,
    "n_indent": _ZERO,
    "t_max_predict_ms": _ZERO,
    "min_keep": _ZERO,
    "lora": _LORA,
    "return_progress": Refused(_is(False), "progress of all requests is at /v1/kv/live"),
    "post_sampling_probs": _FALSE,
    # SGLang
    "stop_regex": Refused(way_out="use stop"),
    "no_stop_trim": Refused(_is(False), "use include_stop_str_in_output"),
    "lora_path": _LORA,
    "return_hidden_states": _FALSE,
    "custom_logit_processor": _NEVER,
}
_ONLY_CONVERSATIONS: Mapping[str, Refused] = {
    "tools": Refused(_is([]), "use /v1/chat/completions"),
    "tool_choice": Refused(_is("none", "auto"), "use /v1/chat/completions"),
    "parallel_tool_calls": Refused(_is(True, False), "use /v1/chat/completions"),
    "reasoning_effort": Refused(way_out="use /v1/chat/completions"),
    "chat_template_kwargs": Refused(_is({}), "use /v1/chat/completions"),
    "add_generation_prompt": Refused(_is(True), "use /v1/chat/completions"),
    "continue_final_message": Refused(_is(False), "use /v1/chat/completions"),
    "include_reasoning": Refused(_is(True), "use /v1/chat/completions"),
    "thinking_budget_tokens": Refused(_is(-1), "use thinking_token_budget"),
    "reasoning_budget_tokens": Refused(_is(-1), "use thinking_token_budget"),
    "top_logprobs": Refused(_number(0), "use logprobs"),
}
_SHARED_NO_EFFECT: Mapping[str, str] = {
    "user": _CLIENT,
    "safety_identifier": _CLIENT,
    "service_tier": _CLIENT,
    "session_id": _CLIENT,
    "prompt_cache_key": _CACHE,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": _CACHE,
    "cache_prompt": _CACHE,
    "id_slot": "places are given by the server",
    "timings_per_token": "times are at /metrics",
    "sse_ping_interval": "--ping-interval decides for all streams",
    "dry_base": "belongs to dry_multiplier, which is refused",
    "dry_allowed_length": "belongs to dry_multiplier, which is refused",
    "dry_penalty_last_n": "belongs to dry_multiplier, which is refused",
    "dry_sequence_breakers": "belongs to dry_multiplier, which is refused",
    "xtc_threshold": "belongs to xtc_probability, which is refused",
    "dynatemp_exponent": "belongs to dynatemp_range, which is refused",
    "mirostat_tau": "belongs to mirostat, which is refused",
    "mirostat_eta": "belongs to mirostat, which is refused",
    "repeat_last_n": "belongs to repeat_penalty, which is refused",
}

CHAT = Table(
    {
        **_SHARED,
        "echo": Refused(_is(False), "use /v1/completions"),
        # SGLang. vLLM's router sends them with every conversation.
        "separate_reasoning": Refused(_is(True), "include_reasoning decides whether there is any"),
        "stream_reasoning": Refused(_is(True), "include_reasoning decides whether there is any"),
    },
    _SHARED_NO_EFFECT,
)
COMPLETIONS = Table(
    {**{name: one for name, one in _SHARED.items() if name != "suffix"}, **_ONLY_CONVERSATIONS},
    _SHARED_NO_EFFECT,
)
_IN_INFILL = frozenset({"n_indent", "t_max_predict_ms", "suffix", "guided_decoding_backend"})
INFILL = Table(
    {
        **{
            name: one
            for name, one in {**_SHARED, **_ONLY_CONVERSATIONS}.items()
            if name not in _IN_INFILL
        },
        # Editors send this list. Its last item is llama.cpp's rule for when to stop.
        "samplers": Refused(
            _is([], ["top_k", "top_p", "infill"]), "top_k and top_p are parameters; leave it out"
        ),
        "echo": Refused(_is(False), "use /v1/completions"),
        "logprobs": Refused(way_out="use /v1/completions"),
        "suffix": Refused(way_out="use input_suffix"),
        "n": Refused(_is(1), "send the request several times"),
        "thinking_token_budget": Refused(_is(-1), "the model fills in without thinking"),
    },
    {
        **_SHARED_NO_EFFECT,
        "t_max_prompt_ms": "llama.cpp does not read it either",
    },
)
RESPONSES = Table(
    {
        "access_programs": _NEVER,
        "background_options": _NEVER,
        "context_management": Refused(_is([]), "shorten the input"),
        "conversation": Refused(way_out="use previous_response_id"),
        "image": _TEXT_ONLY,
        "moderation": _NEVER,
        "prompt": Refused(way_out="send the prompt's text as instructions and input"),
        "max_tokens": Refused(way_out="use max_output_tokens"),
        "n": Refused(_is(1), "send the request several times"),
        "logprobs": Refused(way_out="use include and top_logprobs"),
        "prompt_logprobs": Refused(way_out="use /v1/completions"),
        "enable_response_messages": _FALSE,
        "previous_input_messages": Refused(_is([]), "send them as input"),
        "previous_response": Refused(way_out="use previous_response_id, or send its output as input"),
        "mm_processor_kwargs": _TEXT_ONLY,
        "priority": Refused(_is(0)),
        "vllm_xargs": _EMPTY_OBJECT,
    },
    {
        "max_tool_calls": "bounds tools that a server runs; this one runs none",
        "user": _CLIENT,
        "safety_identifier": _CLIENT,
        "service_tier": _CLIENT,
        "prompt_cache_key": _CACHE,
        "prompt_cache_options": _CACHE,
        "prompt_cache_retention": _CACHE,
    },
)  # fmt: skip
MESSAGES = Table(
    {
        "billing_policy": _NEVER,
        "compaction": Refused(way_out="shorten the conversation"),
        "container": _NEVER,
        "context_management": Refused(_is({}), "shorten the conversation"),
        "diagnostics": _NEVER,
        "fallback_credit_token": _NEVER,
        "fallbacks": _EMPTY_LIST,
        "mcp_servers": Refused(_is([]), "declare the servers' functions in tools"),
        "thread": _NEVER,
    },
    {
        "betas": "names of previews",
        "cache_control": _CACHE,
        "inference_geo": "the server is where it is",
        "metadata": _CLIENT,
        "service_tier": _CLIENT,
        "speed": _CLIENT,
        "user_profile_id": _CLIENT,
        "workspace_id": _CLIENT,
    },
)
TOKENIZE = Table(
    {
        "chat_template": _SHARED["chat_template"],
        "mm_processor_kwargs": _TEXT_ONLY,
        "media_io_kwargs": _TEXT_ONLY,
        "truncate_prompt_tokens": _SHARED["truncate_prompt_tokens"],
        "truncation_side": _NEVER,
        "with_pieces": Refused(_is(False), "use return_token_strs"),
    },
    {"parse_special": "marks of special tokens in a text always become these tokens"},
)
EMBEDDINGS = Table(
    {
        **{
            name: Refused(way_out="send the conversation's text, or its token ids, as input")
            for name in (
                "messages",
                "chat_template",
                "chat_template_kwargs",
                "add_generation_prompt",
                "continue_final_message",
            )
        },
        "embed_dtype": Refused(_is("float32"), "use encoding_format base64, which is float32"),
        "endianness": Refused(_is("native", "little")),
        "input_type": Refused(way_out="put the model's instruction into the text"),
        "mm_processor_kwargs": _TEXT_ONLY,
        "pooling": Refused(_is("last"), "the last token's state is the vector"),
        "priority": Refused(_is(0)),
        "truncate_prompt_tokens": Refused(way_out="shorten the input; /tokenize counts its tokens"),
        "truncation_side": _NEVER,
        "use_activation": Refused(_is(True), "use normalize"),
    },
    {"user": _CLIENT},
)
NONE = Table()

NOT_OFFERED: Mapping[str, str] = {
    "/embedding": "use /v1/embeddings",
    "/pooling": "use /v1/embeddings",
    "/classify": "ask for one of several texts with structured_outputs.choice",
    "/score": "ask for prompt_logprobs of /v1/completions",
    "/rerank": "ask for prompt_logprobs of /v1/completions",
    "/reranking": "ask for prompt_logprobs of /v1/completions",
    "/audio": "it takes and gives text only",
    "/images": "it takes and gives text only",
    "/videos": "it takes and gives text only",
    "/realtime": "use streams of /v1/responses",
    "/moderations": "ask the model in a conversation",
    "/files": "it stores no files",
    "/uploads": "it stores no files",
    "/vector_stores": "it stores no files",
    "/batches": "send the requests side by side; it batches them",
    "/fine_tuning": "it does not train",
    "/assistants": "use /v1/responses",
    "/threads": "use /v1/responses with previous_response_id",
    "/conversations": "use /v1/responses with previous_response_id",
    "/containers": "it runs no code",
    "/evals": "use kvant eval",
    "/load_lora_adapter": "merge the adapter into the weights and start with these",
    "/unload_lora_adapter": "merge the adapter into the weights and start with these",
    "/lora-adapters": "merge the adapter into the weights and start with these",
    "/slots": "running sequences are at /v1/kv/live and in /metrics",
    "/props": "the model and its limits are at /server_info",
    "/apply-template": "POST /tokenize with messages, then /detokenize",
    "/completion": "use /v1/completions",
    "/generate": "use /v1/completions",
    "/invocations": "use /v1/chat/completions",
    "/responses/compact": "start a response without previous_response_id",
    "/messages/batches": "send the requests side by side; it batches them",
    "/chat/completions/input_tokens": "POST /tokenize with messages",
    "/api": "Ollama's endpoints have OpenAI's under /v1 beside them: use these",
    "/sleep": "stop the server; it starts in seconds",
    "/wake_up": "it never sleeps",
    "/reset_prefix_cache": "give requests another cache_salt",
}
"""Endpoints of other servers, without /v1, and what to do instead."""


@dataclass(frozen=True, slots=True)
class Inside:
    """The fields of an object in a body that its type does not have; see `Table`.

    is_history: clients send the object back as some server gave it, so an unknown field is logged once and
    not refused. types: the values of `type` whose fields are known; other types are refused elsewhere. None
    means all.
    """

    refused: Mapping[str, Refused] = field(default_factory=dict)
    no_effect: Mapping[str, str] = field(default_factory=dict)
    is_history: bool = False
    types: frozenset[str | None] | None = None


_CALLERS = Refused(_is(["direct"]), "the client runs the function")
_DEFERRED = Refused(_is(False), "leave the tool out until it is needed")
_MARKED = {"cache_control": _CACHE, "prompt_cache_breakpoint": _CACHE}
_SHOWN_BEFORE = "belongs to an answer that was given"
_HISTORY = Inside(is_history=True)
TEXT_TYPES = frozenset(
    {"input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"}
)
"""Types of the parts of an item of /v1/responses that have a text."""

INSIDE: Mapping[str, Inside] = {
    "ChatMessage": Inside(
        {
            "function_call": Refused(way_out="use tool_calls"),
            "audio": _TEXT_ONLY,
            "refusal": _NEVER,
        },
        {"annotations": _SHOWN_BEFORE, "cache_control": _CACHE},
        is_history=True,
    ),
    "ContentPart": Inside({}, _MARKED, is_history=True, types=frozenset({"text"})),
    "MadeCall": Inside({}, {"index": "the list has an order"}, is_history=True),
    "CalledFunction": _HISTORY,
    "ToolSpec": Inside(
        {name: Refused(way_out="put it into `function`") for name in ("strict", "parameters")},
        {"cache_control": _CACHE},
    ),
    "FunctionSpec": Inside({}, {"cache_control": _CACHE}),
    "StructuredBody": Inside(
        {
            "structural_tag": _NEVER,
            "whitespace_pattern": _NEVER,
            "disable_any_whitespace": _FALSE,
            "disable_additional_properties": _FALSE,
            # There is one way to do it, so there is no fallback.
            "disable_fallback": Refused(_is(False, True)),
            "backend": Refused(_is("guidance", "auto")),
        }
    ),
    "InfillFile": Inside({}, {"time": "the list has an order"}),
    "Item": Inside(
        {},
        {
            **dict.fromkeys(("id", "status", "phase", "caller"), _SHOWN_BEFORE),
            "encrypted_content": "reasoning is read as text",
            "namespace": "names of functions are whole",
            "async": "the conversation tells what was answered",
        },
        is_history=True,
    ),
    "Content": Inside(
        {},
        {**_MARKED, "annotations": _SHOWN_BEFORE, "logprobs": _SHOWN_BEFORE},
        is_history=True,
        types=TEXT_TYPES,
    ),
    "Tool": Inside(
        {
            "allowed_callers": _CALLERS,
            "async": Refused(_is(False), "calls are made by the client"),
            "defer_loading": _DEFERRED,
        },
        {"output_schema": "describes what the client answers", "cache_control": _CACHE},
        types=frozenset({"function"}),
    ),
    "ToolChoice": Inside(types=frozenset({"function", "allowed_tools"})),
    "Reasoning": Inside(
        {
            "context": Refused(_is("auto"), "send the reasoning as items"),
            "mode": _NEVER,
            "max_tokens": Refused(way_out="use thinking_token_budget"),
        }
    ),
    "Turn": _HISTORY,
    "Block": Inside(
        {},
        {
            **_MARKED,
            **dict.fromkeys(("citations", "caller"), _SHOWN_BEFORE),
            "signature": "thinking is read as text",
            "toolset_name": "names of functions are whole",
        },
        is_history=True,
        types=frozenset({"text", "thinking", "tool_use", "tool_result"}),
    ),
    "MessagesTool": Inside(
        {
            "allowed_callers": _CALLERS,
            "defer_loading": _DEFERRED,
            "input_examples": Refused(_is([]), "put them into the description"),
        },
        {
            "cache_control": _CACHE,
            "eager_input_streaming": "arguments come as soon as they are written",
        },
        types=frozenset({None, "custom"}),
    ),
    "Thinking": Inside({"block_binding": _NEVER}),
    "OutputConfig": Inside({"task_budget": Refused(way_out="use max_tokens")}),
}
"""Objects in bodies, by the name of their type. A type that is not here refuses every other field."""

RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "messages", "conversation", "conversations", "tools", "documents", "chat_template", "tokenize",
        "add_generation_prompt", "continue_final_message", "return_dict", "return_tensors",
        "return_assistant_tokens_mask", "truncation", "padding", "max_length",
    }
)  # fmt: skip


def read_template_values(given: str | None) -> dict[str, Any]:
    """Parses the value of --default-chat-template-kwargs. Raises BadValue."""
    flag = "--default-chat-template-kwargs"
    way_out = WayOut("write an object", (flag, '{"enable_thinking": false}'))
    values = parse_option_object("{}" if given is None else given, asked_by=flag, way_out=way_out)
    if taken := RESERVED_TEMPLATE_NAMES & values.keys():
        raise BadValue(
            f"{flag} {given} gives no values",
            why=f"the server sets {min(taken)}",
            ways_out=(way_out,),
        )
    return dict(values)
