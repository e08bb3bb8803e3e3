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
from kvant.execution.recorder import CudaRecorder
from kvant.execution.runner import ModelRunner
from kvant.kv.names import parse_format
from kvant.kv.pool import LayerCache
from kvant.kv.wide import ask_wide
from kvant.measure import teacher_forced
from kvant.measure.own_engine import plan_storing, runner_of
from kvant.measure.teacher_forced import TextReader, text_logits
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


@pytest.fixture(scope="module")
def on_gpu(model: Path) -> LLM:
    return LLM(model, device="cuda", dtype="float32", kv_cache_memory="1MiB", max_model_len=128)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "recent"),
    [
        ("float32", 0),
        ("fp8_e4m3", 0),
        ("int4_per_token_head", 0),
        ("int4_short", 16),
        ("normal2", 16),
    ],
)
@torch.no_grad()
def test_recorded_steps_give_the_bits_of_launched_ones(on_gpu: LLM, name: str, recent: int) -> None:
    loaded = runner_of(on_gpu).model
    wide = ask_wide(None, recent, None, asked_by="test")
    plan = plan_storing(on_gpu, parse_format(name, asked_by="test"), wide=wide)
    ids = torch.tensor([[5 + 7 * i % 90 for i in range(100)], [9] * 100], device="cuda")
    launched, recorded = (TextReader(loaded, plan, 2, 100) for _ in range(2))
    for reader in (launched, recorded):
        reader.read(ids[:, :60])
    recorded.record(CudaRecorder(loaded.device))
    # Takes over what the recording freed, so a step that still reads it goes wrong.
    others = [torch.full((n,), 1 << 40, device="cuda") for n in range(1, 2000)]
    for place in range(60, 100):
        expected, found = (r.read(ids[:, place : place + 1]) for r in (launched, recorded))
        assert torch.equal(found, expected), place
        assert not torch.equal(found[0], found[1])
    assert len(others) == 1999
