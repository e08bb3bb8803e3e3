"""The grammar of strict tools takes what families write, and nothing that breaks a schema."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvant.server.api_error import ApiError
from kvant.server.call_grammar import call_grammar
from kvant.server.reply import ReplyReader, Tools, reply_format
from tests.server.test_reply import WEATHER, WRITTEN, Recorded

# ruff: noqa: RUF001  DeepSeek's marks have characters of their own

_MARKS = sorted(
    {
        mark
        for one in WRITTEN
        for mark in re.findall(r"<[|｜/]?\w[^<>={}\n]*>|\[/?[A-Z_]+\]", one.output)
        if not mark.startswith(("</parameter", "</function"))
    }
    | {"<think>", "</think>", "<｜tool▁calls▁begin｜>"}
)
EVERY = pytest.mark.parametrize(
    ("recorded", "has_marks"),
    [
        pytest.param(one, has_marks, id=f"{one.name}, {'tokens' if has_marks else 'spelled'}")
        for one in WRITTEN
        if one.calls and "<|tool_call>call:" not in one.output
        for has_marks in ((True,) if "<|channel|>" in one.output else (True, False))
    ],
)
CALLING = [one for one in WRITTEN if one.calls and "<|tool_call>call:" not in one.output]


def strict(parameters: dict[str, Any] | None = None, *, parallel: bool = True) -> Tools:
    function = copy.deepcopy(WEATHER["function"])
    assert isinstance(function, dict)
    function["strict"] = True
    function["parameters"] = parameters or {
        **function["parameters"], "required": ["city", "days"], "additionalProperties": False,
    }  # fmt: skip
    return Tools(({"type": "function", "function": function},), parallel=parallel)


@cache
def tokenizers(has_marks: bool) -> tuple[Tokenizer, LLTokenizer]:
    """Bytes; with marks as tokens of their own, or without."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    found = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["<eos>"])
    if has_marks:
        found.add_tokens([AddedToken(mark, normalized=False) for mark in _MARKS])
    size, end = found.get_vocab_size(), found.get_vocab()["<eos>"]
    return found, LLTokenizer(found.to_str(), n_vocab=size, eos_token=[end])


def taken(
    recorded: Recorded,
    text: str,
    tools: Tools,
    *,
    has_marks: bool = True,
    schema: str | None = None,
) -> str:
    """The part of an answer that its grammar takes; with "<eos>" if the answer may end there."""
    tokenizer, matching = tokenizers(has_marks)
    format = reply_format(recorded.template)
    assert format is not None
    grammar = call_grammar(format, tools, recorded.prefix, tokenizer.token_to_id, schema=schema)
    matcher = LLMatcher(matching, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = [*tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.get_vocab()["<eos>"]]
    for place, token in enumerate(ids):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if not np.unpackbits(bits, bitorder="little")[token]:
            ids = ids[:place]
            break
        matcher.consume_tokens([token])
    return tokenizer.decode(ids, skip_special_tokens=False)


@EVERY
def test_recorded_calls_fit_their_grammar(recorded: Recorded, has_marks: bool) -> None:
    found = taken(recorded, recorded.output, strict(), has_marks=has_marks)
    assert found.endswith("<eos>"), found


@EVERY
@pytest.mark.parametrize(
    "change", [("get_weather", "get_leather"), ("days", "hours"), ("2", "x")], ids=str
)
def test_a_call_that_breaks_its_schema_is_stopped(
    recorded: Recorded, change: tuple[str, str], has_marks: bool
) -> None:
    before, _, after = recorded.output.rpartition(change[0])
    wrong = before + change[1] + after
    found = taken(recorded, wrong, strict(), has_marks=has_marks)
    assert not found.endswith("<eos>")
    assert len(found) < len(before) + len(change[1])


@pytest.mark.parametrize("recorded", CALLING, ids=lambda recorded: recorded.name)
def test_a_call_may_not_end_early_but_text_may(recorded: Recorded) -> None:
    begin = recorded.output.rindex("Paris") + 3
    assert not taken(recorded, recorded.output[:begin], strict()).endswith("<eos>")
    plain = "Hello, 1 < 2."
    if "<|channel|>" in recorded.output:
        plain = f"<|channel|>final<|message|>{plain}"
    if recorded.prefix.endswith("<think>") or recorded.prefix.endswith("<think>\n"):
        plain = f"Hm.</think>{plain}"
    assert taken(recorded, plain, strict()).endswith("<eos>")


@pytest.mark.parametrize(
    "recorded", [one for one in CALLING if len(one.calls) > 1], ids=lambda recorded: recorded.name
)
def test_one_call_is_all_where_several_are_not_wanted(recorded: Recorded) -> None:
    found = taken(recorded, recorded.output, strict(parallel=False))
    assert "Oslo" not in found


FORM = json.dumps(
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
     "additionalProperties": False}
)  # fmt: skip


