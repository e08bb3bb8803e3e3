"""Load a model as the engine does: the forward is chosen from the facts, then made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.kv.geometry import ModelGeometry
from kvant.kv.spec import KVPlan
from kvant.models.forward_info import ForwardFacts, ForwardInfo
from kvant.models.geometry.compute_dtype import host_cpu_has_avx2, host_cpu_has_bf16
from kvant.models.load import load_model
from kvant.models.loaded import LoadedModel
from kvant.models.quantization import Quantization
from kvant.models.select import choose, select_forward

CPU = torch.device("cpu")
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
