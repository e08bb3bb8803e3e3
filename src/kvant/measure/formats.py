"""The table of formats for one loaded model: bytes, tokens per GiB, and distance from float32 KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvant.engine.llm import LLM
from kvant.kv.names import FormatRequest
from kvant.measure.fidelity import Fidelity, compare
from kvant.measure.own_engine import plan_storing, runner_of
from kvant.measure.teacher_forced import text_logits


@dataclass(frozen=True, slots=True)
class FormatRow:
    """One format as the global request on one model. fidelity: against float32 KV."""

    format: FormatRequest
    bytes_per_token: int
    tokens_per_gib: int
    fidelity: Fidelity


def measure_formats(
    llm: LLM, baseline: FormatRequest, formats: Sequence[FormatRequest], token_ids: Sequence[int]
) -> list[FormatRow]:
    """Measures every format on the model of `llm` over one text's tokens, with one pass per format."""
    runner = runner_of(llm)
    truth = text_logits(runner.model, plan_storing(llm, baseline), token_ids)
    rows = []
    for wanted in formats:
        plan = plan_storing(llm, wanted)
        same = wanted == baseline  # a second pass would repeat the first
        logits = truth if same else text_logits(runner.model, plan, token_ids)
        fidelity = compare(truth, logits)
        size = plan.bytes_per_token
        rows.append(FormatRow(wanted, size, 2**30 // size, fidelity))
    return rows
