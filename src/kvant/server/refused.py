"""Request fields of other servers that this one does not offer.

A neutral value passes; any other value is refused by name. None of these fields is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

IsNeutral = Callable[[object], bool]


def _is(*allowed: object) -> IsNeutral:
    """One of these values, of the same type: False is not 0."""
    return lambda value: any(type(value) is type(a) and value == a for a in allowed)


def _number(*neutral: float) -> IsNeutral:
    return lambda value: type(value) in (int, float) and value in neutral


_NEVER = _is()
_EMPTY_LIST = _is([])
_EMPTY_OBJECT = _is({})
_FALSE = _is(False)

UNSUPPORTED: Mapping[str, IsNeutral] = {
    # OpenAI
    "echo": _FALSE,
    "suffix": _is(""),
    "tools": _EMPTY_LIST,
    "tool_choice": _is("none", "auto"),
    "functions": _EMPTY_LIST,
    "function_call": _is("none", "auto"),
    "audio": _NEVER,
    "modalities": _is(["text"]),
    "prediction": _NEVER,
    "web_search_options": _NEVER,
    "reasoning_effort": _NEVER,
    "verbosity": _NEVER,
    "store": _FALSE,
    # vLLM
    "length_penalty": _number(1),
    "early_stopping": _FALSE,
    "use_beam_search": _FALSE,
    "chat_template": _NEVER,
    "chat_template_kwargs": _EMPTY_OBJECT,
    "add_generation_prompt": _is(True),
    "continue_final_message": _FALSE,
    "guided_decoding_backend": _is("guidance", "auto"),
    "guided_whitespace_pattern": _NEVER,
    "structural_tag": _NEVER,
    "documents": _EMPTY_LIST,
    "mm_processor_kwargs": _EMPTY_OBJECT,
    "logits_processors": _EMPTY_LIST,
    "truncate_prompt_tokens": _NEVER,
    "priority": _is(0),
    "kv_transfer_params": _NEVER,
    "spaces_between_special_tokens": _is(True),
    "prompt_embeds": _NEVER,
    "logprob_token_ids": _EMPTY_LIST,
    "thinking_token_budget": _NEVER,
    "repetition_detection": _NEVER,
    "vllm_xargs": _EMPTY_OBJECT,
    "include_reasoning": _is(True),
    # llama.cpp
    "samplers": _EMPTY_LIST,
    "repeat_penalty": _number(1),
    "typical_p": _number(1),
    "tfs_z": _number(1),
    "top_n_sigma": _number(-1),
    "mirostat": _is(0),
    "xtc_probability": _number(0),
    "dry_multiplier": _number(0),
    "dynatemp_range": _number(0),
    "n_probs": _is(0),
    "lora": _EMPTY_LIST,
    # SGLang
    "stop_regex": _NEVER,
    "no_stop_trim": _FALSE,
    "lora_path": _NEVER,
    "return_hidden_states": _FALSE,
    "custom_logit_processor": _NEVER,
}
IN_MESSAGES: Mapping[str, IsNeutral] = {
    "function_call": _NEVER,
    "audio": _NEVER,
    "refusal": _NEVER,
}
IN_STRUCTURED_OUTPUTS: Mapping[str, IsNeutral] = {
    "structural_tag": _NEVER,
    "whitespace_pattern": _NEVER,
    "disable_any_whitespace": _FALSE,
    "disable_additional_properties": _FALSE,
    "disable_fallback": _is(False, True),  # there is one way to do it, so there is no fallback
    "backend": _is("guidance", "auto"),
}
NO_EFFECT = frozenset(
    {
        "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier",
        "cache_prompt", "id_slot", "timings_per_token",
    }
)  # fmt: skip
"""Fields that describe the client, the bill or the cache: they cannot change an answer."""

RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "messages", "conversation", "conversations", "tools", "documents", "chat_template", "tokenize",
        "add_generation_prompt", "continue_final_message", "return_dict", "return_tensors",
        "return_assistant_tokens_mask", "truncation", "padding", "max_length",
    }
)  # fmt: skip
