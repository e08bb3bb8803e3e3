"""What holds on every device: transformers' logits, a checkpoint's own scales, decode as prefill.

On a GPU: python -m pytest -m gpu here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvant import LLM, SamplingParams
from kvant.attention.backends import load_backends
from kvant.attention.base import AttentionBackend, Step, StepCall
from kvant.execution.batch import build_batch
from kvant.execution.runner import ModelRunner, _moved
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side
from kvant.kv.names import FormatRequest
from kvant.kv.pool import KVPool, LayerCache
from kvant.kv.request import Asked, KVRequest
from kvant.kv.spec import KVPlan
from kvant.measure.teacher_forced import text_logits
from kvant.models.fused.decoder import fuse
from kvant.models.loaded import LoadedModel
from kvant.models.quiet import quiet_transformers
from kvant.plan.resolution import resolve_again
from tests.models import tiny
from tests.models.tiny_quantized import build_quantized, scale

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENS = [3 + (7 * i + i * i) % 120 for i in range(70)]


def open_(path: Path, device: str, **options: Any) -> tuple[LLM, LoadedModel]:
    given = {"kv_cache_memory": "64MiB", **options}
    llm = LLM(path, device=device, max_model_len=128, max_num_seqs=2, **given)
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    return llm, runner.model


def by_transformers(path: Path, dtype: torch.dtype, device: str) -> Tensor:
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype, attn_implementation="eager"
        )
    with torch.no_grad():
        logits: Tensor = model.to(device)(torch.tensor([TOKENS], device=device)).logits[0]
    return logits.double()


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [1, 33, 70])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_as_near_to_exact_ones_as_transformers_own(
    family: str, chunk: int, device: str, tmp_path: Path
) -> None:
    """float32: 5e-5 of transformers in float64. bfloat16: no more than 1.5 times its own error."""
    path = tiny.build(family, tmp_path)
    exact = by_transformers(path, torch.float64, device)
    for dtype, bound in (
        (torch.float32, 5e-5),
        (torch.bfloat16, 1.5 * error(by_transformers(path, torch.bfloat16, device), exact)),
    ):
        llm, model = open_(path, device, dtype=str(dtype).removeprefix("torch."))
        found = text_logits(model, llm.plan, TOKENS, chunk=chunk)
        assert error(found, exact) < bound, dtype


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_with_float8_weights_runs_with_its_own_kv_scales(
    device: str, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    path, _ = build_quantized(tmp_path)
    llm, model = open_(path, device, dtype="float32")
    for layer in llm.plan.layers:
        assert layer.k is not None
        assert layer.k.dtype is KVDtype.FP8_E4M3
        for side in (Side.K, Side.V):
            used = model.scales[layer.geometry.index, side]
            assert used.device.type == device
            assert used.tolist() == pytest.approx([scale(layer.geometry.index, side.value)])
    found = text_logits(model, llm.plan, TOKENS, chunk=17)
    wide, reference = open_(path, "cpu", dtype="float32", attention_backend="reference")
    expected = text_logits(reference, wide.plan, TOKENS, chunk=17).double()
    # A key that is rounded the other way is up to an eighth off.
    assert error(found.cpu(), expected) < 0.05


@pytest.mark.case("A49")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "stored",
    [KVDtype.FLOAT32, KVDtype.BFLOAT16, KVDtype.FP8_E4M3, KVDtype.FP8_PER_TOKEN_HEAD,
     KVDtype.INT8_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.NVFP4,
     KVDtype.TURBOQUANT_K4, KVDtype.TURBOQUANT_K3, KVDtype.TURBOQUANT_V4, KVDtype.TURBOQUANT_V3],
    ids=str,
)  # fmt: skip
def test_decode_is_prefill_over_the_same_cache(
    stored: KVDtype, device: str, tmp_path: Path
) -> None:
    """One query or many, over bytes that were written once: the same logits but for rounding."""
    llm, model = open_(tiny.build("qwen3", tmp_path), device, dtype="float32")
    asked = KVRequest(explicit=(Asked(FormatRequest(stored, stored), "test"),))
    plan = resolve_again(llm.planned, asked)
    pool = KVPool(plan, 8, device=model.device, scales={})
    whole = forward(model, plan, pool, 0, write=True)
    one = forward(model, plan, pool, len(TOKENS) - 1, write=False)
    some = forward(model, plan, pool, len(TOKENS) - 20, write=False)
    again = forward(model, plan, pool, 0, write=False)
    for found in (one, some, again):
        assert error(found, whole.double()) < 5e-5


def forward(model: LoadedModel, plan: KVPlan, pool: KVPool, start: int, *, write: bool) -> Tensor:
    """Logits after the last token, from the tokens behind `start` over all that is stored."""
    count, device = len(TOKENS), model.device
    positions = torch.arange(start, count, device=device)
    slots = positions + plan.page_size
    step = Step(
        cu_seqlens_q=torch.tensor([0, count - start], dtype=torch.int32, device=device),
        seqlens_kv=torch.tensor([count], dtype=torch.int32, device=device),
        page_table=torch.arange(1, 8, dtype=torch.int32, device=device)[None],
        slot_mapping=slots if write else torch.full_like(slots, -1),
        positions=positions,
        max_seqlen_q=count - start,
        max_seqlen_kv=count,
    )
    call = StepCall(step, pool, load_backends(plan))
    ids = torch.tensor(TOKENS[start:], device=device)
    return model.forward(ids, call, torch.tensor([count - start - 1], device=device))


class Spy:
    """Passes everything on; how many queries each layer attended with."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.name = backend.name
        self.queries: list[int] = []

    def write(self, *args: Any) -> None:
        self._backend.write(*args)

    def attend(self, cache: LayerCache, q: Tensor, *args: Any) -> Tensor:
        self.queries.append(q.shape[0])
        return self._backend.attend(cache, q, *args)


@pytest.mark.parametrize("device", DEVICES)
def test_the_last_layer_runs_only_rows_whose_logits_are_wanted(device: str, tmp_path: Path) -> None:
    llm, model = open_(
        tiny.build("qwen3", tmp_path), device, dtype="float32", max_num_batched_tokens=100
    )
    engine, runner = llm.engine, llm.engine.runner
    assert isinstance(runner, ModelRunner)
    params = SamplingParams(temperature=0, max_tokens=4)
    for prompt in (TOKENS[:40], TOKENS[::-1]):  # the second one is cut
        engine.submit(prompt, params)
    schedule = engine.scheduler.schedule()
    assert schedule is not None
    assert schedule.counts.tolist() == [40, 60]
    assert schedule.samples.tolist() == [True, False]
    batch = build_batch(schedule, engine.scheduler.table, model.plan.page_size)
    step = _moved(batch.step, model.device)
    ids, index = batch.input_ids.to(model.device), batch.logits_index.to(model.device)
    decoder = fuse(model._module, model.plan)
    found = {}
    for name, one in {"all": replace(step, wanted=None), "wanted": step}.items():
        spies = tuple(map(Spy, load_backends(model.plan)))
        with torch.no_grad():
            found[name], _ = decoder.run(ids, StepCall(one, runner.pool, spies), index)
        rows = [spy.queries for spy in spies]
        assert rows == [[100]] * (len(rows) - 1) + [[1 if name == "wanted" else 100]]
    assert found["wanted"].shape == found["all"].shape == (1, engine.vocab_size)
    assert error(found["wanted"], found["all"].double()) < 1e-5
