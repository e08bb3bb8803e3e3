"""Decoding beside transformers in one process: quick, for those who want to see it themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvant.engine.llm import LLM
from kvant.kv.dtype import KVDtype
from kvant.kv.names import FormatRequest
from kvant.measure.cpu_decode_bench import Case
from kvant.measure.peers import transformers_worker
from kvant.measure.peers.contest import Contestant, Row, kvant, take_turns
from kvant.measure.peers.filled import engine_with
from kvant.models.quiet import quiet_transformers


def beside_transformers(
    llm: LLM, batches: Sequence[int], *, context: int, steps: int, rounds: int
) -> list[Row]:
    """Both with float32 weights and a float32 cache, on torch's threads, in turns.

    Loads the weights of `llm`, which computes in float32, once more.
    """
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(llm.model_path), dtype=torch.float32, local_files_only=True
        )
    model.requires_grad_(False)

    def theirs(case: Case, repeats: int) -> tuple[Sequence[float], None]:
        asked = {"batch": case.batch, "context": case.context, "repeats": repeats}
        with quiet_transformers():
            found = transformers_worker.decode(model, {**asked, "seed": 0, "filled": False})
        return found, None

    stored = KVDtype.FLOAT32
    request = FormatRequest(stored, stored)
    engine = engine_with(llm, request, batch=max(batches), context=context, filled=False)
    contestants = [
        Contestant("transformers", "float32", str(stored), theirs),
        kvant(engine, "float32", stored),
    ]
    rows: list[Row] = []
    for batch in batches:
        rows += take_turns(contestants, Case(True, batch, context), repeats=steps, rounds=rounds)
    return rows
