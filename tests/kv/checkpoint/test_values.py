"""Scale values at their offsets, and the audit of a whole plan as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.audit import audit
from kvant.kv.checkpoint.scales import LARGEST, SMALLEST, read_scale_values
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side
from kvant.kv.spec import KVPlan
from tests.kv.checkpoint.build import (
    NUM_KV_HEADS,
    Raw,
    bf16,
    f16,
    f32,
    layer,
    plan_of,
    safetensors_bytes,
    scales,
    weight,
    write,
)
from tests.kv.checkpoint.stored import read_checkpoint

FP8, FNUZ, NVFP4, BF16 = KVDtype.FP8_E4M3, KVDtype.FP8_E4M3FNUZ, KVDtype.NVFP4, KVDtype.BFLOAT16
K_NAME, V_NAME = "model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"


def planned(directory: Path, stored: Mapping[int, tuple[KVDtype, KVDtype]] | None = None) -> KVPlan:
    """Audit the checkpoint in `directory` for layers that explicitly store these formats."""
    checkpoint = read_checkpoint(directory)
    chosen = {}
    for index, formats in (stored or {0: (FP8, FP8)}).items():
        at = layer(index)
        chosen[at] = {
            side: (
                dtype,
                audit(
                    at, side, dtype, None, checkpoint, explicit=True, missing_scales_as_one=False
                ),
            )
            for side, dtype in zip(Side, formats, strict=True)
        }
    return plan_of(chosen)


def test_values_of_every_dtype_are_read_exactly_at_their_offsets(tmp_path: Path) -> None:
    heads = (0.25, 0.5, 1.0, 1.5)
    tensors = {
        "model.layers.0.mlp.up_proj.weight": weight(7),
        K_NAME: f32(0.1, shape=()),
        V_NAME: bf16(0.09375),
        "model.layers.1.self_attn.k_scale": f16(*heads),
        "model.layers.1.self_attn.v_scale": f32(*heads, shape=(NUM_KV_HEADS, 1, 1)),
        "lm_head.weight": weight(3),
    }
    write(tmp_path, tensors=tensors)
    plan = planned(tmp_path, {0: (FP8, FP8), 1: (FP8, FP8)})
    assert read_scale_values(tmp_path, plan) == {
        (0, Side.K): (pytest.approx(0.1, rel=1e-7),),
        (0, Side.V): (0.09375,),
        (1, Side.K): heads,
        (1, Side.V): heads,
    }


def test_one_kv_scale_is_read_for_both_sides(tmp_path: Path) -> None:
    write(tmp_path, tensors=scales(("kv_scale",), value=0.75))
    assert read_scale_values(tmp_path, planned(tmp_path)) == {
        (0, Side.K): (0.75,),
        (0, Side.V): (0.75,),
    }


@pytest.mark.case("A54")
def test_the_plans_factor_is_applied(tmp_path: Path) -> None:
    write(tmp_path, tensors=scales(value=0.75))
    plan = planned(tmp_path, {0: (FNUZ, FP8)})
    assert read_scale_values(tmp_path, plan) == {(0, Side.K): (1.5,), (0, Side.V): (0.75,)}


def test_inverse_global_scales_are_inverted(tmp_path: Path) -> None:
    write(tmp_path, tensors=scales(("k_global_scale", "v_global_scale"), value=128.0))
    plan = planned(tmp_path, {0: (NVFP4, NVFP4)})
    assert read_scale_values(tmp_path, plan) == {
        (0, Side.K): (1 / 128,),
        (0, Side.V): (1 / 128,),
    }


def test_only_scales_in_use_are_read(tmp_path: Path) -> None:
    """A broken value of an unused scale does not stop a start."""
    write(tmp_path, tensors={K_NAME: f32(math.nan), V_NAME: f32(1.0)})
    plan = planned(tmp_path, {0: (BF16, FP8)})
    assert read_scale_values(tmp_path, plan) == {(0, Side.V): (1.0,)}


def test_a_plan_without_found_scales_reads_no_file(tmp_path: Path) -> None:
    plan = planned(write(tmp_path, tensors={}))
    (tmp_path / "model.safetensors").unlink()
    assert read_scale_values(tmp_path, plan) == {}


BAD = (0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 2.0**-41, 2.0**41, 1e-40)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("make", [f32, bf16])
def test_a_value_that_is_no_scale_is_an_error_that_names_tensor_and_file(
    tmp_path: Path, value: float, make: Callable[..., Raw]
) -> None:
    write(tmp_path, tensors={K_NAME: make(value), V_NAME: f32(1.0)})
    with pytest.raises(BadCheckpoint) as refused:
        read_scale_values(tmp_path, planned(tmp_path))
    assert K_NAME in refused.value.what
    assert " at " not in refused.value.what
    assert str(tmp_path / "model.safetensors") in refused.value.what


@pytest.mark.parametrize("value", [SMALLEST, LARGEST])
def test_the_bounds_themselves_are_scales(tmp_path: Path, value: float) -> None:
    write(tmp_path, tensors={K_NAME: f32(value), V_NAME: f32(1.0)})
    assert read_scale_values(tmp_path, planned(tmp_path))[0, Side.K] == (value,)


def test_one_bad_head_among_good_ones_is_found(tmp_path: Path) -> None:
    write(tmp_path, tensors={K_NAME: f32(1.0, 1.0, 0.0, 1.0), V_NAME: f32(1.0)})
    with pytest.raises(BadCheckpoint, match=r"is 0\.0 at 2"):
        read_scale_values(tmp_path, planned(tmp_path))


@given(value=st.floats(width=32))
def test_what_is_read_is_a_scale_and_the_number_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, value: float
) -> None:
    directory = tmp_path_factory.getbasetemp() / "values"
    write(directory, tensors={K_NAME: f32(value), V_NAME: f32(1.0)})
    plan = planned(directory)
    try:
        read = read_scale_values(directory, plan)
    except BadCheckpoint:
        assert not SMALLEST <= value <= LARGEST
        return
    assert read[0, Side.K] == (value,)
    assert SMALLEST <= value <= LARGEST


def test_a_file_that_changed_after_planning_is_noticed(tmp_path: Path) -> None:
    plan = planned(write(tmp_path, tensors={K_NAME: f32(1.0), V_NAME: f32(1.0)}))
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(safetensors_bytes({K_NAME: bf16(1.0), V_NAME: f32(1.0)}))
    with pytest.raises(BadCheckpoint, match="changed"):
        read_scale_values(tmp_path, plan)
    shard.unlink()
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        read_scale_values(tmp_path, plan)


# -- the table -----------------------------------------------------------------------------------
