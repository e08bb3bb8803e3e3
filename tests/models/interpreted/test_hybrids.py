"""Tiny hybrids through the kernels of recurrent layers give the tokens of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvant.kv.state_pool import StateCache
from kvant.models.recurrent import conv, mixers, scan
from tests.models import families

pytest.importorskip("triton")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")]
PROMPTS = ([3, 17, 5, 90, 41], [7], [(7 * i) % 97 + 3 for i in range(80)])


@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba", "lfm2", "kimi_linear", "falcon_h1"])
def test_a_family_through_its_kernels(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes(_: torch.Tensor, cache: StateCache) -> bool:
        return cache.spec.choice.dtype.format.is_native

    for module in (conv, mixers, scan):
        monkeypatch.setattr(module, "takes_kernels", takes)
    monkeypatch.setattr(families, "PROMPTS", PROMPTS)
    monkeypatch.setattr(families, "NUM_TOKENS", 6)
    monkeypatch.setattr(families, "ALL_EQUAL", (18, 18))
    found = families.compare(name, tmp_path / "model")
    assert found.why is None
