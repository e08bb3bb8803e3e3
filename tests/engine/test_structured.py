"""Structured output: every answer has its form in any batch, and compiling delays no other request."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvant.engine.engine import Engine
from kvant.engine.result import Result
from kvant.errors import RequestError
from kvant.sampling.grammar import Grammar, GrammarCompiler
from kvant.sampling.logit_rules import make_rules
from kvant.sampling.sampling_params import SamplingParams
from kvant.sampling.structured_outputs import CompileLimits, FormLimits, StructuredOutputs
from kvant.scheduling.request import Request, Sequence
from tests.engine.fakes import EOS, VOCAB, logits, make_engine
from tests.engine.sampling import sample, sampler_of


def characters() -> Tokenizer:
    """The fake model's 97 tokens as printable ASCII."""
    ids = [i for i in range(VOCAB) if i != EOS]
    texts = ["\u0120", *(chr(c) for c in range(33, 127)), "\u010a"]
    tokenizer = Tokenizer(models.BPE(vocab={**dict(zip(texts, ids, strict=True))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


TOKENIZER = characters()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB, [EOS])


@pytest.fixture
def engine(compiler: GrammarCompiler) -> Engine:
    return make(compiler)


def make(compiler: GrammarCompiler, **more: Any) -> Engine:
    """An engine with the one compiler of this module: its process starts once."""
    engine, _ = make_engine(tokenizer=TOKENIZER, **more)
    engine._forms._compiler = compiler
    return engine


def run(engine: Engine) -> dict[int, Result]:
    found = {}
    deadline = time.monotonic() + 30
    while engine.has_work:
        assert time.monotonic() < deadline
        for progress in engine.step():
            if progress.result is not None:
                found[progress.number] = progress.result
    return found


def answer(engine: Engine, form: StructuredOutputs, **more: Any) -> Result:
    given = {"temperature": 1.0, "max_tokens": 180, "seed": 1, **more}
    number = engine.submit([5, 6, 7], SamplingParams(structured_outputs=form, **given))
    return run(engine)[number]


def fits(value: object, schema: dict[str, Any]) -> bool:
    """The schemas of `_schemas`, checked by hand."""
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return type(value) is bool
        case "null":
            return value is None
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(fits(item, schema["items"]) for item in value)
            )
        case _:
            return (
                isinstance(value, dict)
                and set(value) == set(schema["properties"])
                and all(fits(value[name], inner) for name, inner in schema["properties"].items())
            )


_SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.sampled_from(
        [
            {"type": "integer", "minimum": -3, "maximum": 40},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "maxLength": 3},
            {"enum": ["a", "b c", 7, None]},
        ]
    ),
    lambda inner: (
        st.builds(
            lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2}, inner
        )
        | st.dictionaries(st.sampled_from(["x", "y z", "q"]), inner, min_size=1, max_size=2).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties),
                "additionalProperties": False,
            }
        )
    ),
    max_leaves=4,
)


@settings(max_examples=30, deadline=None)
@given(schema=_SCHEMAS, seed=st.integers(0, 1000), greedy=st.booleans())
def test_every_finished_answer_parses_and_fits_its_schema(
    compiler: GrammarCompiler, schema: dict[str, Any], seed: int, greedy: bool
) -> None:
    engine = make(compiler)
    # Few blanks and short texts: what is left of the choice does not go on for long.
    found = answer(
        engine,
        StructuredOutputs(json=schema),
        seed=seed,
        temperature=0.0 if greedy else 1.0,
        logit_bias={0: -20.0},
        max_tokens=240,
    )
    assert found.finish_reason == "stop"
    assert fits(json.loads(found.text), schema)


@settings(max_examples=30, deadline=None)
@given(
    choices=st.lists(
        st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
        unique=True,
    ),
    seed=st.integers(0, 100),
)
def test_an_answer_is_one_of_its_choices(
    compiler: GrammarCompiler, choices: list[str], seed: int
) -> None:
    found = answer(make(compiler), StructuredOutputs(choice=choices), seed=seed)
    assert found.text in choices
    assert found.finish_reason == "stop"


