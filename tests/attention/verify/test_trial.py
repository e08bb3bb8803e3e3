"""A trial passes what is right and catches what is wrong, however small the share of what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvant.attention.base import AttentionBackend, AttentionParams, Step
from kvant.attention.need import DeviceFacts, DeviceKind, Need
from kvant.attention.reference.backend import ReferenceBackend
from kvant.attention.verify import definition
from kvant.attention.verify.cells import MASKS, Mask, Row, need_of
from kvant.attention.verify.trial import Trial, bound_of, run_trial
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.pool import LayerCache
from tests.attention import oracle
from tests.attention.test_reference import EXTRA, prepare

CPU = DeviceFacts(DeviceKind.CPU)
HOST = torch.device("cpu")
STEP = ((33, 5), (1, 1), (300, 16))
PAIR = Row(KVDtype.FP8_E4M3, KVDtype.INT4_PER_TOKEN_HEAD, 64)


def need(mask: Mask = MASKS[0], compute: ComputeDtype = ComputeDtype.FLOAT32) -> Need:
    return need_of(PAIR, mask, CPU, compute)


@pytest.mark.parametrize("kind", list(EXTRA))
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_definition_is_what_transformers_computes(mask: Mask, kind: str) -> None:
    made = prepare(
        k=KVDtype.NVFP4, v=KVDtype.FLOAT16, causal=mask.causal,
        window=None if mask.window is None else 13, sequences=((40, 1), (60, 23)), padding=2,
        **EXTRA[kind],
    )  # fmt: skip
    planes = definition.stored_planes(made.cache, made.k, made.v, made.step.slot_mapping)
    for plane, after in zip((*made.cache.k, *made.cache.v), planes, strict=True):
        plane.copy_(after)
    found = definition.attend(made.cache, made.q, made.step, made.params)
    expected = oracle.attend(made.cache, made.q, made.step, made.params)
    close = 2e-6 if kind == "softcap" else 1e-12
    torch.testing.assert_close(found, expected, atol=close, rtol=close)


@pytest.mark.parametrize("compute", [ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_sound_backend_passes(mask: Mask, compute: ComputeDtype) -> None:
    outcome = run_trial(ReferenceBackend(), Trial(need(mask, compute), STEP, odd_rows=True), HOST)
    assert outcome.wrong is None
    assert 0 < outcome.error <= outcome.bound


class Broken(ReferenceBackend):
    """Sound but for what is passed: a change of what is asked, of the result, or of the storage."""

    def __init__(
        self,
        ask: Callable[[Step, AttentionParams], tuple[Step, AttentionParams]] | None = None,
        answer: Callable[[Tensor], object] | None = None,
        store: Callable[[LayerCache], object] | None = None,
    ) -> None:
        super().__init__()
        self._ask, self._answer, self._store = ask, answer, store

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None:
        super().write(cache, k, v, step)
        if self._store is not None:
            self._store(cache)

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        if self._ask is not None:
            step, params = self._ask(step, params)
        out = super().attend(cache, q, step, params)
        if self._answer is not None:
            self._answer(out)
        return out


def _swap_pages(step: Step) -> Step:
    table = step.page_table.clone()
    table[-1, [3, 18]] = table[-1, [18, 3]]
    return replace(step, page_table=table)


def _flip(cache: LayerCache) -> None:
    page = int((cache.k[0].flatten(1) == 0xFF).all(1).nonzero()[-1])  # of no sequence
    cache.k[0][page, 3, 0, 0] ^= 1


BROKEN: dict[str, tuple[AttentionBackend, Mask]] = {
    "a window one token too long": (
        Broken(ask=lambda s, p: (s, replace(p, window=(p.window or 0) + 1))), MASKS[2]
    ),
    "causal where all was asked": (
        Broken(ask=lambda s, p: (replace(s, causal=True), p)), MASKS[1]
    ),
    "the last token unseen": (
        Broken(ask=lambda s, p: (replace(s, seqlens_kv=s.seqlens_kv - (s.seqlens_kv > 16).int()), p)),
        MASKS[1],
    ),
    "two pages in the wrong order, causal and windowed": (
        Broken(ask=lambda s, p: (_swap_pages(s), p)), MASKS[2]
    ),
    "a scale off by one per cent": (
        Broken(answer=lambda out: out.mul_(1.01)), MASKS[0]
    ),
    "one row not written": (
        Broken(answer=lambda out: out[7, 3].fill_(float("nan"))), MASKS[0]
    ),
    "numbers for tokens of no sequence": (
        Broken(answer=lambda out: out[-1, 0].fill_(1e-3)), MASKS[0]
    ),
    "one bit of one byte that is never read": (Broken(store=_flip), MASKS[0]),
}  # fmt: skip


@pytest.mark.parametrize(("backend", "mask"), list(BROKEN.values()), ids=list(BROKEN))
def test_what_is_wrong_is_caught(backend: AttentionBackend, mask: Mask) -> None:
    outcome = run_trial(backend, Trial(need(mask), STEP, odd_rows=True), HOST)
    assert outcome.wrong is not None


@pytest.mark.parametrize(
    "name",
    ["a window one token too long", "causal where all was asked", "the last token unseen"],
)
def test_the_bound_of_bfloat16_still_catches_a_wrong_mask(name: str) -> None:
    backend, mask = BROKEN[name]
    asked = need(mask, ComputeDtype.BFLOAT16)
    outcome = run_trial(backend, Trial(asked, STEP), HOST)
    assert outcome.wrong is not None
    assert outcome.error > 2 * bound_of(asked)


def test_a_byte_that_differs_from_the_format_s_definition_is_named_by_its_plane() -> None:
    outcome = run_trial(Broken(store=_flip), Trial(need(), STEP), HOST)
    assert "k.codes" in (outcome.wrong or "")
