"""No parameter is ignored silently: the tables are complete, and what they say is what happens."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import openai.types.chat as of_chat
import openai.types.responses as of_responses
import openai.types.shared_params as shared
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params, response_input_param
from scripts.parameters_doc import ENDPOINTS, objects, rows

from kvant.server import unserved
from kvant.server.api_error import ApiError
from kvant.server.parameters import INSIDE, NOT_OFFERED, Inside, Table
from kvant.server.unserved import refuse_unserved
from tests.server.harness import Server

ROOT = Path(__file__).resolve().parents[2]
_VLLM_BOTH = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
    stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty
    length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids
    prompt_logprobs echo add_special_tokens response_format structured_outputs priority request_id
    session_id return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs
    repetition_detection stream_interval logprob_token_ids bad_words watermarking ec_transfer_params
    return_token_offsets routed_experts_prompt_start
"""
VLLM = {
    "/v1/chat/completions": _VLLM_BOTH
    + """messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort
    thinking_token_budget include_reasoning parallel_tool_calls add_generation_prompt
    continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
    mm_processor_kwargs return_prompt_text return_mm_kwargs""",
    "/v1/completions": _VLLM_BOTH + "prompt suffix prompt_embeds best_of",
    "/v1/responses": """background include input instructions max_output_tokens max_tool_calls metadata
    model logit_bias parallel_tool_calls previous_response_id prompt reasoning service_tier store stream
    temperature text tool_choice tools top_logprobs top_p top_k truncation user skip_special_tokens
    include_stop_str_in_output prompt_cache_key request_id mm_processor_kwargs priority cache_salt
    enable_response_messages previous_input_messages previous_response structured_outputs
    repetition_penalty seed stop ignore_eos vllm_xargs""",
    "/v1/messages": """model messages max_tokens metadata stop_sequences stream system temperature
    tool_choice tools top_k top_p""",
    "/tokenize": """model prompt add_special_tokens return_token_strs messages add_generation_prompt
    continue_final_message chat_template chat_template_kwargs mm_processor_kwargs media_io_kwargs
    tools""",
    "/detokenize": "model tokens",
    "/infill": """input_prefix input_suffix input_extra prompt id_slot n_predict n_indent top_k top_p
    samplers stream cache_prompt t_max_prompt_ms t_max_predict_ms response_fields stop seed temperature
    min_p typical_p repeat_penalty repeat_last_n presence_penalty frequency_penalty dry_multiplier
    mirostat grammar json_schema logit_bias n_probs n_keep min_keep ignore_eos return_tokens
    timings_per_token return_progress sse_ping_interval post_sampling_probs lora""",
    "/v1/embeddings": """model user input messages truncate_prompt_tokens truncation_side dimensions
    encoding_format use_activation add_special_tokens priority request_id mm_processor_kwargs embed_dtype
    endianness cache_salt chat_template chat_template_kwargs add_generation_prompt
    continue_final_message""",
}
"""The parameters of vLLM 0.33's requests, and of llama.cpp's for /infill."""


def _of_openai() -> dict[str, set[str]]:
    return {
        "/v1/chat/completions": set(chat_create_params.CompletionCreateParamsBase.__annotations__),
        "/v1/completions": set(completion_create_params.CompletionCreateParamsBase.__annotations__),
        "/v1/embeddings": set(embedding_create_params.EmbeddingCreateParams.__annotations__),
        "/v1/responses": set(response_create_params.ResponseCreateParamsBase.__annotations__),
    }


def _of_anthropic() -> dict[str, set[str]]:
    types = pytest.importorskip("anthropic.types")
    beta = pytest.importorskip("anthropic.types.beta.message_create_params")
    own = types.message_create_params.MessageCreateParamsBase.__annotations__
    return {
        "/v1/messages": {*own, *beta.MessageCreateParamsBase.__annotations__},
        "/v1/messages/count_tokens": set(types.MessageCountTokensParams.__annotations__),
    }


def test_the_tables_have_every_parameter_of_the_other_apis() -> None:
    of_vllm = {path: set(names.split()) for path, names in VLLM.items()}
    for known in (_of_openai(), _of_anthropic(), of_vllm):
        for path, names in known.items():
            missing = names - rows(*ENDPOINTS[path]).keys()
            assert not missing, (path, missing)


@pytest.mark.parametrize("path", sorted(ENDPOINTS))
def test_each_parameter_is_what_its_row_says(path: str) -> None:
    body, table = ENDPOINTS[path]
    assert not {*body.__struct_fields__} & {*table.no_effect}, "it works"
    assert not {*table.refused} & {*table.no_effect}
    for name, (state, _) in rows(body, table).items():
        if state == "refused":
            with pytest.raises(ApiError) as refused:
                refuse_unserved({name: {"strange": "value"}}, body, table)
            assert refused.value.status == 400
            assert refused.value.param == name
            assert name in refused.value.message
        else:
            refuse_unserved({name: "strange"}, body, table)
        refuse_unserved({name: None}, body, table)
    with pytest.raises(ApiError) as unknown:
        refuse_unserved({"no_such_field": 0}, body, table)
    assert unknown.value.param == "no_such_field"