def test_regexes_grammars_and_objects(engine: Engine) -> None:
    found = answer(engine, StructuredOutputs(regex="[ab]{2,4}-(x|yy)"))
    assert re.fullmatch("[ab]{2,4}-(x|yy)", found.text)
    found = answer(engine, StructuredOutputs(grammar='start: "(" start ")" | "z"'), max_tokens=400)
    assert found.text == "(" * (len(found.text) // 2) + "z" + ")" * (len(found.text) // 2)
    for seed in range(20):
        found = answer(engine, StructuredOutputs(json_object=True), seed=seed, max_tokens=60)
        assert found.text.startswith("{")
        if found.finish_reason == "stop":
            assert isinstance(json.loads(found.text), dict)


def test_an_answer_is_the_same_alone_in_a_crowd_and_under_pressure(
    compiler: GrammarCompiler,
) -> None:
    form = StructuredOutputs(regex="[a-z]{5}( [a-z]{3,6}){2,4}")
    alone = [answer(make(compiler), form, seed=seed).token_ids for seed in range(6)]
    crowd = make(compiler, num_pages=14, max_num_batched_tokens=9, max_model_len=50)
    numbers = [
        crowd.submit(
            [5, 6, 7],
            SamplingParams(structured_outputs=form, seed=seed, max_tokens=40),
        )
        for seed in range(6)
    ]
    for index in range(3):
        crowd.submit([8 + index] * 6, SamplingParams(max_tokens=30, ignore_eos=True))
    found = run(crowd)
    assert [found[number].token_ids for number in numbers] == alone
    assert max(result.num_preemptions for result in found.values()) >= 1
    assert len(set(alone)) == 6


def test_a_complete_answer_ends_without_a_token_more(engine: Engine) -> None:
    found = answer(engine, StructuredOutputs(choice=["abc"]), max_tokens=3)
    assert (found.text, found.finish_reason, len(found.token_ids)) == ("abc", "stop", 3)


def test_choices_of_one_request_share_the_form_and_differ(engine: Engine) -> None:
    form = StructuredOutputs(regex="[a-z]{8}")
    params = SamplingParams(n=3, seed=4, structured_outputs=form, max_tokens=20)
    numbers = engine.submit_choices([5, 6, 7], params)
    found = run(engine)
    texts = [found[number].text for number in numbers]
    assert len(set(texts)) == 3
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts)


def test_forms_keep_to_the_other_rules_and_are_refused_where_nothing_is_left(
    engine: Engine,
) -> None:
    a, b = TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("b")
    form = StructuredOutputs(regex="[a-c]{6}")
    found = answer(engine, form, allowed_token_ids=[a, b], bad_words=["b"])
    assert found.text == "aaaaaa"
    refused = answer(engine, form, allowed_token_ids=[EOS])
    assert refused.finish_reason == "refused"
    assert refused.error is not None
    assert refused.error.param == "structured_outputs"


