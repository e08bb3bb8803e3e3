"""Rotary frequencies are fixed by the plan, for any batch and any number of pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvant import LLM, SamplingParams
from kvant.attention.reference.backend import backend
from kvant.errors import BadCheckpoint, NotServable
from kvant.models.fused.decoder import AngleSource
from kvant.models.fused.recipe import Angles
from kvant.models.geometry import fix_rotary, read_geometry
from kvant.models.geometry.rope import ROPE_TYPES
from kvant.models.loaded import LoadedModel
from tests.attention import driver
from tests.models import configs, loading, tiny
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


def load(name: str, rope: dict[str, Any], directory: Path, rotary_length: int) -> LoadedModel:
    path = tiny.build(name, directory, **rope)
    geometry = tiny.geometry(name, **rope)
    plan = driver.plan(geometry.layers)
    return loading.load(path, plan, geometry, rotary_length=rotary_length)


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


def greedy(path: Path, text: list[int], **options: Any) -> tuple[LLM, list[int]]:
    llm = LLM(path, dtype="float32", **options)
    found = llm.generate([text], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    return llm, list(found[0].token_ids)


def expected_greedy(path: Path, text: list[int]) -> list[int]:
    model = eager(path, torch.float32)
    model.generation_config.eos_token_id = None
    made = model.generate(torch.tensor([text]), do_sample=False, max_new_tokens=8)
    return [int(token) for token in made[0, len(text) :]]


@CASES
def test_the_size_of_the_pool_changes_no_answer(
    name: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    """The texts are shorter than the original length, where transformers moves nothing."""
    path = tiny.build(name, tmp_path, **rope)
    text = [3 + i % 90 for i in range(20)]
    expected = expected_greedy(path, text)
    for size in ("512KiB", "64MiB"):
        llm, found = greedy(path, text, kv_cache_memory=size)
        assert found == expected
        assert llm.planned.rotary is not None
        assert llm.planned.rotary.length == ORIGINAL
        assert llm.planned.rotary.because in llm.planned.warnings


@CASES
def test_asking_for_longer_sequences_fixes_the_frequencies_of_that_length(
    name: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny.build(name, tmp_path, **rope)
    text = [3 + i % 90 for i in range(100)]
    llm, found = greedy(path, text, max_model_len=108)
    assert llm.planned.rotary_length == 108
    model = eager(path, torch.float32)
    with torch.no_grad():
        assert found[0] == int(model(torch.tensor([text])).logits[0, -1].argmax())
    other, _ = greedy(path, text, max_model_len=108, kv_cache_memory="64MiB")
    assert other.planned.rotary == llm.planned.rotary


def test_an_unknown_rotary_type_is_refused_in_the_plan_by_name() -> None:
    config = {**configs.tiny("llama"), "rope_scaling": {"rope_type": "spiral", "factor": 2.0}}
    with pytest.raises(BadCheckpoint, match=r"rope_scaling\.rope_type is 'spiral'"):
        read_geometry(config)


@pytest.mark.parametrize(
    ("rope", "agrees"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}, True),
        ({"rope_type": "yarn", "factor": 4}, True),
        ({"type": "yarn", "factor": 4.0}, True),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}, False),
        ({"rope_type": "yarn", "factor": 2.0}, False),
        ({"rope_type": "linear", "factor": 4.0}, False),
    ],
)
def test_both_names_of_a_rotary_section_may_say_the_same(
    rope: dict[str, Any], agrees: bool
) -> None:
    given = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    config = {**configs.tiny("llama"), "rope_theta": 10000.0, "rope_parameters": given}
    config["rope_scaling"] = rope
    if agrees:
        read_geometry(config)
        return
    with pytest.raises(BadCheckpoint, match="rope_parameters is its newer name"):
        read_geometry(config)


@pytest.mark.parametrize("original", [ORIGINAL // 2, 8 * ORIGINAL])
def test_the_original_length_of_dynamic_frequencies_is_max_position_embeddings(
    original: int,
) -> None:
    """transformers reads original_max_position_embeddings for other types only."""
    rope = {**DYNAMIC["rope_parameters"], "original_max_position_embeddings": original}
    config = configs.tiny("llama") | DYNAMIC | {"rope_parameters": rope}
    geometry, moving = fix_rotary(config, read_geometry(config), None)
    assert moving is not None
    assert (moving.original, moving.length, geometry.max_model_len) == (ORIGINAL,) * 3


@pytest.mark.parametrize("kinds", [("full_attention", "sliding_attention"), ("full_attention",)])
def test_several_moving_types_are_refused_in_the_plan(kinds: tuple[str, ...]) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    config = {**configs.tiny("gemma3_text"), "rope_parameters": dict.fromkeys(kinds, rope)}
    with pytest.raises(NotServable, match="several kinds"):
        fix_rotary(config, read_geometry(config), None)


def test_the_known_types_are_those_of_transformers() -> None:
    assert set(ROPE_TYPES) == {"default", *ROPE_INIT_FUNCTIONS}


class _Transposed(torch.nn.Module):
    """Angles as transformers 5.17 computes those of gpt-oss: views of a transposed product."""

    rope_type, config = "default", None

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = 0.5 ** torch.arange(4, dtype=torch.float32)
        angles = (frequencies[None, :, None] @ positions[:, None].float()).transpose(1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@pytest.mark.parametrize("layout", [Angles.ONCE, Angles.TWICE, Angles.NEIGHBOURS])
def test_angles_are_contiguous_as_the_kernels_read_them(layout: Angles) -> None:
    source, positions = AngleSource(_Transposed(), (), layout), torch.arange(6)
    given, _ = source.rotary(torch.zeros(1), positions[None])
    assert not given[0].is_contiguous()
    for found in source.angles(torch.zeros(6, 8), positions):
        assert found.is_contiguous()
        assert found.shape == (6, 4 if layout is Angles.ONCE else 2)
