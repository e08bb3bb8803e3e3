"""At start an engine verifies what it is about to use: it refuses what is wrong and leaves no trace."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvant import LLM, SamplingParams
from kvant.attention.cpu.backend import CpuBackend
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.attention.verify import start
from kvant.attention.verify.start import verify_plan
from kvant.attention.verify.trial import Outcome
from kvant.errors import NotServable
from kvant.execution.runner import ModelRunner
from kvant.kv.dtype import KVDtype
from kvant.kv.spec import Role
from tests.attention import driver
from tests.models import tiny

CPU = DeviceFacts(DeviceKind.CPU)
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("qwen3", tmp_path_factory.mktemp("tiny"))


def make(path: Path, **changes: Any) -> LLM:
    asked = {"dtype": "float32", "kv_cache_memory": "4MiB", "max_model_len": 256, **changes}
    return LLM(path, **asked)


def _attend_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key too few, as a kernel with a wrong mask has it."""
    attend = CpuBackend.attend

    def wrong(self: CpuBackend, cache: Any, q: Tensor, step: Any, params: Any) -> Tensor:
        return attend(self, cache, q, replace(step, seqlens_kv=step.seqlens_kv - 1), params)

    monkeypatch.setattr(CpuBackend, "attend", wrong)


def test_a_wrong_kernel_keeps_the_engine_from_starting_and_the_way_out_works(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _attend_wrongly(monkeypatch)
    with pytest.raises(NotServable) as caught:
        make(path, kv_cache_dtype="int8_per_token_head")
    text = str(caught.value)
    assert "cpu" in text
    assert "int8_per_token_head" in text
    assert "head size" in text
    (way,) = (way for way in caught.value.ways_out if way.arguments)
    assert way.arguments == ("--attention-backend", "reference")
    llm = make(path, kv_cache_dtype="int8_per_token_head", attention_backend=way.arguments[1])
    assert len(llm.generate([[1, 2, 3]], GREEDY)[0].token_ids) == 3


def test_a_writer_that_stores_other_bytes_is_refused_before_weights_are_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = CpuBackend.write

    def wrong(self: CpuBackend, cache: Any, k: Tensor, v: Tensor, step: Any) -> None:
        write(self, cache, k, v * 1.001, step)

    def must_not_be_called(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(CpuBackend, "write", wrong)
    monkeypatch.setattr("kvant.models.load.load_model", must_not_be_called)
    with pytest.raises(NotServable, match=r"v\.codes"):
        make(path)


def test_a_drafter_s_wrong_cell_has_a_way_out_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _attend_wrongly(monkeypatch)
    made = driver.plan([driver.layer(causal=False)], KVDtype.FP8_E4M3)
    layers = tuple(replace(layer, backend="cpu") for layer in made.layers)
    with pytest.raises(NotServable, match="non-causal") as caught:
        verify_plan(replace(made, role=Role.DRAFT, layers=layers), CPU)
    assert any("--speculative-config" in str(way) for way in caught.value.ways_out)


def test_every_kind_of_layer_is_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[int | None, bool]] = []
    run_trial = start.run_trial

    def note(backend: Any, trial: Any, device: torch.device) -> Any:
        held.append((trial.need.layer.window, trial.need.layer.causal))
        return run_trial(backend, trial, device)

    monkeypatch.setattr(start, "run_trial", note)
    layers = [driver.layer(index=i, window=500 if i % 2 else None, causal=i != 4) for i in range(6)]
    verify_plan(driver.plan(layers), CPU)
    kinds = {(None, True), (24, True), (None, False)}
    assert set(held) == kinds
    assert len(held) == 2 * len(kinds)


@pytest.mark.case("A50")
def test_the_check_leaves_no_trace_in_pool_pages_backends_or_random_numbers(path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    llm = make(path, kv_cache_dtype="fp8_per_token_head")
    assert torch.equal(torch.get_rng_state(), before)
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    assert all(not plane.any() for plane in runner.pool.planes())
    used = {id(backend): backend for backend in runner._backends}.values()
    assert all(isinstance(backend, CpuBackend) and not backend._layers for backend in used)
    llm.engine.audit()
    assert llm.engine.stats.num_held_pages == 0


def test_the_check_takes_a_fraction_of_a_second_once_kernels_are_there(path: Path) -> None:
    plan = make(path, kv_cache_dtype="fp8/int4_per_token_head").planned.target.kv
    begin = time.process_time()
    verify_plan(plan, CPU)
    assert time.process_time() - begin < 1.0


def test_messages_name_what_was_asked_and_found(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _attend_wrongly(monkeypatch)
    with pytest.raises(NotServable) as caught:
        make(path, kv_cache_dtype="fp8/nvfp4")
    assert "fp8_e4m3/nvfp4" in caught.value.what
    assert re.search(r"a row errs by \S+ of its length, where \S+ is rounding", caught.value.why)


def test_on_a_gpu_every_trial_compiles_in_threads_before_any_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if one of them fails there: it fails again where it is judged."""
    pytest.importorskip("triton")
    ran: list[tuple[bool, tuple[tuple[int, int], ...]]] = []

    def run_trial(backend: Any, trial: Any, device: torch.device) -> Outcome:
        ran.append((threading.current_thread() is threading.main_thread(), trial.sequences))
        if not ran[-1][0]:
            raise RuntimeError("does not compile")
        return Outcome(0.0, 1.0, None)

    monkeypatch.setattr(start, "run_trial", run_trial)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    verify_plan(driver.plan([driver.layer()]), DeviceFacts(DeviceKind.CUDA, "sm_90"))
    assert [main for main, _ in ran] == [False] * 3 + [True] * 3
    assert {sequences for _, sequences in ran[:3]} == {sequences for _, sequences in ran[3:]}
