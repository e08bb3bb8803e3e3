"""Pages of one engine are never taken for those of another that computes something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.attention.triton.info import INFO as TRITON
from kvant.attention.triton_fp8.info import INFO as TRITON_FP8
from kvant.engine.build import cache_identity
from kvant.kv.pages import CacheIdentity
from kvant.plan.config import EngineConfig, LLMOptions, config_of
from tests.models import tiny
from tests.planned import plan_of


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama", tmp_path_factory.mktemp("model"))


def identity(path: Path, **options: object) -> CacheIdentity:
    config: EngineConfig = config_of(path, LLMOptions(**options))  # type: ignore[typeddict-item]
    return cache_identity(plan_of(config.plan))


@pytest.mark.parametrize(
    "other",
    [
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"dtype": "bfloat16", "kv_cache_dtype": "float32"},
        {"kv_cache_dtype": "int8_per_token_head"},
        {"kv_cache_rules": "0:fp8_e5m2"},
    ],
    ids=str,
)
def test_what_decides_the_stored_numbers_is_part_of_it(
    path: Path, other: dict[str, object]
) -> None:
    plain = {"dtype": "float32", "kv_cache_dtype": "float32"}
    assert identity(path, **plain) == identity(path, **plain)
    assert identity(path, **{**plain, **other}) != identity(path, **plain)


def test_a_backend_that_rounds_is_part_of_it_and_no_other_is(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path, head_dim=64)
    options = LLMOptions(dtype="bfloat16", kv_cache_dtype="fp8_e4m3")
    asked = replace(config_of(path, options).plan, device=DeviceFacts(DeviceKind.CUDA, "sm_90"))
    plain, named, rounding = (
        cache_identity(plan_of(replace(asked, backend=backend)))
        for backend in (None, TRITON, TRITON_FP8)
    )
    assert named == plain
    assert rounding != plain


def test_what_only_decides_when_it_is_computed_is_not(path: Path) -> None:
    plain = identity(path, dtype="float32")
    assert identity(path, dtype="float32", max_num_seqs=3, kv_cache_memory="1MiB") == plain
    assert replace(plain, revision="x") != plain
