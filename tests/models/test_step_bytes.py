"""The bytes of weights that a step reads, for every storage of experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvant import LLM
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.measure.own_engine import runner_of
from kvant.models.forward_info import ForwardInfo
from kvant.models.fused.info import INFO as FUSED
from kvant.models.loaded import LoadedModel
from kvant.models.modules.info import INFO as MODULES
from kvant.models.quantization import Quantization
from tests.attention import driver
from tests.models import families, loading, tiny
from tests.models.test_narrow_experts import FAMILIES, load_stored
from tests.models.tiny_narrow_experts import build, build_mxfp4

EVERY = 100_000
"""Tokens that use every expert."""


def _rounded(
    path: Path, only: ForwardInfo, family: str, to: Quantization | None, compute: ComputeDtype
) -> LoadedModel:
    made = tiny.build(family, path, **FAMILIES[family])
    geometry = tiny.geometry(family, **FAMILIES[family])
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=compute)
    return loading.load(made, plan, geometry, quantization=to, only=only)


def _stored(path: Path, only: ForwardInfo, dialect: str) -> LoadedModel:
    return load_stored(build(path, dialect)[0], "qwen3_moe", only)


def _mxfp4(path: Path, only: ForwardInfo) -> LoadedModel:
    return load_stored(build_mxfp4(path)[0], "gpt_oss", only)


WIDE, HALF = ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16
STORAGES: dict[str, Callable[[Path, ForwardInfo], LoadedModel]] = {
    **{f"{f} 32 bit": partial(_rounded, family=f, to=None, compute=WIDE) for f in FAMILIES},
    **{f"{f} 16 bit": partial(_rounded, family=f, to=None, compute=HALF) for f in FAMILIES},
    **{
        f"{family} to {to.value}": partial(_rounded, family=family, to=to, compute=WIDE)
        for family in FAMILIES
        for to in (Quantization.FP8, Quantization.INT4)
    },
    **{d: partial(_stored, dialect=d) for d in ("fp8 block", "ct fp8 tensor", "ct int4", "gptq")},
    "mxfp4": _mxfp4,
}


@pytest.mark.parametrize("only", [MODULES, FUSED], ids=lambda info: info.name)
@pytest.mark.parametrize("storage", STORAGES)
def test_a_step_reads_the_experts_that_its_tokens_are_expected_to_choose(
    storage: str, only: ForwardInfo, tmp_path: Path
) -> None:
    model = STORAGES[storage](tmp_path, only)
    (file,) = tmp_path.rglob("config.json")
    config = json.loads(file.read_text())
    count = config.get("num_local_experts") or config["num_experts"]
    chosen = config["num_experts_per_tok"]
    assert chosen < count
    named = dict(model._module.named_parameters())
    experts = sum(tensor.nbytes for name, tensor in named.items() if ".experts." in name)
    for tokens in (1, 2, 32):
        unread = experts * (1 - chosen / count) ** tokens
        found = model.weight_bytes_of_step(EVERY) - model.weight_bytes_of_step(tokens)
        assert found == pytest.approx(unread, abs=1)
    tied = "lm_head.weight" not in named
    held = model.num_weight_bytes - (0 if tied else named["model.embed_tokens.weight"].nbytes)
    assert model.weight_bytes_of_step(EVERY) == held


def test_an_expert_of_all_tokens_is_read_in_every_step(tmp_path: Path) -> None:
    families.build("qwen2_moe", tmp_path)
    llm = LLM(tmp_path, max_model_len=48, kv_cache_memory="2MB", device="cpu")
    model = runner_of(llm).model
    config = json.loads((tmp_path / "config.json").read_text())
    chosen = config["num_experts_per_tok"]
    count = config.get("num_experts") or config["num_local_experts"]
    named = dict(model._module.named_parameters())
    assert any(".shared_expert." in name for name in named)
    experts = sum(tensor.nbytes for name, tensor in named.items() if ".experts." in name)
    found = model.weight_bytes_of_step(EVERY) - model.weight_bytes_of_step(1)
    assert found == pytest.approx(experts * (1 - chosen / count), abs=1)
