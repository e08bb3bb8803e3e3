"""Rotary frequencies are fixed for the longest sequence served, whatever a batch holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvant.attention.reference.backend import backend
from kvant.models.loaded import LoadedModel
from tests.attention import driver
from tests.models import loading, tiny
from tests.models.test_load import eager

ORIGINAL, LONGEST = 32, 128
LONG_ROPE: dict[str, Any] = {
    "max_position_embeddings": LONGEST,
    "original_max_position_embeddings": ORIGINAL,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0] * 48,
        "long_factor": [1.0 + 0.1 * i for i in range(48)],
    },
}
DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": ORIGINAL,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}
CASES = pytest.mark.parametrize(
    ("name", "rope"), [("phi3", LONG_ROPE), ("llama", DYNAMIC)], ids=["longrope", "dynamic"]
)


def load(name: str, rope: dict[str, Any], directory: Path, max_model_len: int) -> LoadedModel:
    path = tiny.build(name, directory, **rope)
    geometry = tiny.geometry(name, **rope)
    return loading.load(
        path,
        driver.plan(geometry.layers),
        geometry,
        max_model_len=max_model_len,
    )


def logits_of(model: LoadedModel, *texts: list[int]) -> torch.Tensor:
    """Logits after the last token of each text, all in one step."""
    made = driver.Driver(driver.pool(model.plan, 40), backend())
    ids, call, last = made.call([(driver.Text(text), len(text)) for text in texts])
    return model.forward(ids, call, last)


@CASES
def test_a_long_neighbour_does_not_change_a_short_text(
    name: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    model = load(name, rope, tmp_path, LONGEST)
    short, long = [3, 17, 5, 90], [7] * 100
    alone = logits_of(model, short)[0]
    torch.testing.assert_close(logits_of(model, short, long)[0], alone, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits_of(model, short)[0], alone, atol=0, rtol=0)


@CASES
def test_at_the_longest_length_served_the_logits_are_those_of_transformers(
    name: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    """100 tokens is beyond the original positions; served lengths end there."""
    text = [3 + i % 90 for i in range(100)]
    model = load(name, rope, tmp_path, len(text))
    with torch.no_grad():
        expected = eager(tmp_path / name, torch.float32)(torch.tensor([text])).logits[0, -1]
    torch.testing.assert_close(logits_of(model, text)[0], expected, atol=1e-3, rtol=1e-3)


@CASES
def test_served_within_the_original_length_the_logits_are_those_of_transformers(
    name: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    text = [3, 17, 5, 90, 41]
    model = load(name, rope, tmp_path, ORIGINAL)
    with torch.no_grad():
        expected = eager(tmp_path / name, torch.float32)(torch.tensor([text])).logits[0, -1]
    torch.testing.assert_close(logits_of(model, text)[0], expected, atol=1e-3, rtol=1e-3)
