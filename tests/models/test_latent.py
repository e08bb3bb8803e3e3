"""Latent attention over stored latents of every format, against transformers over the same rounded ones."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvant.attention.reference.backend import backend
from kvant.errors import NotServable
from kvant.kv.codecs import codec_for
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.geometry import Attention, ModelGeometry
from kvant.models.forward_info import ForwardFacts
from kvant.models.geometry import read_geometry
from kvant.models.loaded import LoadedModel
from kvant.models.quantization import Quantization
from kvant.models.select import select_forward
from tests.attention import driver
from tests.models import families, loading

PROMPT = families.PROMPTS[-1]
# In PROMPT, one latent is so near a tie of two fp8_e4m3 codes that another order of sums picks the other.
WITHOUT_TIES = families.PROMPTS[2]
FORMATS = [
    KVDtype.FLOAT16, KVDtype.BFLOAT16, KVDtype.FP8_E4M3, KVDtype.FP8_E5M2,
    KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.INT8_PER_TOKEN_HEAD,
]  # fmt: skip
SCALE = 0.02


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("latent") / "model"
    families.build("deepseek_v3", made)
    return made


class RoundedLatents(DynamicCache):
    """transformers' cache of latents, which stores every token's row in a format of Kvant."""

    def __init__(self, dtype: KVDtype) -> None:
        super().__init__()
        self.dtype = dtype

    def update(self, latent: Tensor, rotary: Tensor, layer: int, *rest: Any, **_: Any) -> Any:
        rows = torch.cat([latent, rotary], -1).transpose(1, 2)  # [1, T, 1, L + R]
        codec = codec_for(self.dtype)
        scale = torch.tensor([SCALE]) if self.dtype.format.takes_outside_scale else None
        planes = codec.encode(rows, scale)
        rows = codec.decode(planes, scale, rows.dtype).transpose(1, 2)
        return super().update(*rows.split([latent.shape[-1], rotary.shape[-1]], -1), layer)


@cache
def geometry(path: Path) -> ModelGeometry:
    return read_geometry(json.loads((path / "config.json").read_text()))


def load(path: Path, dtype: KVDtype, **options: Any) -> LoadedModel:
    found = geometry(path)
    plan = driver.plan(
        found.layers, dtype, compute=ComputeDtype.FLOAT64, fixed_scale=SCALE, page_size=4
    )
    return loading.load(path, plan, found, **options)


def logits(model: LoadedModel, chunk: int, prompt: list[int] = PROMPT) -> Tensor:
    """Return the logits of every token of the prompt, read `chunk` tokens at a time."""
    made = driver.Driver(driver.pool(model.plan, 20), backend())
    text, found = driver.Text(list(prompt)), []
    while text.stored < len(prompt):
        ids, call, _ = made.call([(text, min(chunk, len(prompt) - text.stored))])
        found.append(model.forward(ids, call, torch.arange(len(ids))))
    return torch.cat(found)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_logits_are_those_of_transformers_over_the_stored_latents(
    path: Path, dtype: KVDtype
) -> None:
    theirs = families.eager(path).double()
    theirs.set_experts_implementation("eager")
    with torch.no_grad():
        expected = theirs(
            torch.tensor([WITHOUT_TIES]), past_key_values=RoundedLatents(dtype), use_cache=True
        ).logits[0]
        plain = theirs(torch.tensor([WITHOUT_TIES])).logits[0]
    model = load(path, dtype)
    assert model.choice.name == "fused"
    for chunk in (1000, 7, 1):
        assert families._error(logits(model, chunk, WITHOUT_TIES), expected) < 1e-5
    assert families._error(plain, expected) > 1e-4  # rounding is there


def test_a_plan_stores_one_row_of_latent_and_rotary_key(path: Path) -> None:
    layer = geometry(path).layers[0]
    assert layer.attention is Attention.MLA
    assert (layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v) == (1, 24, 16)
    plan = driver.plan(geometry(path).layers, KVDtype.FP8_PER_TOKEN_HEAD)
    assert plan.bytes_per_token == 4 * (24 + 4)


def test_batch_invariant_logits_do_not_depend_on_the_batch(path: Path) -> None:
    found = geometry(path)
    plan = driver.plan(found.layers, KVDtype.INT8_PER_TOKEN_HEAD)
    model = loading.load(path, plan, found, batch_invariant=True)
    invariant = backend(batch_invariant=True)
    alone = driver.greedy(model, driver.pool(plan, 60), invariant, [PROMPT], 12, chunk=1000)
    together = driver.greedy(model, driver.pool(plan, 60), invariant, families.PROMPTS, 12, chunk=5)
    assert together[-1] == alone[0]


def test_what_no_forward_runs_is_refused_with_every_reason(path: Path) -> None:
    with pytest.raises(NotServable, match="is not available") as refused:
        load(path, KVDtype.FLOAT32, quantization=Quantization.INT8)
    assert "transformers' modules expand latents" in str(refused.value)
    assert "run without --quantization" in str(refused.value)


def test_codes_that_stay_quantised_are_refused_by_name(path: Path) -> None:
    config = {**json.loads((path / "config.json").read_text())}
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    facts = ForwardFacts(config, geometry(path), ComputeDtype.BFLOAT16, loading.CPU_FACTS)
    with pytest.raises(NotServable, match="bitsandbytes") as refused:
        select_forward(facts)
    assert "batch-invariant" not in str(refused.value)