@pytest.mark.parametrize("recorded", CALLING, ids=lambda recorded: recorded.name)
def test_an_answer_without_a_call_keeps_its_own_form(recorded: Recorded) -> None:
    if recorded.name.startswith("llama"):
        with pytest.raises(ApiError, match="contradict a form"):
            taken(recorded, "", strict(), schema=FORM)
        return

    def answered(text: str) -> str:
        head = "<|channel|>final<|message|>" if "<|channel|>" in recorded.output else ""
        if recorded.prefix.rstrip().endswith("<think>"):
            head = "Hm.</think>"
        return taken(recorded, head + text, strict(), schema=FORM)

    assert answered('{"ok": true}').endswith("<eos>")
    assert not answered('{"ok": 1}').endswith("<eos>")
    assert not answered("Yes.").endswith("<eos>")
    # The call itself, without the text before it.
    output = recorded.output.replace(recorded.content, "") if recorded.content else recorded.output
    assert taken(recorded, output, strict(), schema=FORM).endswith("<eos>")


def _named(name: str) -> Recorded:
    return next(one for one in WRITTEN if one.name == name)


def test_reasoning_may_name_the_mark_of_a_call() -> None:
    thinks = _named("qwen3 thinks and calls")
    text = "<think>I could write <tool_call> x.</think>Yes."
    assert taken(thinks, text, strict(), has_marks=False).endswith("<eos>")
    opened = _named("qwen3 with the thinking opened by the template")
    assert taken(opened, text.removeprefix("<think>"), strict(), has_marks=False).endswith("<eos>")


NESTED = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "place": {"$ref": "#/$defs/Place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "exact": {"type": "boolean"},
        "days": {"type": ["integer", "null"]},
    },
    "required": ["unit", "place", "exact"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/Places"}},
            "required": ["name"],
            "additionalProperties": False,
        },
        "Places": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
    },
}
PLACE = {"name": "Paris", "next": [{"name": "Oslo"}]}


@pytest.mark.parametrize("name", ["qwen3.5", "glm-4.5"])
def test_arguments_between_marks_keep_their_types(name: str) -> None:
    recorded = _named(name)
    values = {
        "unit": "C",
        "place": json.dumps(PLACE),
        "note": "a <b> c",
        "exact": "true",
        "days": "3",
    }
    tools = strict(NESTED)

    def written(**changed: str) -> str:
        form = "<parameter={}>\n{}\n</parameter>\n"
        head, end = "<tool_call>\n<function=get_weather>\n", "</function>\n</tool_call>"
        if name != "qwen3.5":
            form = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
            head, end = "<tool_call>get_weather\n", "</tool_call>"
        given = {key: one for key, one in {**values, **changed}.items() if one}
        fields = "".join(form.format(key, one) for key, one in given.items())
        close = "" if name == "glm-4.5" else "Hm.</think>"
        return f"{close}{head}{fields}{end}"

    assert taken(recorded, written(), tools).endswith("<eos>")
    reader = ReplyReader(reply_format(recorded.template), tools, recorded.prefix)
    parts = [*reader.feed(written()), *reader.finish()]
    (call,) = [part for part in parts if part.kind == "call"]
    assert json.loads(call.text) == {
        "unit": "C", "place": PLACE, "note": "a <b> c", "exact": True, "days": 3,
    }  # fmt: skip
    assert taken(recorded, written(note="", days=""), tools).endswith("<eos>")
    for wrong in (
        {"unit": "K"}, {"place": '{"name": 1}'}, {"exact": "maybe"}, {"exact": ""}, {"days": "x"},
    ):  # fmt: skip
        assert not taken(recorded, written(**wrong), tools).endswith("<eos>"), wrong


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
        ({"type": "object", "properties": {"a": {}}}, "no type"),
        ({"type": "object", "properties": {"a": True}}, "no type"),
        ({"type": "object", "properties": []}, "cannot be read"),
        ({"type": "object", "anyOf": []}, "anyOf"),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, "no type"),
        (
            {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 20}}},
            "no type",
        ),
    ],
    ids=str,
)
def test_what_marks_cannot_hold_is_refused_with_a_way_out(
    parameters: dict[str, Any], says: str
) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        taken(_named("qwen3.5"), "", strict(parameters))
    assert refused.value.param == "tools"
    assert "tool_choice required" in refused.value.message


