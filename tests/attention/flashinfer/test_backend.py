"""What FlashInfer is told of a step: checked by a stand-in that attends as its documentation says."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvant.attention.base import Step
from kvant.attention.flashinfer.backend import FlashInferBackend
from kvant.attention.need import DeviceFacts, DeviceKind, Need
from kvant.attention.reference.backend import ReferenceBackend
from kvant.attention.verify.trial import Trial, run_trial
from kvant.kv.dtype import ComputeDtype, KVDtype
from tests.attention import driver

CPU = torch.device("cpu")
STEPS: dict[str, tuple[tuple[int, int], ...]] = {
    "one prompt": ((300, 300),),
    "after a prefix": ((700, 300),),
    "beside few": ((40, 1), (33, 5), (600, 512), (256, 256)),
    "few alone": ((40, 1), (33, 5)),
}


class Wrapper:
    """`BatchPrefillWithPagedKVCacheWrapper`, as far as Kvant uses it, out of its documentation."""

    plans = 0

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert workspace.dtype is torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **how: Any,
    ) -> None:
        Wrapper.plans += 1
        self.queries = qo_indptr.tolist()
        self.pages = paged_kv_indptr.tolist()
        self.ids = paged_kv_indices.long()
        self.last = paged_kv_last_page_len.tolist()
        self.group = num_qo_heads // num_kv_heads
        self.shape = (page_size, num_kv_heads, head_dim_qk)
        self.how = how

    def run(self, q: Tensor, planes: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        assert q.is_contiguous()
        assert len(q) == self.queries[-1]
        assert q.dtype is self.how["q_data_type"] is self.how["kv_data_type"]
        for i, last in enumerate(self.last):
            start, end = self.queries[i], self.queries[i + 1]
            ids = self.ids[self.pages[i] : self.pages[i + 1]]
            length = (len(ids) - 1) * self.shape[0] + last
            assert 0 < last <= self.shape[0]
            k, v = (
                plane[ids].flatten(0, 1)[:length].double().repeat_interleave(self.group, 1)
                for plane in planes
            )
            assert k.shape[-1] == self.shape[2]
            x = torch.einsum("nhd,mhd->hnm", q[start:end].double(), k) * self.how["sm_scale"]
            cap = self.how["logits_soft_cap"]
            if cap:
                x = cap * torch.tanh(x / cap)
            here = torch.arange(length - (end - start), length)[:, None]
            key = torch.arange(length)
            if self.how["causal"]:
                x.masked_fill_(key > here, float("-inf"))
            if self.how["window_left"] >= 0:
                x.masked_fill_(key < here - self.how["window_left"], float("-inf"))
            out[start:end] = torch.einsum("hnm,mhd->nhd", torch.softmax(x, -1), v).to(out.dtype)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(Wrapper, "plans", 0)


def need(**layer: Any) -> Need:
    made = driver.layer(num_q_heads=8, num_kv_heads=2, head_dim_k=64, **layer)
    facts = DeviceFacts(DeviceKind.CUDA, "sm_90")
    return Need(made, KVDtype.BFLOAT16, KVDtype.BFLOAT16, ComputeDtype.BFLOAT16, 16, facts)


@pytest.mark.parametrize("sequences", list(STEPS.values()), ids=list(STEPS))
@pytest.mark.parametrize(
    "layer",
    [{}, {"causal": False}, {"window": 100}, {"softcap": 3.0}],
    ids=["causal", "non-causal", "window", "softcap"],
)
def test_every_sequence_of_a_step_is_attended_to_over_its_own_pages(
    layer: dict[str, Any], sequences: tuple[tuple[int, int], ...]
) -> None:
    outcome = run_trial(FlashInferBackend(ReferenceBackend()), Trial(need(**layer), sequences), CPU)
    assert outcome.wrong is None
    assert Wrapper.plans == any(new >= 256 for _, new in sequences)


def test_tokens_of_no_sequence_get_zeros_behind_prompts_too() -> None:
    trial = Trial(need(), STEPS["beside few"], odd_rows=True)
    assert run_trial(FlashInferBackend(ReferenceBackend()), trial, CPU).wrong is None


class Layers(ReferenceBackend):
    """Attends a second time, as the next layer of the same kind would, and then in a new step."""

    def __init__(self, held: FlashInferBackend) -> None:
        super().__init__()
        self._held = held
        self.counts: list[int] = []

    def attend(self, cache: Any, q: Tensor, step: Step, params: Any) -> Tensor:
        found = self._held.attend(cache, q, step, params)
        self.counts.append(Wrapper.plans)
        again = self._held.attend(cache, q, step, params)
        self.counts.append(Wrapper.plans)
        assert torch.equal(found, again)
        self._held.attend(cache, q, step, replace(params, scale=0.5))
        self.counts.append(Wrapper.plans)
        found = self._held.attend(cache, q, replace(step), params)
        self.counts.append(Wrapper.plans)
        return found


def test_a_step_is_planned_once_for_all_layers_of_a_kind_and_anew_for_another_step() -> None:
    layers = Layers(FlashInferBackend(ReferenceBackend()))
    assert run_trial(layers, Trial(need(), STEPS["beside few"]), CPU).wrong is None
    assert layers.counts == [1, 1, 2, 3]
