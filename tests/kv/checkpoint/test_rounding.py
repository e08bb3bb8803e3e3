"""Rounding matrices of a checkpoint: found, audited, read, and refused with a way out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.audit import audit
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.kv.checkpoint.rounding import FILE_NAME, find_rounding
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.format import Side
from kvant.kv.geometry import Attention, LayerGeometry
from kvant.kv.names import parse_format, parse_one, whole_formats
from kvant.kv.spec import Choice, KVPlan, LayerSpec, Role, Scale, ScaleState, Source
from kvant.models.key_rounding import read_rounding

FED, PLAIN = KVDtype.INT4_FEEDBACK, KVDtype.INT4_PER_TOKEN_HEAD
NAME = "model.layers.0.self_attn"
LAYER = LayerGeometry(0, NAME, Attention.FULL, 4, 2, 16, 16)


def write(directory: Path, matrices: np.ndarray, name: str = f"{NAME}.k_feedback") -> CheckpointKV:
    save_file({name: matrices}, directory / FILE_NAME)
    return CheckpointKV(checked=True, rounding=find_rounding(directory))


def matrices(heads: int = 2, size: int = 16) -> np.ndarray:
    values = np.random.default_rng(0).normal(size=(heads, size, size))
    return np.triu(values, 1).astype(np.float32)


def audited(
    checkpoint: CheckpointKV,
    side: Side = Side.K,
    layer: LayerGeometry = LAYER,
    dtype: KVDtype = FED,
) -> Scale:
    return audit(layer, side, dtype, None, checkpoint, explicit=True, missing_scales_as_one=False)


def plan_with(scale: Scale) -> KVPlan:
    k = Choice(FED, Source.EXPLICIT, "", (), scale)
    v = Choice(PLAIN, Source.EXPLICIT, "", (), Scale(ScaleState.NONE))
    spec = LayerSpec(LAYER, k, v, "cpu")
    return KVPlan(Role.TARGET, "m", ComputeDtype.FLOAT32, "", 16, (spec,))


def test_matrices_of_a_checkpoint_are_used(tmp_path: Path) -> None:
    wanted = matrices()
    scale = audited(write(tmp_path, wanted))
    assert scale.state is ScaleState.FOUND
    found = read_rounding(tmp_path, plan_with(scale))
    assert (found[0] == wanted).all()
    other_prefix = "model.language_model.layers.0.self_attn.k_feedback"
    assert audited(write(tmp_path, wanted, other_prefix)).state is ScaleState.FOUND


def test_without_matrices_the_message_names_the_command_that_makes_them() -> None:
    with pytest.raises(BadCheckpoint, match="needs the rounding matrices of layer 0") as caught:
        audited(CheckpointKV(checked=True))
    assert caught.value.ways_out[0].arguments[:2] == ("kvant", "calibrate")


@pytest.mark.parametrize(
    ("fed", "plain"),
    [(FED, PLAIN), (KVDtype.INT4_SHORT_FEEDBACK, KVDtype.INT4_SHORT)],
)
def test_the_format_without_matrices_has_the_same_bytes(fed: KVDtype, plain: KVDtype) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        audited(CheckpointKV(checked=True), dtype=fed)
    assert parse_one(caught.value.ways_out[1].arguments[1], asked_by="test") is plain
    assert fed.format.row_bytes(64) == plain.format.row_bytes(64)


def test_values_are_not_rounded_by_queries(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="asked for values of layer 0") as caught:
        audited(write(tmp_path, matrices()), Side.V)
    asked = caught.value.ways_out[0].arguments[1]
    wanted = parse_format(asked, asked_by="test")
    assert (wanted.k, wanted.v) == (FED, PLAIN)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="cannot be used") as caught:
        audited(write(tmp_path, matrices(heads=3)))
    assert "F32 [3, 16, 16], not F32 [2, 16, 16]" in caught.value.why


@pytest.mark.parametrize(("row", "column", "value"), [(1, 2, np.nan), (2, 1, 0.5), (3, 3, 1.0)])
def test_numbers_that_are_no_rounding_matrix_are_refused(
    tmp_path: Path, row: int, column: int, value: float
) -> None:
    broken = matrices()
    broken[1, row, column] = value
    scale = audited(write(tmp_path, broken))
    with pytest.raises(BadCheckpoint, match="is no rounding matrix"):
        read_rounding(tmp_path, plan_with(scale))


def test_a_file_that_changed_since_the_plan_is_refused(tmp_path: Path) -> None:
    plan = plan_with(audited(write(tmp_path, matrices())))
    write(tmp_path, matrices(heads=1))
    with pytest.raises(BadCheckpoint, match="changed"):
        read_rounding(tmp_path, plan)


def test_one_name_asks_for_the_pair_and_for_keys_alone() -> None:
    both = parse_format("int4_feedback", asked_by="test")
    assert (both.k, both.v) == (FED, PLAIN)
    assert parse_one("int4_feedback", asked_by="test") is FED
    names = [str(one) for one in whole_formats()]
    assert "int4_per_token_head" in names
    assert not [name for name in names if "feedback" in name], "few checkpoints have matrices"
