"""What families of models write is read the same way whole and cut anywhere.

`WRITTEN` has the forms that chat templates and model cards document, written for this test. `QUOTED` has
answers of real models: each names the public report that quotes it, and was shortened at most. `RAN` has
answers of SmolLM2-135M, which ran here.

No public quote was found of Mistral's calls with [ARGS] and of DeepSeek R1's calls: these forms are written
for this test. R1 writes calls as V3 does, and of V3 there is a quote. Gemma 3 has no marks for calls, so its
template takes no tools, and its calls stay text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvant.server.reply import Part, ReplyReader, Tools, reply_format, writes_reasoning

# ruff: noqa: RUF001  DeepSeek's marks have characters of their own

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
TOOLS = Tools((WEATHER,))
PARIS = ("get_weather", {"city": "Paris", "days": 2})
OSLO = ("get_weather", {"city": "Oslo", "days": 1})


@dataclass(frozen=True)
class Recorded:
    """template: the marks by which a chat template is recognised. prefix: the end of a rendered prompt.

    source: where a real model's answer is quoted, as repository#number on GitHub, or how it was made.
    """

    name: str
    template: str
    prefix: str
    output: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = field(default=())
    source: str = ""


_HERMES = "<|im_start|> <tool_call> <think> tools"
_CHATML = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
_JSON_PARIS = '{"city": "Paris", "days": 2}'
_JSON_OSLO = '{"city": "Oslo", "days": 1}'
_DEEPSEEK = "<｜tool▁call▁begin｜> <think> tools"
_HARMONY = "<|channel|> <|message|> tools"
WRITTEN = (
    Recorded("hermes text", _HERMES, _CHATML, "Hello there.\n", "Hello there."),
    Recorded(
        "qwen3 thinks and calls", _HERMES, _CHATML,
        "<think>\nI need the weather.\n</think>\n\nLet me look.\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {_JSON_PARIS}}}\n</tool_call>\n<tool_call>\n'
        f'{{"name": "get_weather", "arguments": {_JSON_OSLO}}}\n</tool_call>',
        "Let me look.", "I need the weather.", (PARIS, OSLO),
    ),
    Recorded(
        "qwen3 with the thinking opened by the template", _HERMES, _CHATML + "<think>\n",
        "Short.\n</think>\n\nYes.", "Yes.", "Short.",
    ),
    Recorded(
        "smollm3 without thinking", _HERMES, _CHATML + "<think>\n\n</think>\n",
        f'<tool_call>{{"name": "get_weather", "arguments": {_JSON_PARIS}}}</tool_call>',
        calls=(PARIS,),
    ),
    Recorded(
        "a call that is not JSON is shown", _HERMES, _CHATML,
        '<tool_call>\n{"name": "get_weather", "argum\n</tool_call>',
        '{"name": "get_weather", "argum',
    ),
    Recorded("thinking that was cut", _HERMES, _CHATML, "<think>\nOn and on", "", "On and on"),
    Recorded(
        "qwen3.5", "<|im_start|> <tool_call> <function= <think> tools", _CHATML + "<think>\n",
        "Weather.\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"
        "</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        "", "Weather.", (PARIS,),
    ),
    Recorded(
        "glm-4.5", "<tool_call> <arg_key> <think> tools", "<|user|>\nhi<|assistant|>\n",
        "<think>The user wants Paris.</think>Checking.\n<tool_call>get_weather\n"
        "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        "Checking.", "The user wants Paris.", (PARIS,),
    ),
    Recorded(
        "glm-4.7", "<tool_call> <arg_key> <think> tools", "<|user|>hi<|assistant|><think>",
        "The user wants Paris.</think>Checking.<tool_call>get_weather<arg_key>city</arg_key>"
        "<arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
        "Checking.", "The user wants Paris.", (PARIS,),
    ),
    Recorded(
        "gpt-oss calls", _HARMONY, "<|start|>user<|message|>hi<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>We should call the tool.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + _JSON_PARIS,
        "", "We should call the tool.", (PARIS,),
    ),
    Recorded(
        "gpt-oss answers", _HARMONY, "<|start|>assistant",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Four.", "Four.", "Easy.",
    ),
    Recorded(
        "deepseek v3", _DEEPSEEK + "```json", "<｜User｜>hi<｜Assistant｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{_JSON_PARIS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{_JSON_OSLO}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        calls=(PARIS, OSLO),
    ),
    Recorded(
        "deepseek v3.1", _DEEPSEEK, "<｜User｜>hi<｜Assistant｜></think>",
        "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f"{_JSON_PARIS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Let me look.", calls=(PARIS,),
    ),
    Recorded(
        "deepseek r1", "<think> <｜Assistant｜>", "<｜User｜>hi<｜Assistant｜><think>\n",
        "Hm.\n</think>\n\nYes.", "Yes.", "Hm.",
    ),
    Recorded(
        "mistral 7b v0.3", "[TOOL_CALLS] tools", "[INST] hi[/INST]",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {_JSON_PARIS}}}, '
        f'{{"name": "get_weather", "arguments": {_JSON_OSLO}}}]',
        calls=(PARIS, OSLO),
    ),
    Recorded(
        "mistral small 3.2", "[TOOL_CALLS] [ARGS] tools", "[INST]hi[/INST]",
        f"Sure.[TOOL_CALLS]get_weather[ARGS]{_JSON_PARIS}[TOOL_CALLS]get_weather[ARGS]{_JSON_OSLO}",
        "Sure.", calls=(PARIS, OSLO),
    ),
    Recorded(
        "magistral", "[TOOL_CALLS] [ARGS] [THINK] tools", "[INST]hi[/INST]",
        "[THINK]Hm.[/THINK]Yes.", "Yes.", "Hm.",
    ),
    Recorded(
        "llama 3.1", "<|start_header_id|> parameters tools",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        f'{{"name": "get_weather", "parameters": {_JSON_PARIS}}}', calls=(PARIS,),
    ),
    Recorded(
        "llama 3.1 with its mark", "<|start_header_id|> parameters tools",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {_JSON_PARIS}}}', calls=(PARIS,),
    ),
    Recorded(
        "llama 3.2 text with JSON in it", "<|start_header_id|> parameters tools",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        'Write {"name": "x"} there.', 'Write {"name": "x"} there.',
    ),
    Recorded(
        "llama 4", "<|header_start|> parameters tools",
        "<|header_start|>assistant<|header_end|>\n\n",
        f'{{"name": "get_weather", "parameters": {_JSON_PARIS}}}', calls=(PARIS,),
    ),
    Recorded(
        "gemma 4", "<|tool_call>call: <|channel> tools", "<|turn>model\n",
        "<|channel>thought\nThe weather.<channel|><|tool_call>call:get_weather"
        '{city:<|"|>Paris<|"|>,days:2}<tool_call|>', "", "The weather.", (PARIS,),
    ),
)  # fmt: skip


_QWEN_XML = "<|im_start|> <tool_call> <function= <think> tools"
_LLAMA3, _LLAMA3_TURN = (
    "<|start_header_id|> parameters tools", "<|start_header_id|>assistant<|end_header_id|>\n\n",
)  # fmt: skip
_LLAMA4, _LLAMA4_TURN = (
    "<|header_start|> parameters tools", "<|header_start|>assistant<|header_end|>\n\n",
)  # fmt: skip
_GLM, _GLM_TURN = "<tool_call> <arg_key> <think> tools", "<|assistant|>\n<think></think>"
_GEMMA = "<|tool_call>call: <|channel> tools"
QUOTED = (
    Recorded(
        "qwen3 4b without thoughts", _HERMES, _CHATML,
        '<think>\n\n</think>\n\n<tool_call>\n{"name": "search_products", "arguments": '
        '{"query": "Dell", "category": "electronics", "max_price": 50}}\n</tool_call>',
        calls=(
            ("search_products", {"query": "Dell", "category": "electronics", "max_price": 50}),
        ),
        source="lmstudio-ai/lmstudio-bug-tracker#821",
    ),
    Recorded(
        "gemma 3 27b, whose template takes no tools", "<start_of_turn>", "<start_of_turn>model\n",
        'The search term is "tech experts".\n```tool_code\n[filter_dataframe_by_search_term('
        "column_name='Division', search_terms=['tech experts'])]\n```",
        'The search term is "tech experts".\n```tool_code\n[filter_dataframe_by_search_term('
        "column_name='Division', search_terms=['tech experts'])]\n```",
        source="vllm-project/vllm#14734",
    ),
    Recorded(
        "qwen3-coder 30b leaves out the first mark", _QWEN_XML, _CHATML,
        "I'll use the Glob tool to list all markdown files in the current directory.\n\n"
        "<function=Glob>\n<parameter=pattern>\n*.md\n</parameter>\n</function>\n</tool_call>",
        "I'll use the Glob tool to list all markdown files in the current directory.",
        calls=(("Glob", {"pattern": "*.md"}),), source="ollama/ollama#16686",
    ),
    Recorded(
        "qwen3.5 calls within its reasoning", _QWEN_XML, _CHATML,
        "<think>\nThe user wants me to read /tmp/probe.txt.\n<tool_call>\n<function=read>\n"
        "<parameter=filePath>\n/tmp/probe.txt\n</parameter>\n</function>\n</tool_call>\n</think>",
        "", "The user wants me to read /tmp/probe.txt.",
        (("read", {"filePath": "/tmp/probe.txt"}),), "cubist38/mlx-openai-server#284",
    ),
    Recorded(
        "smollm3 3b", _HERMES, _CHATML,
        '<think>\nOkay, the user sent just "hi". I need to respond appropriately.\n</think>\n\n'
        "Hello! How can I assist you today?",
        "Hello! How can I assist you today?",
        'Okay, the user sent just "hi". I need to respond appropriately.',
        source="ggml-org/llama.cpp#14581",
    ),
    Recorded(
        "glm-4.6", _GLM, _GLM_TURN,
        "<tool_call>get_current_weather\n<arg_key>location</arg_key>\n"
        "<arg_value>杭州</arg_value>\n</tool_call>",
        calls=(("get_current_weather", {"location": "杭州"}),), source="alibaba/rtp-llm#525",
    ),
    Recorded(
        "glm-4.7 without arguments", _GLM, _GLM_TURN, "<tool_call>get_all_func</tool_call>",
        calls=(("get_all_func", {}),), source="alibaba/rtp-llm#525",
    ),
    Recorded(
        "glm-4.7 without arguments, in two lines", _GLM, _GLM_TURN,
        "<tool_call>list_filenames\n</tool_call>",
        calls=(("list_filenames", {}),), source="sgl-project/sglang#15333",
    ),
    Recorded(
        "gpt-oss 20b calls in the channel of its reasoning", _HARMONY, "<|start|>assistant",
        "<|channel|>analysis<|message|>We need to run ffgrep. Let us search.\n<|end|><|start|>"
        "assistant<|channel|>analysis to=functions.ffgrep code<|message|>\n"
        '{"path":"","pattern":"TextualDisplayView"}<|call|>',
        "", "We need to run ffgrep. Let us search.",
        (("ffgrep", {"path": "", "pattern": "TextualDisplayView"}),), "waybarrios/vllm-mlx#562",
    ),
    Recorded(
        "gpt-oss 20b without a blank before the form", _HARMONY, "",
        "<|start|>assistant<|channel|>commentary to=functions.get_ecs_instructions<|constrain|>json"
        '<|message|>{"data":{"envs":{}}}',
        calls=(("get_ecs_instructions", {"data": {"envs": {}}}),),
        source="lmstudio-ai/lmstudio-bug-tracker#942",
    ),
    Recorded(
        "gpt-oss 120b names the tool before the channel", _HARMONY, "",
        "<|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json"
        f"<|message|>{_JSON_PARIS}",
        calls=(PARIS,), source="ggml-org/llama.cpp#15181",
    ),
    Recorded(
        "deepseek v3 in a fence", _DEEPSEEK + "```json", "<｜User｜>hi<｜Assistant｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_current_weather\n```json\n"
        '{"location": "Tokyo"}\n```<｜tool▁call▁end｜>',
        calls=(("get_current_weather", {"location": "Tokyo"}),), source="sgl-project/sglang#4379",
    ),
    Recorded(
        "deepseek v3.1 calls within its reasoning", _DEEPSEEK, "<｜Assistant｜><think>",
        "Hmm, the user is asking about the weather in Shanghai.<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>get_current_weather<｜tool▁sep｜>{"location": "Shanghai"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "", "Hmm, the user is asking about the weather in Shanghai.",
        (("get_current_weather", {"location": "Shanghai"}),), "sgl-project/sglang#9446",
    ),
    Recorded(
        "ministral 8b", "[TOOL_CALLS] tools", "[INST] hi[/INST]",
        '[TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "2+3"}}]',
        calls=(("calculator", {"expression": "2+3"}),), source="ml-explore/mlx-lm#1374",
    ),
    Recorded(
        "llama 3.1 8b", _LLAMA3, _LLAMA3_TURN,
        '{"name": "web_search", "parameters": {"query": "你好"}}',
        calls=(("web_search", {"query": "你好"}),), source="raullenchai/Rapid-MLX#700",
    ),
    Recorded(
        "llama 3.2 11b forgets the last brace", _LLAMA3, _LLAMA3_TURN,
        '{"type": "function", "function": {"name": "get_current_traffic", '
        '"parameters": {"location": "Sydney"}}',
        '{"type": "function", "function": {"name": "get_current_traffic", '
        '"parameters": {"location": "Sydney"}}',
        source="vllm-project/vllm#11786",
    ),
    Recorded(
        "llama 4 scout says its type first", _LLAMA4, _LLAMA4_TURN,
        '{"type": "function", "name": "Bash", "parameters": {"command": "echo hello"}}',
        calls=(("Bash", {"command": "echo hello"}),), source="vllm-project/vllm#46863",
    ),
    Recorded(
        "llama 4 between marks", _LLAMA4, _LLAMA4_TURN,
        '<|python_start|>{"name": "brave_web_search", "parameters": {"query": "latest news"}}'
        "<|python_end|>",
        calls=(("brave_web_search", {"query": "latest news"}),), source="vllm-project/vllm#16214",
    ),
    Recorded(
        "gemma 4 with plain quotes", _GEMMA, "<|turn>model\n",
        '<|tool_call>call:bash{command:"ls"}<tool_call|>',
        calls=(("bash", {"command": "ls"}),), source="jundot/omlx#581",
    ),
)  # fmt: skip


def _read(recorded: Recorded, pieces: list[str], tools: Tools | None = TOOLS) -> dict[str, Any]:
    reader = ReplyReader(reply_format(recorded.template), tools, recorded.prefix)
    parts: list[Part] = []
    for piece in pieces:
        parts += reader.feed(piece)
    return _joined(parts + reader.finish())


def _joined(parts: list[Part]) -> dict[str, Any]:
    calls: dict[int, list[str]] = {}
    for part in parts:
        if part.kind == "call":
            found = calls.setdefault(part.number, ["", ""])
            found[0] += part.name or ""
            found[1] += part.text
    return {
        "content": "".join(p.text for p in parts if p.kind == "content"),
        "reasoning": "".join(p.text for p in parts if p.kind == "reasoning"),
        "calls": tuple((name, json.loads(text)) for name, text in calls.values()),
    }


_LISTS = "<|im_start|> <tool_call> tools"
SMOLLM2 = Recorded(
    "smollm2, which lists its calls", _LISTS, _CHATML,
    f'<tool_call>[{{"name": "get_weather", "arguments": {_JSON_PARIS}}}, '
    f'{{"name": "get_weather", "arguments": {_JSON_OSLO}}}]</tool_call>',
    calls=(PARIS, OSLO),
)  # fmt: skip
_PROMPT = "LLM('smollm2'), temperature 0, its model card's tool prompt"
_AFTER_AN_EXAMPLE = f"{_PROMPT} and one example of a call"
RAN = (
    Recorded(
        "smollm2 135m calls", _LISTS, _CHATML,
        '<tool_call>[\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n]</tool_call>',
        calls=(PARIS,), source=_AFTER_AN_EXAMPLE,
    ),
    Recorded(
        "smollm2 135m forgets a comma and a brace", _LISTS, _CHATML,
        '<tool_call>[\n{"name": "get_weather", "arguments": {"city": "Berlin", "time": '
        '"2022-01-01T00:00:00Z", "weather_data": {"temperature": 25.5}}\n{"name": "get_weather", '
        '"arguments": {"city": "Lima", "time": "2022-01-01T00:00:00Z", "weather_data": {"temperature": 25.',
        '[\n{"name": "get_weather", "arguments": {"city": "Berlin", "time": '
        '"2022-01-01T00:00:00Z", "weather_data": {"temperature": 25.5}}\n{"name": "get_weather", '
        '"arguments": {"city": "Lima", "time": "2022-01-01T00:00:00Z", "weather_data": {"temperature": 25.',
        source=_AFTER_AN_EXAMPLE,
    ),
    Recorded(
        "smollm2 135m answers without an example", _LISTS, _CHATML,
        "The time in Tokyo is 12:30 PM.", "The time in Tokyo is 12:30 PM.",
        source=_PROMPT,
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    "recorded", [*WRITTEN, SMOLLM2, *QUOTED, *RAN], ids=lambda recorded: recorded.name
)
def test_recorded_outputs_are_read_whole_and_cut_anywhere(recorded: Recorded) -> None:
    text = recorded.output
    whole = _read(recorded, [text])
    assert whole == {
        "content": recorded.content, "reasoning": recorded.reasoning, "calls": recorded.calls,
    }  # fmt: skip
    for cut in range(len(text) + 1):
        assert _read(recorded, [text[:cut], text[cut:]]) == whole, cut
    assert _read(recorded, list(text)) == whole


@pytest.mark.parametrize(
    "recorded", [r for r in QUOTED if "within its reasoning" in r.name], ids=lambda r: r.name
)
def test_a_call_that_a_grammar_enforces_is_read_in_its_exact_form_only(recorded: Recorded) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    found = _read(recorded, list(recorded.output), Tools((strict,)))
    assert found["calls"] == ()
    assert recorded.calls[0][0] in found["reasoning"]


@pytest.mark.parametrize("name", ["qwen3 thinks and calls", "qwen3.5", "glm-4.5", "deepseek v3.1"])
def test_without_tools_a_call_is_text_and_not_lost(name: str) -> None:
    recorded = next(one for one in WRITTEN if one.name == name)
    for pieces in ([recorded.output], list(recorded.output)):
        found = _read(recorded, pieces, None)
        assert found["reasoning"] == recorded.reasoning
        assert found["calls"] == ()
        assert "get_weather" in found["content"]
        assert "Paris" in found["content"]


STREAMED = (
    "qwen3 thinks and calls", "mistral small 3.2", "llama 3.1", "llama 4", "llama 3.1 with its mark",
)  # fmt: skip


@pytest.mark.parametrize("name", STREAMED)
def test_arguments_of_a_free_call_come_in_parts(name: str) -> None:
    recorded = next(one for one in WRITTEN if one.name == name)
    reader = ReplyReader(reply_format(recorded.template), TOOLS, recorded.prefix)
    seen = [part for char in recorded.output for part in reader.feed(char) if part.kind == "call"]
    assert len(seen) > 10 * len(recorded.calls)
    assert [part.name for part in seen if part.id] == [name for name, _ in recorded.calls]
    ends = [place for place, part in enumerate(seen) if part.id]
    assert ends == sorted(ends)


def test_a_call_that_max_tokens_cut_keeps_its_beginning() -> None:
    recorded = next(one for one in WRITTEN if one.name == "llama 3.1")
    cut = recorded.output[:-6]
    for pieces in ([cut], list(cut)):
        reader = ReplyReader(reply_format(recorded.template), TOOLS, recorded.prefix)
        parts = [part for piece in pieces for part in reader.feed(piece)] + reader.finish()
        assert {part.kind for part in parts} == {"call"}
        assert cut.endswith("".join(part.text for part in parts))


def test_braces_and_quotes_inside_of_texts_do_not_end_the_arguments() -> None:
    arguments = {"city": 'a } " \\ { ] [', "days": 1, "more": [{"x": "}"}]}
    text = json.dumps({"name": "get_weather", "arguments": arguments})
    recorded = Recorded("", _HERMES, _CHATML, f"<tool_call>\n{text}\n</tool_call>")
    for pieces in ([recorded.output], list(recorded.output)):
        assert _read(recorded, pieces)["calls"] == (("get_weather", arguments),)


def test_an_unknown_name_and_another_order_are_read_at_the_end() -> None:
    for body in (
        '{"name": "other", "arguments": {"a": 1}}', '{"arguments": {"a": 1}, "name": "get_weather"}',
    ):  # fmt: skip
        recorded = Recorded("", _HERMES, _CHATML, f"<tool_call>\n{body}\n</tool_call>")
        ((_, arguments),) = _read(recorded, list(recorded.output))["calls"]
        assert arguments == {"a": 1}


def test_one_call_is_kept_where_several_are_not_wanted() -> None:
    recorded = next(one for one in WRITTEN if len(one.calls) == 2)
    found = _read(recorded, list(recorded.output), Tools((WEATHER,), parallel=False))
    assert found["calls"] == (PARIS,)


def test_forced_calls_are_read_by_their_form() -> None:
    unknown = Recorded("unknown", "", "", "")
    named = Tools((WEATHER,), forced="get_weather")
    assert named.form == WEATHER["function"]["parameters"]  # type: ignore[index]
    assert _read(unknown, list(_JSON_PARIS), named)["calls"] == (PARIS,)
    required = Tools((WEATHER,), forced="")
    assert required.form["items"]["anyOf"][0]["properties"]["name"] == {"const": "get_weather"}
    text = f'[{{"name": "get_weather", "parameters": {_JSON_PARIS}}}]'
    assert _read(unknown, list(text), required)["calls"] == (PARIS,)
    head = '[{"name": "get_weather", "para'
    assert _read(unknown, [head], required)["content"] == head, "max_tokens cut it"


def test_arguments_in_a_list_of_required_calls_come_in_parts() -> None:
    required = Tools((WEATHER,), forced="")
    braces = {"city": 'a } " \\ { ] [', "days": 1}
    calls = [("get_weather", arguments) for arguments in (braces, OSLO[1], {})]
    text = json.dumps([{"name": name, "parameters": given} for name, given in calls], indent=1)
    assert _read(Recorded("", "", "", ""), [text], required)["calls"] == tuple(calls)
    for cut in range(len(text) + 1):
        found = _read(Recorded("", "", "", ""), [text[:cut], text[cut:]], required)
        assert found == {"content": "", "reasoning": "", "calls": tuple(calls)}, cut
    reader = ReplyReader(None, required, "")
    parts = [part for char in text for part in reader.feed(char)]
    assert len(parts) > 20
    assert [part.number for part in parts if part.id] == [0, 1, 2]
    assert reader.finish() == []

    reader = ReplyReader(None, required, "")
    cut = text[: text.index('"days"')]
    parts = reader.feed(cut) + reader.finish()
    assert [part.kind for part in parts] == ["call"]
    assert cut.endswith(parts[0].text), "max_tokens cut it"


def test_an_unknown_family_is_shown_as_it_is() -> None:
    assert reply_format("{{ messages }}") is None
    assert not writes_reasoning("{{ messages }}")
    reader = ReplyReader(None, None, "")
    assert [part.text for part in reader.feed("<think>x")] == ["<think>x"]