def test_a_row_behind_drafts_is_read_where_its_form_stands_then(compiler: GrammarCompiler) -> None:
    form = StructuredOutputs(regex="ab(cd|ef)g")
    params = SamplingParams(temperature=0, structured_outputs=form)

    def sequence(output: list[int]) -> Sequence:
        found = Sequence(Request(0, (5,), params, 1, 99), [5, *output], [b""])
        grammar: Grammar = compiler.start(form).result(10)
        found.rules = make_rules(
            params, (5,), eos_token_ids=[EOS], tokenizer=TOKENIZER, grammar=grammar
        )
        for token in output:
            assert found.rules is not None
            found.rules.advance(token)
        return found

    ids = [TOKENIZER.token_to_id(c) for c in "abefg"]
    drafting = sequence([])
    logits_of_drafts = logits([1, 2]).expand(len(ids), -1)
    wanted = [(place, drafting, place) for place in range(len(ids))]
    rows = sampler_of(logits_of_drafts, wanted)
    for place, draft in enumerate(ids):
        expected = sample(logits_of_drafts[:1], [sequence(ids[:place])])[0]
        assert rows.sample(place) == expected
        drafting.token_ids.append(draft)
        assert drafting.rules is not None
        drafting.rules.advance(draft)
    assert drafting.rules is not None
    assert drafting.rules.is_complete


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(" * 30_000},
        {"regex": "(?=a)b"},
        {"regex": r"[^\s\S]"},
        {"grammar": "start: nothing"},
        {"grammar": "start: ("},
        {"json": {"type": "objekt"}},
        {"json": {"$ref": "#"}},
        {"json": {"$ref": "#/$defs/x"}},
        {"json": {"type": "string", "pattern": "("}},
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
    ],
    ids=lambda form: str(form)[:40],
)
def test_what_does_not_compile_is_refused_by_name_and_nothing_else_ends(
    engine: Engine, form: dict[str, Any]
) -> None:
    asked = StructuredOutputs(**form, asked_as="guided_thing")
    good = engine.submit([5], SamplingParams(max_tokens=3, ignore_eos=True))
    bad = engine.submit([5], SamplingParams(structured_outputs=asked))
    found = run(engine)
    assert len(found[good].token_ids) == 3
    assert found[bad].finish_reason == "refused"
    error = found[bad].error
    assert error is not None
    assert error.param == "guided_thing"
    assert len(str(error)) < 500
    stream = engine.stream(engine.submit([5], SamplingParams(structured_outputs=asked)))
    with pytest.raises(RequestError, match="guided_thing cannot be used"):
        list(stream)


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(a{1,1000}){1,1000}"},
        {"regex": "(a+)+"},
        {"regex": "(a|b)*a(a|b){200}"},
        {"regex": "(.*a){20}"},
        {"json": {"type": "string", "maxLength": 10**6}},
        {"json": {"type": "array", "minItems": 10**6, "items": {}}},
        {
            "json": {
                "type": "object",
                "properties": {"c": {"type": "array", "items": {"$ref": "#"}}},
            }
        },
        {"json": {"enum": [f"v{i}" for i in range(2000)]}},
        {"json": {"properties": {f"p{i}": {"type": "integer"} for i in range(600)}}},
        {"json": {"anyOf": [{"type": "string", "pattern": f"{'a' * i}b*"} for i in range(64)]}},
    ],
    ids=lambda form: str(form)[:40],
)
def test_bombs_within_the_limits_are_answered_or_refused_in_time(
    engine: Engine, form: dict[str, Any]
) -> None:
    started = time.monotonic()
    found = answer(engine, StructuredOutputs(**form), max_tokens=5)
    assert time.monotonic() - started < 6
    assert found.finish_reason in ("stop", "length", "refused")


def test_compiling_takes_no_longer_than_its_time_and_the_next_one_compiles() -> None:
    compiler = GrammarCompiler(TOKENIZER, VOCAB, [EOS], limits=CompileLimits())
    compiler.start(StructuredOutputs(regex="d")).result(30)
    compiler._workers[0]._process.send_signal(
        signal.SIGSTOP
    )  # however fast it is, it has no answer
    compiler._limits = CompileLimits(0.0)
    with pytest.raises(RequestError, match="took longer than 0 s"):
        compiler.start(StructuredOutputs(regex="a")).result(30)
    compiler._limits = CompileLimits()
    found = compiler.start(StructuredOutputs(regex="a")).result(30).allowed(VOCAB)
    assert found.nonzero().tolist() == [[TOKENIZER.token_to_id("a")]]
    compiler._workers[0]._answers.put("")  # as when it ends in the middle, out of memory
    with pytest.raises(RequestError, match="takes more than is allowed"):
        compiler.start(StructuredOutputs(regex="b")).result(30)
    assert not compiler.start(StructuredOutputs(regex="b")).result(30).is_complete
    compiler._workers[0]._process.kill()
    compiler._workers[0]._process.wait()
    assert not compiler.start(StructuredOutputs(regex="c")).result(30).is_complete


