"""Layers of experts that make no sense are refused before a weight is read, by name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvant import LLM, SamplingParams
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint
from kvant.models.geometry.mixtures import refuse_lacking_experts
from kvant.models.read_shape import read_shape
from kvant.plan.plan import PlanRequest
from tests.models import families
from tests.models.configs import published
from tests.planned import plan_of


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "num_experts_per_tok is 129"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ("gpt-oss-20b", {"num_experts_per_tok": -1}, "num_experts_per_tok is -1"),
        ("deepseek-v3", {"n_group": 7}, "n_group is 7"),
        ("deepseek-v3", {"n_group": 0}, "n_group is 0"),
        ("deepseek-v3", {"topk_group": 9}, "topk_group is 9"),
    ],
)
def test_experts_that_cannot_be_chosen_are_named(
    name: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadCheckpoint, match=named) as refused:
        read_shape(published(name, **changes))
    assert refused.value.ways_out


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("olmoe", "num_experts_per_tok", 5),
        ("ernie4_5_moe", "moe_k", 0),
        ("hunyuan_v1_moe", "moe_topk", 9),
    ],
)
def test_a_probed_family_is_refused_before_it_is_probed(
    name: str, field: str, value: int, tmp_path: Path
) -> None:
    families.build(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {field: value}
    with pytest.raises(BadCheckpoint, match=f"{field} is {value}"):
        read_shape(config)


def test_a_window_of_no_token_is_refused_in_a_probed_family(tmp_path: Path) -> None:
    families.build("olmo3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"sliding_window": 0}
    with pytest.raises(BadCheckpoint, match="layer 0 has a window of 0 tokens"):
        read_shape(config)


@pytest.mark.parametrize("expert", [1, 3])
def test_a_checkpoint_that_lacks_an_expert_is_refused_by_its_name(
    tmp_path: Path, expert: int
) -> None:
    families.build("qwen3_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    lost = f"model.layers.1.mlp.experts.{expert}.up_proj"
    save_file(
        {name: tensor for name, tensor in load_file(file).items() if lost not in name}, file,
        {"format": "pt"},
    )  # fmt: skip
    with pytest.raises(BadCheckpoint, match=lost) as refused:
        LLM(str(tmp_path), device="cpu", kv_cache_memory="4MB", max_model_len=48)
    assert refused.value.ways_out


def test_experts_in_other_formats_and_experts_stored_together_lack_nothing() -> None:
    apart = [f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in (0, 2, 3)]
    apart += [f"model.layers.0.mlp.experts.1.up_proj.{part}" for part in ("weight_packed", "scale")]
    config = {"num_experts": 4, "num_experts_per_tok": 2}
    assert refuse_lacking_experts(config, apart, Path("m")) is None
    assert refuse_lacking_experts(config, apart[1:], Path("m")) is not None
    assert refuse_lacking_experts({}, apart[:1] + apart[3:4], Path("m")) is None
    together = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.gate.weight"]
    assert refuse_lacking_experts(config, together, Path("m")) is None


@contextmanager
def _empty_weights() -> Iterator[None]:
    """torch warns that a weight without a number is not initialised."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        yield


@pytest.mark.parametrize("are_stored", [True, False])
@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("deepseek_v2", "n_shared_experts"),
        ("deepseek_v3", "n_shared_experts"),
        ("dots1", "n_shared_experts"),
        ("qwen3_next", "shared_expert_intermediate_size"),
        ("qwen3_5_moe_text", "shared_expert_intermediate_size"),
    ],
)
def test_a_model_without_shared_experts_runs(
    family: str, field: str, are_stored: bool, tmp_path: Path
) -> None:
    with _empty_weights():
        families.build(family, tmp_path, **{field: 0})
    file = tmp_path / "model.safetensors"
    if not are_stored:
        held = {name: one for name, one in load_file(file).items() if one.numel()}
        save_file(held, file, metadata={"format": "pt"})
    planned = plan_of(PlanRequest(str(tmp_path), DeviceFacts(DeviceKind.CPU)))
    assert planned.can_run, planned.warnings
    assert planned.audit is not None
    assert planned.audit.unused == ()
    prompt, length = [5, 6, 7], 12
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    (found,) = LLM(tmp_path, kv_cache_memory="1MiB").generate([prompt], params)
    with _empty_weights():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=length, do_sample=False, eos_token_id=None
    )
    assert [*prompt, *found.token_ids] == expected[0].tolist()
