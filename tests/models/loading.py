"""Load a model as the engine does: the forward is chosen from the facts, then made; and run a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.attention.reference.backend import backend
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.geometry import ModelGeometry
from kvant.kv.spec import KVPlan
from kvant.models.forward_info import ForwardFacts, ForwardInfo
from kvant.models.geometry.compute_dtype import host_cpu_has_avx2, host_cpu_has_bf16
from kvant.models.load import load_model
from kvant.models.loaded import LoadedModel
from kvant.models.quantization import Quantization
from kvant.models.select import choose, select_forward
from kvant.models.sharding.divide import Group
from tests.attention import driver

CPU = torch.device("cpu")
GPU_FACTS = DeviceFacts(DeviceKind.CUDA, "sm_90")
CPU_FACTS = DeviceFacts(DeviceKind.CPU, has_bf16=host_cpu_has_bf16(), has_avx2=host_cpu_has_avx2())


def load(
    path: Path,
    plan: KVPlan,
    geometry: ModelGeometry,
    *,
    only: ForwardInfo | None = None,
    batch_invariant: bool = False,
    quantization: Quantization | None = None,
    **options: Any,
) -> LoadedModel:
    """The model on the CPU, through the forward that would be chosen, or through `only`."""
    file = path / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    facts = ForwardFacts(
        config, geometry, plan.compute_dtype, CPU_FACTS, quantization, batch_invariant
    )
    choice = select_forward(facts) if only is None else choose(only, facts)
    return load_model(path, plan, geometry, choice, device=CPU, **options)


def load_as_on_gpu(
    path: Path,
    geometry: ModelGeometry,
    only: ForwardInfo,
    *,
    is_narrow: bool = True,
    group: Group | None = None,
    quantization: Quantization | None = None,
    **options: Any,
) -> LoadedModel:
    """The model on this CPU, as a GPU would load it through `only`; products decode narrow weights then."""
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=ComputeDtype.FLOAT32)
    config = json.loads((path / "config.json").read_text())
    ranks = 1 if group is None else group.shard.size
    facts = ForwardFacts(
        config, geometry, ComputeDtype.BFLOAT16, GPU_FACTS, quantization, num_ranks=ranks
    )
    assert facts.has_narrow is is_narrow
    assert only.refuse(facts) is None
    return load_model(path, plan, geometry, choose(only, facts), device=CPU, group=group, **options)


def logits(model: LoadedModel, text: list[int]) -> Tensor:
    """Logits [tokens, vocabulary] of all of a text's tokens, in one step over the reference backend."""
    steps = driver.Driver(driver.pool(model.plan, 40), backend())
    ids, call, _ = steps.call([(driver.Text(text), len(text))])
    return model.forward(ids, call, torch.arange(len(text)))