def test_a_mark_that_is_spelled_out_is_no_way_around() -> None:
    recorded = _named("gpt-oss calls")
    tokenizer, matching = tokenizers(True)
    format = reply_format(recorded.template)
    assert format is not None
    matcher = LLMatcher(
        matching,
        call_grammar(format, strict(), recorded.prefix, tokenizer.token_to_id),
        log_level=0,
    )
    marks = "<|channel|>final<|message|>"
    ids = tokenizer.encode(marks, add_special_tokens=False).ids
    assert len(ids) == 7
    matcher.consume_tokens(ids)
    spelled = tokenizers(False)[0].encode("a <|end| b <|end|>", add_special_tokens=False).ids
    assert matcher.try_consume_tokens(spelled) == len(spelled) - 1


def test_a_family_without_a_grammar_is_refused_with_a_way_out() -> None:
    with pytest.raises(ApiError, match="tool_choice required"):
        taken(_named("gemma 4"), "", strict())


def test_a_tool_that_is_not_strict_keeps_its_freedom_beside_one_that_is() -> None:
    free = {"type": "function", "function": {"name": "free", "parameters": NESTED}}
    tools = Tools((*strict().specs, free))
    text = '<tool_call>\n{"name": "free", "arguments": {"any": [1]}}\n</tool_call>'
    assert taken(_named("qwen3 thinks and calls"), text, tools).endswith("<eos>")
    text = "</think><tool_call>\n<function=free>\n<parameter=any>\n1\n</parameter>\n</function>\n</tool_call>"
    assert taken(_named("qwen3.5"), text, tools).endswith("<eos>")


TREE = {
    "type": "object",
    "properties": {
        "leaf": {"type": "integer"},
        "branches": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["leaf"],
    "additionalProperties": False,
}
NAMED_AS_A_REFERENCE = {
    "type": "object",
    "properties": {"$ref": {"const": "#/x"}, "to": {"$ref": "#/properties/$ref"}},
    "required": ["$ref"],
    "additionalProperties": False,
}
OTHER = {**NESTED, "$defs": {"Place": {"type": "integer"}, "Places": {"type": "boolean"}}}
CALLS = [
    (
        "near",
        {"unit": "C", "place": PLACE, "exact": True},
        {"unit": "C", "place": 5, "exact": True},
    ),
    ("far", {"unit": "C", "place": 5, "exact": True}, {"unit": "C", "place": PLACE, "exact": True}),
    ("tree", {"leaf": 1, "branches": [{"leaf": 2}]}, {"leaf": 1, "branches": [{"leaf": "x"}]}),
    ("odd", {"$ref": "#/x", "to": "#/x"}, {"$ref": "#/x", "to": "#/y"}),
]
SCHEMAS = {"near": NESTED, "far": OTHER, "tree": TREE, "odd": NAMED_AS_A_REFERENCE}


@pytest.mark.parametrize(("name", "good", "bad"), CALLS, ids=[name for name, *_ in CALLS])
def test_references_of_forced_calls_stay_within_their_own_function(
    name: str, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    """Two functions may have definitions of the same name."""
    specs = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in SCHEMAS.items()
    ]
    before = copy.deepcopy(specs)
    tokenizer, matching = tokenizers(True)
    for forced in ("", name):
        form = Tools(tuple(specs), forced=forced).form
        for arguments, fits in ((good, True), (bad, False)):
            call = arguments if forced else [{"name": name, "parameters": arguments}]
            matcher = LLMatcher(
                matching, grammar_from("json_schema", json.dumps(form)), log_level=0
            )
            assert not matcher.is_error(), matcher.get_error()
            ids = tokenizer.encode(json.dumps(call)).ids
            assert (matcher.validate_tokens(ids) == len(ids)) is fits, (forced, call)
    assert specs == before
