"""The forward with products for few tokens gives the fused forward's logits, whatever a step holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.attention.reference.backend import backend
from kvant.models.fused.decoder import fuse
from kvant.models.fused.few_rows_decoder import FewRowsDecoder
from kvant.models.geometry import read_geometry
from kvant.models.modules.info import INFO as MODULES
from kvant.models.recurrent import delta_layer, mixers
from tests.attention import driver
from tests.models import families, loading, tiny


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests of the engine compare on a GPU")
def test_a_hybrid_decodes_as_its_fused_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = families.build("qwen3_5_text", tmp_path)
    geometry = read_geometry(config)
    model = loading.load(tmp_path, driver.plan(geometry.layers), geometry, only=MODULES)
    fused = fuse(model._module, model.plan)
    few = FewRowsDecoder(fused)
    assert few._folds
    launched: list[int] = []
    run = delta_layer.delta_layer

    def watched(*given: Any, **options: Any) -> torch.Tensor:
        launched.append(len(given[0]))
        return run(*given, **options)

    found: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        for place, forward in enumerate((fused, few)):
            if place:
                monkeypatch.setattr(delta_layer, "delta_layer", watched)
                monkeypatch.setattr(mixers, "takes_kernels", lambda x, cache: True)
            made = driver.Driver(driver.pool(model.plan, 20), backend())
            texts = [driver.Text([3 + (n * i) % 90 for i in range(n + 6)]) for n in (9, 2, 30)]
            lengths = [
                [(text, len(text.tokens) - 5) for text in texts],
                *[[(t, 1) for t in texts]] * 3,
            ]
            for work in (*lengths, [(texts[1], 1)]):
                ids, call, last = made.call(work)
                runs = forward if max(n for _, n in work) == 1 else fused
                found[place].append(runs.run(ids, call, last, [1, 2])[0])
    linear = sum(bool(layer.states) for layer in geometry.layers)
    assert launched == [3] * 3 * linear + [1] * linear
    for logits, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
