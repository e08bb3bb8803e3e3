"""No parameter is ignored silently: the tables are complete, and what they say is what happens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from scripts.parameters_doc import ENDPOINTS, rows

from kvant.server.api_error import ApiError
from kvant.server.parameters import IN_STRUCTURED_OUTPUTS, NOT_OFFERED, Table
from kvant.server.requests import refuse_unserved
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
            refuse_unserved({name: {"strange": "value"}}, body, table)
        refuse_unserved({name: None}, body, table)
    with pytest.raises(ApiError) as unknown:
        refuse_unserved({"no_such_field": 0}, body, table)
    assert unknown.value.param == "no_such_field"


def test_what_structured_outputs_may_not_have_is_refused() -> None:
    for name, one in IN_STRUCTURED_OUTPUTS.items():
        assert not one.is_neutral({"strange": "value"}), name


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
