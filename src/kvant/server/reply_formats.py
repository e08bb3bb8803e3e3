"""How model families write reasoning and tool calls, as transformers' response templates.

Data for `transformers.utils.chat_parsing.ResponseParser`. A family is recognised by the markers in its
chat template, because checkpoints of one architecture differ in what they were trained to write.
`allow_non_json` keeps a malformed call as text. The first four are transformers' own
(`transformers.cli.serving`).
"""

# ruff: noqa: RUF001  DeepSeek's marks have characters of their own
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_JSON = {"content": "json", "content_args": {"allow_non_json": True}, "repeats": True}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_WHOLE = {"type": "function", "function": "{content}"}
_THINK = {"open": "<think>", "close": "</think>", "content": "text"}
_CHATML_END = {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"}


def _format(anchor: str | list[str], **fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


_CHATML = "<|im_start|>assistant\n"
_HERMES = _format(
    _CHATML,
    reasoning_content=_THINK,
    tool_calls={
        "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", **_JSON, "transform": _WHOLE,
    },
    content=_CHATML_END,
)  # fmt: skip
_QWEN_XML = _format(
    _CHATML,
    reasoning_content=_THINK,
    tool_calls={
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
        },
        "transform": _NAMED,
    },
    content=_CHATML_END,
)
_GEMMA = _format(
    ["<|turn>model\n", "<tool_response|>"],
    reasoning_content={"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
    tool_calls={
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "repeats": True,
        "content": "json",
        "content_args": {
            "unquoted_keys": True,
            "string_delims": [['<|"|>', '<|"|>']],
            "allow_non_json": True,
        },
        "transform": _NAMED,
    },
    content={"close": ["<turn|>", "<|tool_response>", "<eos>"], "content": "text"},
)
_GLM = _format(
    "<|assistant|>",
    reasoning_content=_THINK,
    tool_calls={
        "open_pattern": r"\s*<tool_call>\s*(?P<name>[^\s<]+)",
        "close": "</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*"
            r"<arg_value>\s*(?P<value>.*?)\s*</arg_value>"
        },
        "transform": _NAMED,
    },
    content={"close": ["<|user|>", "<|observation|>", "<|endoftext|>"], "content": "text"},
)
_HARMONY = _format(
    "<|start|>assistant",
    reasoning_content={
        "open": "<|channel|>analysis<|message|>", "close": ["<|end|>", "<|start|>"],
        "content": "text", "repeats": True, "join": "\n",
    },
    tool_calls={
        "open_pattern": r"(?:<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[\w.-]+)"
        r"|to=functions\.(?P<name>[\w.-]+)<\|channel\|>(?:commentary|analysis))[^<]*"
        r"(?:<\|constrain\|>\w+)?\s*<\|message\|>",
        "close": ["<|call|>", "<|end|>", "<|start|>"],
        **_JSON,
        "transform": _NAMED,
    },
    content={
        "open_pattern": r"<\|channel\|>(?:final|commentary)<\|message\|>",
        "close": ["<|end|>", "<|return|>", "<|start|>"], "content": "text", "repeats": True, "join": "\n",
    },
)  # fmt: skip
_MISTRAL = _format(
    "[/INST]",
    reasoning_content={"open": "[THINK]", "close": "[/THINK]", "content": "text"},
    tool_calls={
        "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])",
        **_JSON,
        "transform": _NAMED,
    },
    content={"close": "</s>", "content": "text"},
)
_MISTRAL_LIST = _format(
    "[/INST]",
    tool_calls={"open": "[TOOL_CALLS]", "close": "</s>", **_JSON, "transform": _WHOLE},
    content={"close": "</s>", "content": "text"},
)
_LLAMA = _format(
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    tool_calls={
        "open_pattern": r"<\|python_tag\|>|\A\s*(?=\{\s*\"name\")",
        "close_pattern": r"<\|eom_id\|>|<\|eot_id\|>",
        **_JSON,
        "transform": _WHOLE,
    },
    content={"close_pattern": r"<\|eom_id\|>|<\|eot_id\|>", "content": "text"},
)
_LLAMA4 = {**_LLAMA, "start_anchor": "<|header_start|>assistant<|header_end|>\n\n"}
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_END = {
    "close": ["<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>"], "content": "text",
}  # fmt: skip
_DEEPSEEK = _format(
    "<｜Assistant｜>",
    reasoning_content=_THINK,
    tool_calls={
        "open_pattern": rf"\s*(?:<｜tool▁calls▁begin｜>\s*)?{_BEGIN}(?P<name>[^<\n]+){_SEP}",
        "close": _END,
        **_JSON,
        "transform": _NAMED,
    },
    content=_DEEPSEEK_END,
)
_DEEPSEEK_FENCED = _format(
    "<｜Assistant｜>",
    reasoning_content=_THINK,
    tool_calls={
        "open_pattern": rf"\s*(?:<｜tool▁calls▁begin｜>\s*)?{_BEGIN}function{_SEP}"
        r"(?P<name>[^<\n]+)\n```json\n",
        "close_pattern": rf"\n```\s*{_END}",
        **_JSON,
        "transform": _NAMED,
    },
    content=_DEEPSEEK_END,
)

_BY_MARKERS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("<|tool_call>call:",), _GEMMA),
    (("<｜tool▁call▁begin｜>", "```json"), _DEEPSEEK_FENCED),
    (("<｜tool▁call▁begin｜>",), _DEEPSEEK),
    (("<|channel|>", "<|message|>"), _HARMONY),
    (("<tool_call>", "<arg_key>"), _GLM),
    (("<tool_call>", "<function="), _QWEN_XML),
    (("<tool_call>", "<|im_start|>"), _HERMES),
    (("[TOOL_CALLS]", "[ARGS]"), _MISTRAL),
    (("[TOOL_CALLS]",), _MISTRAL_LIST),
    (("<|start_header_id|>", "parameters"), _LLAMA),
    (("<|header_start|>", "parameters"), _LLAMA4),
    (("<think>", "<|im_start|>"), _HERMES),
    (("<think>", "<｜Assistant｜>"), _DEEPSEEK),
)
_REASONS = ("<think>", "<|channel|>", "<|channel>", "[THINK]")


def reply_format(template: str) -> dict[str, Any] | None:
    """Returns the response template of a chat template's family, or None for an unknown family."""
    for markers, found in _BY_MARKERS:
        if all(marker in template for marker in markers):
            return found
    return None


def writes_reasoning(template: str) -> bool:
    """True if models with this chat template write reasoning before their answers."""
    return any(marker in template for marker in _REASONS)