def test_a_tokenizer_that_llguidance_cannot_read_refuses_forms_and_nothing_else() -> None:
    tokenizer = characters()
    tokenizer.decoder = decoders.Fuse()
    compiler = GrammarCompiler(tokenizer, VOCAB, [EOS])
    assert "cannot read this model's tokenizer" in compiler.prepare()
    with pytest.raises(RequestError, match="cannot be used: llguidance cannot read"):
        compiler.start(StructuredOutputs(regex="b")).result(30)


def test_a_process_that_does_not_start_is_not_taken_for_a_form_that_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = GrammarCompiler(TOKENIZER, VOCAB, [EOS], limits=CompileLimits())
    form = StructuredOutputs(regex="a+")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(RequestError, match="could not be started"):
            compiler.start(form).result()
    compiler.start(form).result()  # the next one is another process's


def test_steps_go_on_while_a_form_is_compiled_and_cancelling_does_not_wait(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    make_matcher = GrammarCompiler._make

    def slow(self: GrammarCompiler, form: StructuredOutputs) -> object:
        assert go_on.wait(20)
        return make_matcher(self, form)

    monkeypatch.setattr(GrammarCompiler, "_make", slow)
    engine = make(compiler)
    params = [
        SamplingParams(structured_outputs=StructuredOutputs(regex=text), max_tokens=9)
        for text in ("qq", "rr")
    ]
    waiting, cancelled = (engine.submit([5], one) for one in params)
    other = engine.submit([5], SamplingParams(max_tokens=12, ignore_eos=True))
    ended = [p.number for _ in range(12) for p in engine.step() if p.result is not None]
    assert ended == [other]
    assert engine.stats.num_waiting == 2
    result = engine.cancel(cancelled)
    assert result is not None
    assert result.finish_reason == "cancelled"
    engine.audit()
    go_on.set()
    assert run(engine)[waiting].text == "qq"


def test_compiled_forms_are_kept_within_a_bound() -> None:
    compiler = GrammarCompiler(TOKENIZER, VOCAB, [EOS], limits=CompileLimits(cached_bytes=10))
    for index in range(5):
        compiler.start(StructuredOutputs(regex=f"cached{index}")).result(10)
    kept = [form.regex for form in compiler._compiled]
    assert kept == ["cached4"]
    compiler = GrammarCompiler(TOKENIZER, VOCAB, [EOS], limits=CompileLimits(cached_forms=2))
    for index in range(5):
        compiler.start(StructuredOutputs(regex=f"cached{index}")).result(10)
    assert [form.regex for form in compiler._compiled] == ["cached3", "cached4"]


def test_a_form_larger_than_the_cache_compiles_all_the_same() -> None:
    compiler = GrammarCompiler(TOKENIZER, VOCAB, [EOS], limits=CompileLimits(cached_bytes=0))
    for _ in range(2):
        assert not compiler.start(StructuredOutputs(regex="ab")).result(10).is_complete
    assert not compiler._compiled
    assert compiler._cached_bytes == 0


def test_tokens_of_the_tokenizer_beyond_the_logits_are_no_obstacle() -> None:
    """Gemma 3's tokenizer has an image token more than its text models have logits."""
    tokenizer = characters()
    tokenizer.add_special_tokens(["<image>", "<more>"])
    assert tokenizer.get_vocab_size() > VOCAB
    engine, _ = make_engine(tokenizer=tokenizer)
    engine.prepare_structured()
    form = StructuredOutputs(regex="[a-c]{4}")
    assert re.fullmatch(form.regex or "", answer(engine, form, bad_words=["<image>"]).text)


def test_ends_that_cannot_be_drawn_end_nothing() -> None:
    engine, _ = make_engine(eos_token_ids=[EOS, -1, VOCAB, 10 * VOCAB])
    assert engine.eos_token_ids == {EOS}
    number = engine.submit([5], SamplingParams(min_tokens=2, max_tokens=3, temperature=1, seed=2))
    assert run(engine)[number].num_prompt_tokens == 1


def test_a_model_without_end_or_tokenizer_cannot_be_asked_for_a_form() -> None:
    engine, _ = make_engine()
    with pytest.raises(RequestError, match="needs a tokenizer") as fault:
        engine.submit([5], SamplingParams(structured_outputs=StructuredOutputs(regex="a")))
    assert fault.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"regex": "a", "json_object": True},
        {"regex": ""},
        {"regex": "a" * (64 * 1024 + 1)},
        {"regex": "\ud800"},
        {"json": "{"},
        {"json": "[]"},
        {"json": 7},
        {"json": {"x": float("nan")}},
        {"json": {"$ref": "http://127.0.0.1/x"}},
        {"json": {"enum": list(range(2001))}},
        {"json": {"oneOf": [{}] * 65}},
        {"json": {"properties": {f"p{i}": {} for i in range(2000)}}},
        {"choice": []},
        {"choice": [""]},
        {"choice": "abc"},
        {"choice": ["a"] * 2001},
        {"json_object": 1},
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_forms_that_are_too_large_or_none_at_all_are_refused_where_they_are_made(
    wrong: dict[str, Any],
) -> None:
    with pytest.raises(RequestError) as fault:
        StructuredOutputs(**wrong, asked_as="response_format")
    assert fault.value.param == "response_format"


