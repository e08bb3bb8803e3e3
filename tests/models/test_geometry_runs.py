"""Families that geometry calls runnable beside those of test_load_families: greedy texts agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvant.attention.reference.backend import backend
from kvant.kv.dtype import KVDtype
from kvant.models.geometry import read_geometry
from kvant.models.quiet import quiet_transformers
from tests.attention import driver
from tests.models import configs, loading, meta
from tests.models.test_load_families import NUM_TOKENS, PROMPTS, generated_by_transformers

# As configs.tiny, with weights wide enough that greedy texts do not stand still.
_WIDE = {"initializer_range": 0.15}


def _wide(name: str) -> dict[str, Any]:
    config = {**configs.tiny(name), **_WIDE}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **_WIDE}
    return config


@pytest.mark.parametrize(
    "name", ["mixtral", "gemma3", "gemma4", "gemma4_unified", "gemma4_unified_text", "gemma4_text"]
)
def test_greedy_float32_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = meta.build(_wide(name), device="cpu")
    with torch.no_grad(), quiet_transformers():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path)
    geometry = read_geometry(json.loads((tmp_path / "config.json").read_text()))
    assert geometry.not_runnable is None
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32)
    loaded = loading.load(tmp_path, plan, geometry)
    pool = driver.pool(plan, 32)
    found = driver.greedy(loaded, pool, backend(), PROMPTS, NUM_TOKENS, chunk=7)
    assert found == generated_by_transformers(tmp_path)
    assert len({token for text in found for token in text}) > 8
