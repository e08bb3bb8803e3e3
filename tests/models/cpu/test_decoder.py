"""The compiled forward computes what transformers' modules compute, bit for bit the same in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvant.attention.base import AttentionBackend
from kvant.attention.cpu.backend import CpuBackend
from kvant.attention.reference.backend import ReferenceBackend
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.models.loaded import LoadedModel
from tests.attention import driver
from tests.models import loading, tiny

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
TEXT = [(7 * i + i * i) % 120 + 3 for i in range(45)]
TAPS = (0, 2, 3)
BOUND = 3e-5
"""On logits of about 1: float32 sums in another order, over four layers."""


def load(family: str, where: Path) -> tuple[LoadedModel, Path]:
    path = tiny.build(family, where)
    geometry = tiny.geometry(family)
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=ComputeDtype.FLOAT32)
    return loading.load(path, plan, geometry), path


def run(
    model: LoadedModel, backend: AttentionBackend, chunks: list[int], *, beside: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Logits of every token of TEXT, and what TAPS hand on."""
    steps = driver.Driver(driver.pool(model.plan, 40), backend)
    text, other = driver.Text(TEXT), driver.Text(TEXT[5:25])
    found, taps = [], []
    for number, chunk in enumerate(chunks):
        first = [(other, 20)] if beside and number == 0 else []
        ids, call, _ = steps.call([*first, (text, chunk)])
        rows = torch.arange(len(ids) - chunk, len(ids))
        logits, taken = model.forward_with_hidden(ids, call, rows, TAPS)
        found.append(logits)
        taps.append([x[rows] for x in taken])
    return torch.cat(found), [torch.cat(parts) for parts in zip(*taps, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_hidden_states_are_transformers_up_to_float32_sums(
    family: str, tmp_path: Path
) -> None:
    model, path = load(family, tmp_path)
    assert model.choice.name == "compiled"
    theirs = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        expected = theirs(torch.tensor([TEXT])).logits[0]
    for backend in (CpuBackend(), ReferenceBackend()):
        for chunks in ([45], [20, 25], [7] * 6 + [3]):
            logits, _ = run(model, backend, chunks)
            assert (logits - expected).abs().max() < BOUND * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_with_or_without_stops_for_python_the_bits_are_the_same(
    family: str, tmp_path: Path
) -> None:
    model, _ = load(family, tmp_path)
    logits, taps = run(model, CpuBackend(), [45])  # the first forward is watched
    again, more = run(model, CpuBackend(), [45])
    assert torch.equal(logits, again)
    assert all(torch.equal(a, b) for a, b in zip(taps, more, strict=True))
    steps = driver.Driver(driver.pool(model.plan, 40), CpuBackend())
    ids, call, _ = steps.call([(driver.Text(TEXT), 45)])
    assert torch.equal(model.forward(ids, call, torch.arange(45)), logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_depend_neither_on_chunks_nor_on_neighbours_nor_on_what_ran_before(
    family: str, tmp_path: Path
) -> None:
    model, _ = load(family, tmp_path)
    logits, taps = run(model, CpuBackend(), [45])
    for chunks, beside in (([1] * 45, False), ([13, 32], True), ([45], True)):
        again, more = run(model, CpuBackend(), chunks, beside=beside)
        assert torch.equal(again, logits)
        assert all(torch.equal(a, b) for a, b in zip(taps, more, strict=True))


def test_a_row_may_be_chosen_twice_and_none_at_all(tmp_path: Path) -> None:
    model, _ = load("llama", tmp_path)
    for rows in ([44, 3, 44, 3, 3], [], list(range(45)) * 2):
        steps = driver.Driver(driver.pool(model.plan, 40), CpuBackend())
        ids, call, _ = steps.call([(driver.Text(TEXT), 45)])
        logits = model.forward(ids, call, torch.tensor(rows, dtype=torch.int64))
        whole, _ = run(model, CpuBackend(), [45])
        assert torch.equal(logits, whole[rows])


def test_two_threads_give_the_bits_of_one(tmp_path: Path) -> None:
    model, _ = load("llama", tmp_path)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected, _ = run(model, CpuBackend(), [45])
        torch.set_num_threads(2)
        for chunks in ([45], [1] * 45, [20, 25]):
            found, _ = run(model, CpuBackend(), chunks)
            assert torch.equal(found, expected)
    finally:
        torch.set_num_threads(before)


def test_torchs_default_dtype_is_nothing_to_compiled_code(tmp_path: Path) -> None:
    model, _ = load("llama", tmp_path)
    logits, _ = run(model, CpuBackend(), [45])
    hidden = torch.randn(3, model.embed(torch.tensor([1])).shape[1])
    scored = model.score(hidden)
    again, _ = load("llama", tmp_path)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(run(again, CpuBackend(), [45])[0], logits)
        assert torch.equal(again.score(hidden), scored)
    finally:
        torch.set_default_dtype(torch.float32)
