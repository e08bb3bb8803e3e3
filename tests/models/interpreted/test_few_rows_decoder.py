"""The forward with products for few tokens gives the fused forward's logits, whatever a step holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.attention.reference.backend import backend
from kvant.models.fused.decoder import fuse
from kvant.models.fused.few_rows_decoder import FewRowsDecoder
from kvant.models.modules.info import INFO as MODULES
from tests.attention import driver
from tests.models import loading, tiny


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests of the engine compare on a GPU")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_logits_and_hidden_states_are_those_of_the_fused_forward(
    tokens: int, family: str, tmp_path: Path
) -> None:
    path = tiny.build(family, tmp_path, num_hidden_layers=4, vocab_size=tiny.VOCAB)
    geometry = tiny.geometry(family)
    model = loading.load(path, driver.plan(geometry.layers), geometry, only=MODULES)
    fused = fuse(model._module, model.plan)
    few = FewRowsDecoder(fused)
    text = [3 + i % 90 for i in range(tokens)]
    found = []
    with torch.no_grad():
        for forward in (fused, few):
            made = driver.Driver(driver.pool(model.plan, 8), backend())
            ids, call, last = made.call([(driver.Text(text), tokens)])
            found.append(forward.run(ids, call, last, [1, 3]))
    (expected, taps), (logits, others) = found
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(others, taps, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
