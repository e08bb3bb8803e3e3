"""What passes between a transformers attention layer and a backend, and what the hook refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvant.attention.base import AttentionParams, Step, StepCall
from kvant.attention.hook import ATTENTION_NAME, attend_through_pages, register
from kvant.errors import EngineFault
from kvant.kv.geometry import Attention, LayerGeometry
from kvant.kv.pool import LayerCache
from tests.attention import driver


class StrangeAttention(nn.Module):
    """Stands for a layer of a model; the hook needs its index and names its class."""

    def __init__(self, layer_idx: object = 0) -> None:
        super().__init__()
        self.layer_idx = layer_idx


class Notebook:
    """A backend that writes down what it is asked."""

    name = "notebook"

    def __init__(self) -> None:
        self.written: list[tuple[LayerCache, Tensor, Tensor]] = []
        self.asked: list[tuple[LayerCache, Tensor, AttentionParams]] = []

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None:
        self.written.append((cache, k, v))

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        self.asked.append((cache, q, params))
        return q[:, :, : cache.spec.geometry.head_dim_v] * 2


def call_of(*layers: LayerGeometry, notebook: Notebook | None = None) -> StepCall:
    pool = driver.pool(driver.plan(layers), 3)
    backend = notebook or Notebook()
    return StepCall(driver.step([[1]], [3], [3]), pool, (backend,) * len(layers))


def attend(module: nn.Module, call: StepCall | None, **changes: Any) -> Tensor:
    """Call the hook as a Llama-like layer with 4 query heads, 2 KV heads and head size 32 would."""
    arguments: dict[str, Any] = {
        "query": torch.arange(4 * 3 * 32.0).view(1, 4, 3, 32),
        "key": torch.ones(1, 2, 3, 32),
        "value": torch.zeros(1, 2, 3, 32),
        "attention_mask": None,
        "scaling": 0.5,
        "dropout": 0.0,
        "kvant": call,
        **changes,
    }
    return attend_through_pages(module, **arguments)[0]


def test_the_backend_gets_packed_rows_and_its_answer_goes_back_in_transformers_layout() -> None:
    notebook = Notebook()
    found = attend(StrangeAttention(), call_of(driver.layer(), notebook=notebook))
    ((_, k, v),), ((_, q, params),) = notebook.written, notebook.asked
    assert k.shape == v.shape == (3, 2, 32)
    assert torch.equal(q, torch.arange(4 * 3 * 32.0).view(4, 3, 32).transpose(0, 1))
    assert torch.equal(found, q[None] * 2)
    assert params == AttentionParams(scale=0.5)


def test_a_layer_may_leave_its_scale_to_the_head_size() -> None:
    notebook = Notebook()
    attend(StrangeAttention(), call_of(driver.layer(), notebook=notebook), scaling=None)
    assert notebook.asked[0][2].scale == 32**-0.5


def test_window_soft_cap_and_sinks_arrive() -> None:
    notebook, sinks = Notebook(), torch.ones(4)
    layer = driver.layer(window=7, softcap=3.0, sinks=True)
    attend(
        StrangeAttention(),
        call_of(layer, notebook=notebook),
        sliding_window=7,
        softcap=3.0,
        s_aux=sinks,
    )
    assert notebook.asked[0][2] == AttentionParams(0.5, 7, 3.0, sinks)


def test_a_sharing_layer_reads_its_owners_pages_and_writes_nothing() -> None:
    notebook = Notebook()
    owner = driver.layer(index=0)
    sharing = dataclasses.replace(driver.layer(index=1), attention=Attention.SHARED, shared_with=0)
    call = call_of(owner, sharing, notebook=notebook)
    attend(StrangeAttention(1), call)
    assert notebook.written == []
    assert notebook.asked[0][0] is call.pool[0]


@pytest.mark.parametrize(
    "passed",
    [
        {"position_ids": torch.zeros(1, 3)},
        {"use_cache": False},
        {"output_attentions": None},
        {"output_router_logits": False},
        {"labels": None},
        {"is_causal": True},
        {"softcap": None},
        {"sliding_window": None},
        {"s_aux": None},
        {"mm_token_type_ids": None},
    ],
    ids=lambda passed: next(iter(passed)),
)
def test_keywords_that_ask_for_nothing_are_taken(passed: dict[str, Any]) -> None:
    attend(StrangeAttention(), call_of(driver.layer()), **passed)


@pytest.mark.parametrize(
    ("passed", "named"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "cu_seq_lens_q"),
        ({"use_cache": True}, "use_cache"),
        ({"output_attentions": True}, "output_attentions"),
        ({"labels": torch.zeros(1, 3)}, "labels"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "is_causal"),
        ({"sliding_window": 7}, "window 7"),
        ({"softcap": 3.0}, "soft cap 3.0"),
        ({"s_aux": torch.ones(4)}, "sinks"),
        ({"kvant": None}, "without a step"),
        ({"query": torch.ones(2, 4, 3, 32)}, r"queries of shape \(2, 4, 3, 32\)"),
        ({"query": torch.ones(1, 4, 2, 32)}, r"queries of .* \(1, 4, 3, 32\)"),
        ({"query": torch.ones(1, 4, 3, 16)}, "queries of shape"),
        ({"query": torch.ones(1, 6, 3, 32)}, "queries of shape"),
        ({"key": torch.ones(1, 4, 3, 32)}, "keys of shape"),
        ({"key": torch.ones(1, 2, 5, 32)}, "keys of .* step's 3 tokens"),
        ({"key": torch.ones(1, 2, 3, 64)}, "keys of shape"),
        ({"value": torch.ones(1, 2, 3, 16)}, "values of shape"),
        ({"value": torch.ones(1, 2, 5, 32)}, "values of shape"),
        ({"value": torch.ones(1, 1, 3, 32)}, "values of shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_hook_cannot_honour_is_a_fault_naming_it_and_the_layer(
    passed: dict[str, Any], named: str
) -> None:
    notebook = Notebook()
    with pytest.raises(EngineFault, match=f"StrangeAttention.*{named}"):
        attend(StrangeAttention(), call_of(driver.layer(), notebook=notebook), **passed)
    assert notebook.written == []


@pytest.mark.parametrize("planned", [{"window": 9}, {"softcap": 2.0}, {"sinks": True}])
def test_a_planned_window_soft_cap_or_sinks_that_the_layer_lacks_is_a_fault(
    planned: dict[str, Any],
) -> None:
    with pytest.raises(EngineFault, match="StrangeAttention"):
        attend(StrangeAttention(), call_of(driver.layer(**planned)))


def test_a_step_of_other_causality_than_planned_is_a_fault() -> None:
    call = call_of(driver.layer(causal=False))
    with pytest.raises(EngineFault, match="causal"):
        attend(StrangeAttention(), call)
    attend(
        StrangeAttention(),
        dataclasses.replace(call, step=dataclasses.replace(call.step, causal=False)),
    )


@pytest.mark.parametrize("index", [1, -1, None, "0"])
def test_a_layer_that_is_not_in_the_plan_is_a_fault(index: object) -> None:
    with pytest.raises(EngineFault, match="StrangeAttention"):
        attend(StrangeAttention(index), call_of(driver.layer()))


def test_a_layer_planned_without_attention_is_a_fault_when_it_attends() -> None:
    silent = dataclasses.replace(driver.layer(), attention=Attention.NONE)
    with pytest.raises(EngineFault, match="none"):
        attend(StrangeAttention(), call_of(silent))


def test_registering_twice_changes_nothing_and_registers_no_mask() -> None:
    register()
    register()
    assert ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] is attend_through_pages
    assert ATTENTION_NAME not in ALL_MASK_ATTENTION_FUNCTIONS
