"""The demo's comparison with transformers: both engines do the same work."""

from __future__ import annotations

from pathlib import Path

import torch

from kvant.engine.llm import LLM
from kvant.measure.beside_transformers import beside_transformers
from tests.engine import tiny_chat


def test_the_demo_compares_the_same_cases_with_the_same_weights(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    llm = LLM(tiny_chat.build(tmp_path), dtype="float32", kv_cache_memory="1MiB")
    rows = beside_transformers(llm, (1, 2), context=8, steps=2, rounds=2)
    assert [(r.engine, r.tokens) for r in rows] == [
        ("transformers", 1),
        ("Kvant", 1),
        ("transformers", 2),
        ("Kvant", 2),
    ]
    assert {(r.weights, r.kv) for r in rows} == {("float32", "float32")}
    assert all(len(found) == 2 for r in rows for found in r.rounds)
