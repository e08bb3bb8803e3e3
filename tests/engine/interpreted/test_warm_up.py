"""What warms an engine up launches every kernel that its steps launch: none is compiled for a request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kvant.attention.base import Step
from kvant.attention.triton import backend, launch, prefill
from kvant.attention.triton.backend import TritonBackend
from kvant.execution.graphs import Forward
from kvant.execution.warm_up import _nowhere, step_lengths, warm_up
from kvant.kv.dtype import KVDtype
from kvant.models.fused.few_rows import MOST_TOKENS, _padded
from kvant.plan.graph_sizes import batch_sizes
from kvant.sampling import triton_draw
from tests.attention.triton import case

MOST_SEQS = 256
LENGTHS = step_lengths(MOST_SEQS, 8448, 4096)


class Spy:
    """In a kernel's place; remembers what it would have been compiled for."""

    def __init__(self) -> None:
        self.seen: set[object] = set()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*given: object, **options: object) -> None:
            self.seen.add((tuple(x is None for x in given), tuple(sorted(options.items()))))

        return launch


KERNELS = {"paged_attention": backend, "list_items": launch, "combine": backend}
"""With the modules that launch them."""


@pytest.fixture
def spies(monkeypatch: pytest.MonkeyPatch) -> dict[str, Spy]:
    found = {name: Spy() for name in KERNELS}
    for name, spy in found.items():
        monkeypatch.setattr(KERNELS[name], name, spy)
    monkeypatch.setattr(backend, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(backend, "rotate", _rotated)
    return found


def _rotated(q: Tensor, block: int) -> Tensor:
    return torch.empty_like(q, dtype=torch.float32)


def attend(steps: Iterable[tuple[int, ...]], x: case.Case) -> None:
    for lengths in steps:
        step = _nowhere(lengths, 16, torch.device("cpu"), MOST_SEQS)
        q = torch.empty(sum(lengths), *x.q.shape[1:], dtype=torch.bfloat16)
        TritonBackend()._attend(x.cache, q, step, x.params)


@pytest.mark.parametrize("heads", [(32, 8), (9, 3), (14, 2), (8, 8), (64, 8), (16, 1)], ids=str)
@pytest.mark.parametrize(
    ("k", "v"),
    [
        (KVDtype.BFLOAT16, KVDtype.BFLOAT16),
        (KVDtype.FP8_E4M3, KVDtype.FP8_E4M3),
        (KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD),
        (KVDtype.TURBOQUANT_K8, KVDtype.TURBOQUANT_V4),
    ],
    ids=str,
)
def test_no_step_launches_attention_that_was_not_warm(
    k: KVDtype, v: KVDtype, heads: tuple[int, int], spies: dict[str, Spy]
) -> None:
    given: dict[str, Any] = {"heads": heads, "sequences": ((1, 1),)}
    x = case.prepare(k, v, head_dims=(128, 128), **given)
    attend(LENGTHS, x)
    attend(((1,) * count for count in batch_sizes(MOST_SEQS)), x)  # recorded
    warm = {name: set(spy.seen) for name, spy in spies.items()}
    counts = (1, 2, 3, 5, 6, 9, 20, 24, 33, 64, 65, 128, 129, 256)
    attend(((1,) * count for count in range(1, 40)), x)
    attend(((*(1,) * (count - 1), n) for count in counts for n in (*range(2, 34), 43, 65)), x)
    attend(((n,) * count for count in counts for n in (2, 3, 4, 6, 17, 43) if n * count < 2000), x)
    for name, spy in spies.items():
        assert spy.seen <= warm[name], name


def test_products_of_few_rows_are_warm_for_every_number_of_tokens_and_of_wanted_rows() -> None:
    few = [lengths for lengths in LENGTHS if sum(lengths) <= MOST_TOKENS]
    tiles = {_padded(n) for n in range(2, MOST_TOKENS + 1)}
    assert {_padded(sum(lengths)) for lengths in few} >= tiles
    assert {_padded(len(lengths)) for lengths in few if sum(lengths) > 1} >= tiles
    assert (1,) in few


def warm(forward: Forward, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 4 sequences, 600 tokens and lengths of 500, of a model without layers."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    device = torch.device("cpu")
    arena = SimpleNamespace(layout=SimpleNamespace(of_tokens=(None,)))
    pool: Any = SimpleNamespace(plan=SimpleNamespace(layers=()), device=device, arena=arena)
    model: Any = SimpleNamespace(
        plan=SimpleNamespace(page_size=16),
        device=device,
        dtype=torch.bfloat16,
        batch_invariant=False,
        measure=lambda most_tokens: None,
    )
    warm_up(model, pool, forward, 4, 600, 500, lambda done, of: None)


def test_the_kernels_that_draw_tokens_are_compiled_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spies, ran = [Spy() for _ in range(5)], []

    def forward(ids: Tensor, step: Step, logits_index: Tensor) -> Tensor:
        ran.append(tuple(step.cu_seqlens_q.diff().tolist()))
        return torch.zeros(len(logits_index), 9000)

    kernels = "survey", "draw_few", "_narrow", "_weigh", "_choose"
    for name, spy in zip(kernels, spies, strict=True):
        monkeypatch.setattr(triton_draw, name, spy)
    warm(forward, monkeypatch)
    each = step_lengths(4, 600, 500)
    assert ran == [one for one in each for _ in range(2 if max(one) == 1 else 1)]  # decodes: twice
    launched = [set(spy.seen) for spy in spies]
    assert all(launched)
    table = torch.tensor([[1.0, 50.0, 0.9, 0.0, 0.3]] * 3, dtype=torch.float64)
    space = triton_draw.make_space(3, 9000, torch.device("cpu"))
    given = torch.zeros(3, 9000), torch.arange(3), table, torch.zeros(3, dtype=torch.int64), space
    triton_draw.draw_from_few(*given)
    triton_draw.narrow(*given, by_share=False)
    triton_draw.narrow(*given, by_share=True)
    triton_draw.choose(*given)
    assert [spy.seen for spy in spies] == launched


def test_threads_that_compile_work_on_the_gpu_of_the_thread_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch keeps the current GPU per thread, and a new thread starts with the first GPU."""
    chosen = threading.local()
    seen: set[int] = set()

    def forward(ids: Tensor, step: Step, logits_index: Tensor) -> Tensor:
        seen.add(chosen.gpu)
        return torch.zeros(len(logits_index), 9)

    def work_on(gpu: int) -> None:
        chosen.gpu = gpu

    work_on(3)
    monkeypatch.setattr("kvant.execution.warm_up.chosen_gpu", lambda: chosen.gpu)
    monkeypatch.setattr("kvant.execution.warm_up.work_on", work_on)
    monkeypatch.setattr(triton_draw, "draw_once", lambda logits: seen.add(chosen.gpu))
    warm(forward, monkeypatch)
    assert seen == {3}


def test_decodes_of_short_and_of_long_contexts_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    longest: dict[int, set[int]] = {}

    def forward(ids: Tensor, step: Step, logits_index: Tensor) -> Tensor:
        longest.setdefault(step.max_seqlen_q, set()).add(step.max_seqlen_kv)
        return torch.zeros(len(logits_index), 9)

    monkeypatch.setattr(triton_draw, "draw_once", lambda logits: None)
    warm(forward, monkeypatch)
    assert longest[1] == {1, 500}
    assert longest[300] == {300}


def test_a_step_that_fails_in_a_thread_fails_the_start_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(ids: Tensor, step: Step, logits_index: Tensor) -> Tensor:
        if step.max_seqlen_q == 300:
            raise torch.OutOfMemoryError("no memory for this one")
        return torch.zeros(len(logits_index), 9)

    monkeypatch.setattr(triton_draw, "draw_once", lambda logits: None)
    before = threading.active_count()
    with pytest.raises(torch.OutOfMemoryError, match="for this one"):
        warm(forward, monkeypatch)
    assert threading.active_count() == before


def test_a_start_that_fails_does_not_go_on_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def forward(ids: Tensor, step: Step, logits_index: Tensor) -> Tensor:
        if ran:
            time.sleep(0.05)
        ran.append(step.max_seqlen_q)
        return torch.zeros(len(logits_index), 9)

    def fails(*given: object) -> None:
        raise torch.OutOfMemoryError("no memory for a plan")

    monkeypatch.setattr(triton_draw, "draw_once", lambda logits: None)
    monkeypatch.setattr(prefill, "prepare", fails)
    with pytest.raises(torch.OutOfMemoryError, match="for a plan"):
        warm(forward, monkeypatch)
    assert len(ran) < len(step_lengths(4, 600, 500)) / 2


def test_a_small_engine_is_asked_for_no_step_that_it_could_not_run() -> None:
    for limits in ((1, 16, 8), (3, 64, 500), (256, 8448, 40)):
        found = step_lengths(*limits)
        assert found
        assert all(len(one) <= limits[0] for one in found)
        assert all(sum(one) <= limits[1] for one in found)
        assert all(max(one) <= limits[2] for one in found)