def test_forms_at_their_limits_are_taken() -> None:
    nested: dict[str, Any] = {}
    for _ in range(32):
        nested = {"not": nested}
    StructuredOutputs(json=nested)
    with pytest.raises(RequestError, match="32 levels"):
        StructuredOutputs(json={"not": nested})
    StructuredOutputs(json={"enum": list(range(2000))})
    StructuredOutputs(json={"oneOf": [{}] * 64})
    StructuredOutputs(json={f"p{i}": {} for i in range(1999)})
    with pytest.raises(RequestError, match="2001 nodes"):
        StructuredOutputs(json={f"p{i}": {} for i in range(2000)})
    StructuredOutputs(regex="a" * 64 * 1024)
    assert StructuredOutputs(json='{"a": 1}') == StructuredOutputs(json={"a": 1}, asked_as="x")


@pytest.mark.parametrize(
    ("limits", "at", "beyond"),
    [
        (FormLimits(text_bytes=5), {"regex": "a" * 5}, {"regex": "a" * 6}),
        (FormLimits(text_bytes=9), {"json": {"a": 12}}, {"json": {"a": 123}}),
        (FormLimits(depth=1), {"json": {"a": 1}}, {"json": {"a": {"b": 1}}}),
        (FormLimits(nodes=3), {"json": {"a": 1, "b": 2}}, {"json": {"a": 1, "b": 2, "c": 3}}),
        (FormLimits(enum=2), {"json": {"enum": [1, 2]}}, {"json": {"enum": [1, 2, 3]}}),
        (FormLimits(enum=2), {"choice": ["a", "b"]}, {"choice": ["a", "b", "c"]}),
        (FormLimits(branches=2), {"json": {"anyOf": [{}, {}]}}, {"json": {"anyOf": [{}] * 3}}),
    ],
)
def test_narrower_limits_hold_at_their_value_and_not_one_beyond(
    limits: FormLimits, at: dict[str, Any], beyond: dict[str, Any]
) -> None:
    StructuredOutputs(**at).require_within(limits)
    form = StructuredOutputs(**beyond, asked_as="guided_thing")
    form.require_within(FormLimits())
    with pytest.raises(RequestError, match="guided_thing"):
        form.require_within(limits)


@pytest.mark.parametrize("more", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_what_contradicts_a_form_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="contradicts"):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **more)