OBJECTS = {kind.__name__: (kind, place) for kind, place in objects().items()}


def _inner_of_openai() -> dict[str, list[Any]]:
    call = of_chat.chat_completion_message_function_tool_call_param
    return {
        "ChatMessage": [
            getattr(of_chat, f"ChatCompletion{role}MessageParam")
            for role in ("System", "Developer", "User", "Assistant", "Tool")
        ],
        "ContentPart": [of_chat.ChatCompletionContentPartTextParam],
        "MadeCall": [of_chat.ChatCompletionMessageFunctionToolCallParam],
        "CalledFunction": [call.Function],
        "ToolSpec": [of_chat.ChatCompletionFunctionToolParam],
        "FunctionSpec": [shared.FunctionDefinition],
        "NamedTool": [of_chat.ChatCompletionNamedToolChoiceParam],
        "StreamOptions": [of_chat.ChatCompletionStreamOptionsParam],
        "ResponseFormat": [shared.ResponseFormatJSONSchema, shared.ResponseFormatText],
        "JsonSchema": [shared.response_format_json_schema.JSONSchema],
        "Item": [
            of_responses.EasyInputMessageParam, of_responses.ResponseOutputMessageParam,
            of_responses.ResponseReasoningItemParam, of_responses.ResponseFunctionToolCallParam,
            response_input_param.Message, response_input_param.FunctionCallOutput,
        ],
        "Content": [
            of_responses.ResponseInputTextParam, of_responses.ResponseOutputTextParam,
            of_responses.ResponseOutputRefusalParam,
        ],
        "Tool": [of_responses.FunctionToolParam],
        "ToolChoice": [of_responses.ToolChoiceFunctionParam, of_responses.ToolChoiceAllowedParam],
        "TextConfig": [of_responses.ResponseTextConfigParam],
        "Reasoning": [shared.Reasoning],
        "ResponseStreamOptions": [response_create_params.StreamOptions],
    }  # fmt: skip


def _inner_of_anthropic() -> dict[str, list[Any]]:
    types = pytest.importorskip("anthropic.types")
    beta = pytest.importorskip("anthropic.types.beta")

    def both(name: str) -> list[Any]:
        return [getattr(types, f"{name}Param"), getattr(beta, f"Beta{name}Param")]

    return {
        "Block": [
            *both("TextBlock"), *both("ThinkingBlock"), *both("ToolUseBlock"), *both("ToolResultBlock"),
        ],
        "Turn": [types.UserMessageParam, types.AssistantMessageParam],
        "MessagesTool": both("Tool"),
        "MessagesToolChoice": [*both("ToolChoiceAuto"), *both("ToolChoiceTool"), *both("ToolChoiceAny")],
        "Thinking": [*both("ThinkingConfigEnabled"), *both("ThinkingConfigAdaptive")],
        "OutputConfig": both("OutputConfig"),
        "OutputFormat": both("JSONOutputFormat"),
    }  # fmt: skip


def test_the_tables_have_every_field_of_the_objects_of_other_apis() -> None:
    for known in (_inner_of_openai(), _inner_of_anthropic()):
        for name, types in known.items():
            kind, _ = OBJECTS[name]
            inside = INSIDE.get(name, Inside())
            ours = {*kind.__struct_fields__, *inside.refused, *inside.no_effect}
            for one in types:
                missing = get_type_hints(one).keys() - ours
                assert not missing, (name, one, missing)


def _nested(name: str, inner: dict[str, Any]) -> tuple[type[Any], Table, dict[str, Any]]:
    """A body's type and table, and a body with `inner` as the object of this type."""
    _, (endpoint, places) = OBJECTS[name]
    body, table = ENDPOINTS[endpoint]
    found: Any = inner
    for part in reversed(places[0].split(".")):
        found = {part: found}
    return body, table, found


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_each_field_of_an_object_is_what_its_row_says(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unserved, "_ignored", set())
    inside = INSIDE.get(name, Inside())
    kind, _ = OBJECTS[name]
    assert not {*kind.__struct_fields__} & {*inside.refused, *inside.no_effect}, "it works"
    like = {} if inside.types is None else {"type": next(iter(inside.types))}
    for field, one in inside.refused.items():
        assert not one.is_neutral({"strange": "value"})
        with pytest.raises(ApiError) as refused:
            refuse_unserved(*_swapped(_nested(name, {**like, field: {"strange": "value"}})))
        assert refused.value.status == 400
        assert (refused.value.param or "").endswith(f".{field}")
    for field in inside.no_effect:
        refuse_unserved(*_swapped(_nested(name, {**like, field: {"strange": "value"}})))
    unknown = _swapped(_nested(name, {**like, "no_such_field": 0}))
    with caplog.at_level(logging.WARNING):
        if inside.is_history:
            refuse_unserved(*unknown)
            refuse_unserved(*unknown)
        else:
            with pytest.raises(ApiError) as refused:
                refuse_unserved(*unknown)
            assert (refused.value.param or "").endswith(".no_such_field")
    place = OBJECTS[name][1][1][0]
    told = [line for line in caplog.messages if f"'{place}.no_such_field'" in line]
    assert len(told) == inside.is_history, "an ignored name is logged once"


