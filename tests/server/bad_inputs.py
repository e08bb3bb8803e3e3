"""Bad requests by family: what is sent, and which field the refusal must name.

`status` is 400 unless said. `param` ANY: the refusal may name anything (the body as a whole is wrong).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
ALL = (CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE)
ANY = "*"


@dataclass(frozen=True)
class Bad:
    family: str
    name: str
    path: str
    body: bytes
    param: str | None = ANY
    status: int = 400
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)


def corpus(vocab: int, max_len: int) -> list[Bad]:
    return [
        *_syntax(),
        *_non_objects(),
        *_numbers(),
        *_strings(),
        *_prompts(vocab, max_len),
        *_ranges(),
        *_contradictions(max_len),
        *_ids(vocab),
        *_stops(),
        *_tools(),
        *_schemas(),
        *_salts_and_models(),
        *_protocol(),
    ]


def _good(path: str) -> dict[str, Any]:
    good: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
        TOKENIZE: {"prompt": "hi"},
        DETOKENIZE: {"tokens": [5]},
    }
    return good[path]


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _with(family: str, path: str, name: str, value: object, param: str | None = None) -> Bad:
    body = _json({**_good(path), name: value})
    return Bad(family, f"{name}={str(value)[:40]}", path, body, name if param is None else param)


def _raw(family: str, path: str, name: str, literal: str) -> Bad:
    """A value that json.dumps would not write."""
    text = json.dumps({**_good(path), name: "@"}).replace('"@"', literal)
    return Bad(family, f"{name}={literal[:40]}", path, text.encode(), name)


def _syntax() -> Iterator[Bad]:
    for path in ALL:
        good = _json(_good(path))
        for name, body in {
            "empty": b"",
            "truncated": good[:-3],
            "trailing": good + b"}",
            "BOM": b"\xef\xbb\xbf" + good,
            "UTF-16": good.decode().encode("utf-16"),
            "invalid UTF-8": good.replace(b"hi", b"\xff\xfe")[:-1] + b'\xff"}',
            "nested": b"[" * 200_000,
            "nested objects": b'{"a":' * 100_000,
        }.items():
            yield Bad("syntax", name, path, body)


def _non_objects() -> Iterator[Bad]:
    for path in ALL:
        for body in (b"null", b"[]", b'"text"', b"7", b"true"):
            yield Bad("non-object", body.decode(), path, body)


def _numbers() -> Iterator[Bad]:
    for path in (CHAT, COMPLETIONS):
        for literal in ("NaN", "Infinity", "-Infinity", '"0.5"', "true", "[]"):
            bad = _raw("numbers", path, "temperature", literal)
            wrong = literal in ("NaN", "Infinity", "-Infinity")
            yield Bad(bad.family, bad.name, path, bad.body, ANY if wrong else "temperature")
        yield _raw("numbers", path, "temperature", "1e400")
        for literal in ("1.5", "true", '"12"', "1e3", "-1", "9" * 4000):
            yield _raw("numbers", path, "max_tokens", literal)
        for literal in ("9223372036854775808", "-9223372036854775809", "1" + "0" * 4000, "0.0"):
            yield _raw("numbers", path, "seed", literal)
        bad = _raw("numbers", path, "seed", "9" * 5001)
        yield Bad(bad.family, bad.name, path, bad.body, ANY)


def _strings() -> Iterator[Bad]:
    for literal in (r'"\ud800"', r'"a\udc00b"'):
        for path in (COMPLETIONS, TOKENIZE):
            bad = _raw("strings", path, "prompt", literal)
            yield Bad(bad.family, bad.name, path, bad.body, ANY)
        raw = '{"messages":[{"role":"user","content":%s}]}' % literal  # noqa: UP031
        yield Bad("strings", f"content {literal}", CHAT, raw.encode(), ANY)
    for role in ("robot", "", "User", "tool", 7, None):
        body: Any = {"messages": [{"role": role, "content": "hi"}]}
        yield Bad("strings", f"role {role}", CHAT, _json(body), "messages[0].role")
    for content in (None, 7, {"text": "hi"}):
        body = {"messages": [{"role": "user", "content": content}]}
        yield Bad("strings", f"content {content}", CHAT, _json(body), "messages[0].content")
    for kind in ("image_url", "input_audio", "file", "video_url"):
        part = {"type": kind, kind: {"url": "http://127.0.0.1:1/x"}}
        body = {"messages": [{"role": "user", "content": [part]}]}
        yield Bad("strings", kind, CHAT, _json(body), "messages[0].content[0].type")


def _prompts(vocab: int, max_len: int) -> Iterator[Bad]:
    value: Any
    for value in (
        [], [[]], "", [""], ["a", 1], [1, "a"], [[1], "a"], [1.5], [True], None, {}, 7, [None],
        [vocab], [-1], [2**63], [[1], [vocab]], [10**30], [3] * max_len, [3] * 100_000,
        ["a"] * 257, [["a"]], [[[1]]],
    ):  # fmt: skip
        body = _json({"prompt": value, "max_tokens": 1})
        shown = str(value)[:40]
        starts = "prompt"
        yield Bad("prompts", shown, COMPLETIONS, body, starts)
    yield Bad("prompts", "missing", COMPLETIONS, b"{}", "prompt")
    yield Bad("prompts", "missing", CHAT, b"{}", "messages")
    for value in ([], None, "hi", {}, [1], [[]]):
        yield Bad("prompts", f"messages {value}", CHAT, _json({"messages": value}), "messages")
    for tokens in ([vocab], [-1], ["a"], [1.0], [True], None, "5", [2**70]):
        yield Bad("prompts", f"tokens {tokens}", DETOKENIZE, _json({"tokens": tokens}), "tokens")


def _ranges() -> Iterator[Bad]:
    outside: dict[str, tuple[object, ...]] = {
        "temperature": (-0.001, 2.001),
        "top_p": (0, -0.1, 1.001),
        "top_k": (-2, 2**63),
        "min_p": (-0.001, 1.001),
        "n": (0, -1, 129, 10**9),
        "max_tokens": (0, -1),
        "max_completion_tokens": (0, -1),
        "min_tokens": (-1,),
        "presence_penalty": (2.001, -2.001, False, "0"),
        "frequency_penalty": (2.001, -2.001, [1]),
        "repetition_penalty": (0, 0.0099, 100.1, -1, "1"),
        "prompt_logprobs": (-1, 21, True, 1.5, 2**63),
        "best_of": (0, 2),
    }
    for path in (CHAT, COMPLETIONS):
        for name, values in outside.items():
            for value in values:
                if (path, name, value) != (COMPLETIONS, "max_tokens", 0):  # good with echo
                    yield _with("ranges", path, name, value)
    for value in (-1, 21, 1.5, True):
        yield _with("ranges", COMPLETIONS, "logprobs", value)
    for value in (-1, 21, True):
        body = {**_good(CHAT), "logprobs": True, "top_logprobs": value}
        yield Bad("ranges", f"top_logprobs={value}", CHAT, _json(body), "top_logprobs")


def _contradictions(max_len: int) -> Iterator[Bad]:
    for path in (CHAT, COMPLETIONS):
        yield _with("contradictions", path, "stream_options", {"include_usage": True})
        yield _with("contradictions", path, "min_tokens", 3)
        yield _with("contradictions", path, "min_tokens", max_len)
        yield _with("contradictions", path, "max_completion_tokens", 3)
        yield _with("contradictions", path, "tool_choice", "required")
        yield _with("contradictions", path, "continue_final_message", True)
        yield _with("contradictions", path, "n_predict", 3)
        param = "prompt" if path == COMPLETIONS else "messages"
        yield _with("contradictions", path, "max_tokens", max_len, param)
    yield _with("contradictions", CHAT, "top_logprobs", 2)
    yield _with("contradictions", CHAT, "logprobs", 2)
    yield _with("contradictions", CHAT, "echo", True)
    yield _with("contradictions", COMPLETIONS, "echo", 1)
    yield _with("contradictions", COMPLETIONS, "max_tokens", 0)
    several = {**_good(COMPLETIONS), "max_tokens": 0, "echo": True, "n": 2}
    yield Bad("contradictions", "no tokens, twice", COMPLETIONS, _json(several), "n")
    for path in (CHAT, COMPLETIONS):
        streamed = {**_good(path), "stream": True, "prompt_logprobs": 1}
        yield Bad(
            "contradictions", "stream+prompt_logprobs", path, _json(streamed), "prompt_logprobs"
        )
        for name, value in {"min_tokens": 1, "ignore_eos": True}.items():
            body = {**_good(path), "guided_regex": "a+", name: value}
            yield Bad("contradictions", f"form+{name}", path, _json(body), name)
        body = {**_good(path), "guided_regex": "a", "response_format": {"type": "json_object"}}
        yield Bad("contradictions", "two forms", path, _json(body), "guided_regex")
    long = {"prompt": [[3] * (max_len - 1)] * 30, "max_tokens": 0, "echo": True, "logprobs": 20}
    yield Bad("contradictions", "too many numbers", COMPLETIONS, _json(long), "logprobs")
    both = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
    yield Bad("contradictions", "prompt+messages", TOKENIZE, _json(both), "prompt")


def _ids(vocab: int) -> Iterator[Bad]:
    value: Any
    for path in (CHAT, COMPLETIONS):
        for value in (
            {str(i): 1 for i in range(10_000)}, {str(vocab): 1}, {"-1": 1}, {"a": 1}, {"": 1},
            {"1.5": 1}, {" 5": 1}, {"\u0665": 1}, {"9" * 400: 1}, {"5": 100.1}, {"5": -100.1},
            {"5": "1"}, {"5": None}, {"5": True}, [5], [[5, 1]], "5", 5,
        ):  # fmt: skip
            yield _with("ids", path, "logit_bias", value)
        for literal in ("NaN", "Infinity", "1e400"):
            bad = _raw("ids", path, "logit_bias", '{"5":' + literal + "}")
            yield Bad(bad.family, bad.name, path, bad.body, ANY)
        for value in ([], [vocab], [-1], ["5"], [True], 5, [2**63], [1.5], [5] * (vocab + 1), {}):
            yield _with("ids", path, "allowed_token_ids", value)
        for value in (["x"] * 257, [""], ["x" * 257], "x", [1], [None], {}):
            yield _with("ids", path, "bad_words", value)
        bad = _raw("ids", path, "bad_words", r'["\udfff"]')
        yield Bad(bad.family, bad.name, path, bad.body, ANY)
        for value in ([vocab], [-1], ["5"], [True], 5, [2**63], [1.5]):
            yield _with("ids", path, "stop_token_ids", value)


def _stops() -> Iterator[Bad]:
    value: Any
    for path in (CHAT, COMPLETIONS):
        for value in (["x"] * 17, "", [""], ["a", ""], "x" * 257, ["x" * 1_000_000], [1], {}, 5):
            yield _with("stops", path, "stop", value)
        bad = _raw("stops", path, "stop", r'"\udfff"')
        yield Bad(bad.family, bad.name, path, bad.body, ANY)


def _tools() -> Iterator[Bad]:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for path in (CHAT, COMPLETIONS):
        yield _with("tools", path, "tools", [tool])
        yield _with("tools", path, "functions", [tool["function"]])
    yield _with("tools", CHAT, "tools", [tool] * 1000)
    yield _with("tools", CHAT, "tools", [{"type": "function", "function": {"name": "a b"}}])
    called = [{"role": "assistant", "content": "", "tool_calls": [tool]}]
    body = _json({"messages": called})
    yield Bad("tools", "tool_calls", CHAT, body, "messages[0].tool_calls")


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _schemas() -> Iterator[Bad]:
    """What no schema, regex or grammar may be: too large, leading outside, or nothing at all."""
    many = {f"p{i}": {"type": "integer"} for i in range(5000)}
    schemas: dict[str, Any] = {
        "depth": _nested(40),
        "properties": {"type": "object", "properties": many},
        "enum": {"enum": [f"v{i}" for i in range(2001)]},
        "branches": {"anyOf": [{"type": "integer"}] * 65},
        "bytes": {"description": "x" * 70_000},
        "file": {"$ref": "file:///etc/passwd"},
        "http": {"type": "array", "items": {"$ref": "http://127.0.0.1:1/x"}},
        "cycle": {"$ref": "#"},
        "missing ref": {"$ref": "#/$defs/x"},
        "type": {"type": "objekt"},
        "pattern": {"type": "string", "pattern": "("},
        "pattern parens": {"type": "string", "pattern": "(" * 10_000},
        "empty range": {"type": "integer", "minimum": 5, "maximum": 3},
        "list type": {"type": 7},
    }
    for name, schema in schemas.items():
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        yield _form(name, CHAT, "response_format", form)
        yield _form(name, COMPLETIONS, "guided_json", schema)
    for value in (None, [], "x", 7, True):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
        yield _form(f"schema {value}", CHAT, "response_format", form)
    for form in ({"type": "xml"}, {}, {"type": "json_schema"}, "json", [], {"type": None}):
        yield _form(str(form), CHAT, "response_format", form)
    both = {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}
    yield _form("object and schema", CHAT, "response_format", both)
    for name, value in {
        "parens": "(" * 30_000, "open": "(", "lookahead": "(?=a)b", "empty": "", "long": "a" * 70_000,
        "nothing": r"[^\s\S]", "backreference": r"(a)\1", "number": 7,
    }.items():  # fmt: skip
        yield _form(f"regex {name}", CHAT, "guided_regex", value)
    for name, value in {
        "unknown": "start: foo", "empty": "", "no start": 'x: "a"', "syntax": "start: (", "number": 1,
    }.items():  # fmt: skip
        yield _form(f"grammar {name}", COMPLETIONS, "guided_grammar", value)
    for choice in ([], [""], [1], ["x"] * 2001, "x", ["x" * 70_000]):
        yield _form(f"choice {str(choice)[:20]}", COMPLETIONS, "guided_choice", choice)
    for form in (
        {}, {"regex": "a", "json_object": True}, {"structural_tag": "x"}, {"rgex": "a"}, "a", [],
        {"json": []}, {"json": "{"}, {"json": "[1]"}, {"whitespace_pattern": " ", "regex": "a"},
        {"regex": "(" * 30_000}, {"json_object": 1},
    ):  # fmt: skip
        yield _form(str(form)[:40], COMPLETIONS, "structured_outputs", form)


def _form(name: str, path: str, field: str, value: object) -> Bad:
    bad = _with("schemas", path, field, value)
    return Bad("schemas", f"{field}: {name}", path, bad.body, field)


def _salts_and_models() -> Iterator[Bad]:
    for path in (CHAT, COMPLETIONS):
        for value in ("", "a b", "a\n", "é", "x" * 257, 7, ["a"]):
            yield _with("salts", path, "cache_salt", value)
        for value in ([], "x", {"a": 1}, {"a": None}, {"a": {}}, {"k" * 65: "v"}, {"k": "v" * 513}):
            yield _with("salts", path, "metadata", value)
        yield _with("salts", path, "metadata", {str(i): "v" for i in range(17)})
        yield _with("salts", path, "chat_template", "{{ 1 }}")
        yield _with("salts", path, "chat_template_kwargs", {"tokenize": True})
        yield _with("salts", path, "kv_transfer_params", {"tp_size": 10**9})
    for path in ALL:
        for name in ("gpt-4", "", "x" * 10_000, "../../etc", "a\nb"):
            body = _json({**_good(path), "model": name})
            yield Bad("models", f"model {name[:20]!r}", path, body, "model", status=404)
        yield _with("models", path, "model", 7)


def _protocol() -> Iterator[Bad]:
    for path in ALL:
        good = _json(_good(path))
        yield Bad("protocol", "text/plain", path, good, headers={"Content-Type": "text/plain"})
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        yield Bad("protocol", "form", path, b"prompt=hi", headers=form)
        zipped = {"Content-Encoding": "gzip"}
        yield Bad("protocol", "gzip", path, gzip.compress(good), headers=zipped)
        for method in ("GET", "PUT", "DELETE", "PATCH"):
            yield Bad("protocol", method, path, good, status=405, method=method)
