"""Parameters that other servers have and this one has not: neutral values pass, all others are refused.

Nothing here is ever ignored: a client that sets one of these is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvant.server.api_error import bad_request


def _is(*allowed: object) -> Callable[[object], bool]:
    """One of these, of the very same type: False is not 0."""
    return lambda value: any(type(value) is type(a) and value == a for a in allowed)


def _number(neutral: int) -> Callable[[object], bool]:
    return lambda value: type(value) in (int, float) and value == neutral


_NEVER = _is()
_EMPTY_LIST = _is([])
_EMPTY_OBJECT = _is({})
_FALSE = _is(False)

UNSUPPORTED: Mapping[str, Callable[[object], bool]] = {
    "length_penalty": _number(1),
    "echo": _FALSE,
    "suffix": _is(""),
    "tools": _EMPTY_LIST,
    "tool_choice": _is("none"),
    "functions": _EMPTY_LIST,
    "function_call": _is("none"),
    "audio": _NEVER,
    "modalities": _is(["text"]),
    "prediction": _NEVER,
    "web_search_options": _NEVER,
    "reasoning_effort": _NEVER,
    "verbosity": _NEVER,
    "store": _FALSE,
    "chat_template": _NEVER,
    "chat_template_kwargs": _EMPTY_OBJECT,
    "add_generation_prompt": _is(True),
    "continue_final_message": _FALSE,
    "guided_decoding_backend": _is("guidance", "auto"),
    "guided_whitespace_pattern": _NEVER,
    "structural_tag": _NEVER,
    "documents": _EMPTY_LIST,
    "mm_processor_kwargs": _EMPTY_OBJECT,
    "use_beam_search": _FALSE,
    "logits_processors": _EMPTY_LIST,
    "truncate_prompt_tokens": _NEVER,
    "priority": _is(0),
    "return_token_ids": _FALSE,
    "kv_transfer_params": _NEVER,
    "spaces_between_special_tokens": _is(True),
    "prompt_embeds": _NEVER,
}
IN_MESSAGES: Mapping[str, Callable[[object], bool]] = {
    "tool_calls": _EMPTY_LIST,
    "function_call": _NEVER,
    "tool_call_id": _NEVER,
    "audio": _NEVER,
    "refusal": _NEVER,
}
IN_STRUCTURED_OUTPUTS: Mapping[str, Callable[[object], bool]] = {
    "structural_tag": _NEVER,
    "whitespace_pattern": _NEVER,
    "disable_any_whitespace": _FALSE,
    "disable_additional_properties": _FALSE,
    "disable_fallback": _is(False, True),  # there is one way to do it, and none to fall back on
    "backend": _is("guidance", "auto"),
}
IN_STREAM_OPTIONS: Mapping[str, Callable[[object], bool]] = {"continuous_usage_stats": _FALSE}


def refuse_unsupported(
    extra: Mapping[str, object] | None,
    known: Mapping[str, Callable[[object], bool]] = UNSUPPORTED,
    *,
    where: str = "",
) -> list[str]:
    """ApiError 400 for the first parameter that asks for what is not offered; else the names nobody knows.

    null is neutral everywhere.
    """
    unknown = []
    for name, value in (extra or {}).items():
        if name not in known:
            unknown.append(name)
        elif value is not None and not known[name](value):
            raise bad_request(f"{where}{name} is not offered by this server", f"{where}{name}")
    return unknown