def test_a_part_that_is_refused_is_not_said_to_be_ignored(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unserved, "_ignored", set())
    body, table = ENDPOINTS["/v1/chat/completions"]

    def told(part: dict[str, Any]) -> list[str]:
        caplog.clear()
        text = {"type": "text", "text": "What is this?"}
        raw = {"messages": [{"role": "user", "content": [text, part]}]}
        with caplog.at_level(logging.WARNING):
            refuse_unserved(raw, body, table)
        return caplog.messages

    assert told({"type": "image_url", "image_url": {"url": "http://a/b.png"}}) == []
    (line,) = told({"type": "text", "text": "hi", "shade": 1})
    assert "'messages[].content[].shade'" in line


def _swapped(given: tuple[type[Any], Table, dict[str, Any]]) -> tuple[Any, Any, Any]:
    body, table, raw = given
    return raw, body, table


def test_the_tables_of_objects_are_those_of_bodies() -> None:
    assert INSIDE.keys() <= OBJECTS.keys()


def test_objects_in_lists_are_named_with_their_place(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f"}, "strict": True}
    hello = [{"role": "user", "content": "hi"}]
    for path, more, param in (
        ("/v1/chat/completions", {"messages": hello, "tools": [tool]}, "tools[0].strict"),
        ("/v1/responses", {"input": "hi", "reasoning": {"depth": 3}}, "reasoning.depth"),
        ("/v1/responses", {"input": "hi", "text": {"shape": 3}}, "text.shape"),
    ):
        answer = server.post(path, more)
        assert answer.status == 400
        assert answer.error["param"] == param
    echoed = {"role": "assistant", "content": "x", "some_servers_field": 1}
    body = {"messages": [*hello, echoed, *hello], "max_tokens": 1}
    assert server.post("/v1/chat/completions", body).status == 200
    search = {"type": "web_search_preview", "filters": {}}
    answer = server.post("/v1/responses", {"input": "hi", "tools": [search]})
    assert "declare it as a function" in answer.error["message"]


def test_a_bodys_types_are_read_whole() -> None:
    """An empty table refuses all that a body's type does not have."""
    for body, _ in ENDPOINTS.values():
        for name in body.__struct_fields__:
            refuse_unserved({name: 0}, body, Table())


@pytest.mark.parametrize(
    ("path", "good"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
        ),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 1}),
        ("/infill", {"input_prefix": "abc", "input_suffix": "", "n_predict": 1}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/tokenize", {"prompt": "abc"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_unknown_parameters_are_refused_over_http(
    server: Server, path: str, good: dict[str, Any]
) -> None:
    assert server.post(path, good).status == 200
    answer = server.post(path, {**good, "no_such_field": 1})
    assert answer.status == 400
    assert answer.json["error"]["param"] == "no_such_field"


_FROM_ROUTER = {"no_stop_trim": False, "ignore_eos": False, "return_hidden_states": False, "max_tokens": 1,
                "skip_special_tokens": True, "stream": False}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "logprobs": False,
             "continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True,
             "include_reasoning": True},
        ),
        ("/v1/completions", {"prompt": "abc", "echo": False}),
    ],
)  # fmt: skip
def test_what_vllms_router_adds_to_requests_is_taken(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    """As vllm-router 0.1.17 writes them from a body with a prompt and max_tokens."""
    body = {**_FROM_ROUTER, **body}
    assert server.post(path, body).status == 200
    assert server.post(f"{path}/render", body).status == 200


def test_endpoints_of_other_servers_are_refused_by_name(server: Server) -> None:
    for path, why in NOT_OFFERED.items():
        for asked in (path, f"/v1{path}", f"/v1{path}/x"):
            answer = server.post(asked, {})
            assert answer.status == 404
            if asked != f"/v1{path}/x":
                assert answer.error["code"] == "not_offered"
                assert why in answer.error["message"]


def test_the_document_is_written_from_the_tables() -> None:
    command = [sys.executable, ROOT / "scripts" / "parameters_doc.py", "--check"]
    done = subprocess.run(command, check=False)
    assert done.returncode == 0, "run python scripts/parameters_doc.py"
