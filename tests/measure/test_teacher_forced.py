"""Teacher-forced logits: chunks of a text are run as the engine runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, LongQuery, Step
from kvant.attention.need import LONG
from kvant.attention.reference.backend import ReferenceBackend
from kvant.engine.llm import LLM
from kvant.execution.runner import ModelRunner
from kvant.kv.pool import LayerCache
from kvant.measure import teacher_forced
from kvant.measure.teacher_forced import text_logits
from tests.engine import tiny_chat


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_chat.build(tmp_path_factory.mktemp("model"))


class Recording(ReferenceBackend):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        if cache.spec.geometry.index == 0:
            self.steps.append(step)
        return super().attend(cache, q, step, params)


def test_long_chunks_of_a_text_are_long_queries(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model, dtype="float32", kv_cache_memory="1MiB", attention_backend="reference")
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    held = Recording()
    monkeypatch.setattr(
        teacher_forced, "load_backends", lambda plan, **_: (held,) * len(plan.layers)
    )
    text_logits(runner.model, llm.plan, [5] * (2 * LONG + 3), chunk=LONG)
    assert [step.long for step in held.steps] == [
        (LongQuery(0, 0, LONG, LONG),), (LongQuery(0, 0, LONG, 2 * LONG),), (),
    ]  # fmt: skip
    assert all(step.rest is None for step in held.steps)
