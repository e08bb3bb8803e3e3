"""The measured distance of a format from float32 KV."""

from __future__ import annotations

import math

import pytest
import torch

from kvant.engine.llm import LLM
from kvant.execution.runner import ModelRunner
from kvant.kv.dtype import KVDtype
from kvant.kv.names import FormatRequest
from kvant.kv.request import KVRequest
from kvant.measure.fidelity import compare, passage
from kvant.measure.formats import measure_formats
from kvant.measure.teacher_forced import text_logits
from kvant.plan.resolution import resolve_again
from tests.engine import tiny_chat

FLOAT32 = FormatRequest(KVDtype.FLOAT32, KVDtype.FLOAT32)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    torch.set_num_threads(1)
    path = tiny_chat.build(tmp_path_factory.mktemp("measure"))
    return LLM(path, dtype="float32", kv_cache_memory="1MiB")


def test_divergence_is_that_of_the_formula() -> None:
    baseline = torch.log(torch.tensor([[0.5, 0.5], [0.9, 0.1]]))
    other = torch.log(torch.tensor([[0.25, 0.75], [0.9, 0.1]]))
    found = compare(baseline, other)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert found.mean_kl == pytest.approx(expected / 2, rel=1e-6)
    assert found.same_top == 0.5
    assert found.num_tokens == 2


def test_the_same_logits_are_no_distance_apart() -> None:
    logits = torch.randn(5, 7)
    assert compare(logits, logits).mean_kl == 0
    assert compare(logits, logits).same_top == 1


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_chunks_do_not_change_what_a_float32_cache_says(llm: LLM, chunk: int) -> None:
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    ids = list(llm.encode("The sea, the sea, the open sea. " * 2))
    plan = resolve_again(llm.planned, KVRequest())
    whole = text_logits(runner.model, plan, ids, chunk=len(ids))
    assert torch.allclose(text_logits(runner.model, plan, ids, chunk=chunk), whole, atol=1e-5)


def test_narrower_formats_are_measured_and_farther_away(llm: LLM) -> None:
    formats = [FLOAT32, *(FormatRequest(d, d) for d in (KVDtype.BFLOAT16, KVDtype.FP8_E5M2))]
    ids = llm.encode("Measure twice, cut once. " * 4)
    exact, half, narrow = (row for row in measure_formats(llm, FLOAT32, formats, ids))
    assert exact.fidelity.mean_kl == 0
    assert 0 < half.fidelity.mean_kl < narrow.fidelity.mean_kl
    assert exact.bytes_per_token == 2 * half.bytes_per_token == 4 * narrow.bytes_per_token
    assert half.tokens_per_gib == 2**30 // half.bytes_per_token


def test_the_bundled_text_is_there() -> None:
    assert len(passage()) > 1500
