"""The table of missing, partial and unfit scales: every row, for every format that takes scales."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.audit import audit
from kvant.kv.checkpoint.facts import CheckpointKV, KVWish, ScalePromise, UnreadableWish
from kvant.kv.checkpoint.lookup import wish_for
from kvant.kv.dtype import KVDtype
from kvant.kv.format import CheckpointScales, Side
from kvant.kv.nvfp4_scales import NVFP4_GLOBAL_K, NVFP4_GLOBAL_V
from kvant.kv.spec import Scale, ScaleState, ScaleTensor
from tests.kv.checkpoint.build import (
    FP8_SCHEME,
    NUM_KV_HEADS,
    Raw,
    bf16,
    compressed_tensors,
    f32,
    layer,
    modelopt_file,
    scales,
    write,
)
from tests.kv.checkpoint.stored import read_checkpoint

FP8, FNUZ, NVFP4 = KVDtype.FP8_E4M3, KVDtype.FP8_E4M3FNUZ, KVDtype.NVFP4
TAKERS = (FP8, FNUZ, NVFP4)
MAKERS = tuple(d for d in KVDtype if d.format.checkpoint_scales is CheckpointScales.NEVER)

FP8_DECLARED = compressed_tensors(FP8_SCHEME)
PER_HEAD = compressed_tensors({**FP8_SCHEME, "strategy": "attn_head"})
NVFP4_DECLARED = compressed_tensors(
    {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "dynamic": "local",
    }
)
INT8_DECLARED = compressed_tensors({"num_bits": 8, "type": "int"})
GLOBALS = ("k_global_scale", "v_global_scale")


def followed_scale(
    checkpoint: CheckpointKV,
    side: Side = Side.K,
    *,
    dtype: KVDtype | None = None,
    one: bool = False,
) -> Scale:
    """Layer 0's audit where the checkpoint's wish decided; dtype: the device's encoding of it."""
    wish = wish_for(checkpoint, layer(0))
    assert isinstance(wish, KVWish)
    stored = dtype or (wish.k if side is Side.K else wish.v)
    assert stored is not None
    return audit(
        layer(0), side, stored, wish, checkpoint, explicit=False, missing_scales_as_one=one
    )


def explicit_scale(
    checkpoint: CheckpointKV, dtype: KVDtype, side: Side = Side.K, *, one: bool = False
) -> Scale:
    return audit(layer(0), side, dtype, None, checkpoint, explicit=True, missing_scales_as_one=one)


@pytest.fixture
def fp8(tmp_path: Path) -> CheckpointKV:
    return read_checkpoint(write(tmp_path, FP8_DECLARED, tensors=scales()))


def with_scales(
    tmp_path: Path, declared: Any, tensors: Mapping[str, Raw], **more: Any
) -> CheckpointKV:
    return read_checkpoint(write(tmp_path, declared, tensors=tensors, **more))


# -- scales that are there -----------------------------------------------------------------------


@pytest.mark.case("A02")
@pytest.mark.parametrize("side", Side)
def test_a_followed_wish_uses_its_scales(fp8: CheckpointKV, side: Side) -> None:
    scale = followed_scale(fp8, side)
    assert scale.state is ScaleState.FOUND
    assert scale.factor == 1.0
    assert scale.tensor is not None
    assert scale.tensor.name == f"model.layers.0.self_attn.{side.value}_scale"
    assert scale.because == f"checkpoint's {scale.tensor.name}"


@pytest.mark.case("A03")
def test_explicit_fp8_uses_the_checkpoints_scales_all_the_same(fp8: CheckpointKV) -> None:
    assert explicit_scale(fp8, FP8) == followed_scale(fp8)


def test_explicit_fp8_uses_bare_scales_that_no_config_declares(tmp_path: Path) -> None:
    checkpoint = with_scales(tmp_path, {"quant_method": "fp8"}, scales(("kv_scale",)))
    for side in Side:
        assert explicit_scale(checkpoint, FP8, side).state is ScaleState.FOUND


@pytest.mark.case("A01", "A04")
@pytest.mark.parametrize("dtype", MAKERS)
@pytest.mark.parametrize("explicit", [True, False])
def test_formats_that_take_no_scales_leave_them_unused_and_say_so(
    fp8: CheckpointKV, dtype: KVDtype, explicit: bool
) -> None:
    scale = audit(
        layer(0), Side.K, dtype, None, fp8, explicit=explicit, missing_scales_as_one=False
    )
    assert scale.state is ScaleState.UNUSED
    assert scale.tensor is not None
    assert "present, unused" in scale.because
    assert dtype.format.name in scale.because
    assert ("explicit" in scale.because) is explicit


@pytest.mark.parametrize("dtype", MAKERS)
def test_formats_that_take_no_scales_miss_none(tmp_path: Path, dtype: KVDtype) -> None:
    for name, tensors in (("checked", {}), ("unchecked", None)):
        checkpoint = read_checkpoint(write(tmp_path / name, FP8_DECLARED, tensors=tensors))
        assert explicit_scale(checkpoint, dtype).state is ScaleState.NONE


@pytest.mark.case("A18")
def test_one_scale_per_head_is_kept_as_such(tmp_path: Path) -> None:
    tensors = {
        f"model.layers.0.self_attn.{side}_scale": f32(
            *[0.5] * NUM_KV_HEADS, shape=(NUM_KV_HEADS, 1, 1)
        )
        for side in "kv"
    }
    scale = followed_scale(with_scales(tmp_path, PER_HEAD, tensors))
    assert scale.state is ScaleState.FOUND
    assert scale.tensor is not None
    assert scale.tensor.numel == NUM_KV_HEADS


@pytest.mark.case("A54")
def test_e4m3fnuz_doubles_scales_that_were_meant_for_e4m3fn(fp8: CheckpointKV) -> None:
    for scale in (followed_scale(fp8, dtype=FNUZ), explicit_scale(fp8, FNUZ)):
        assert scale.state is ScaleState.FOUND
        assert scale.factor == 2.0
        assert "doubled" in scale.because


@pytest.mark.case("A54")
def test_e4m3fnuz_doubles_a_recipes_one_and_leaves_an_uncalibrated_one_alone(
    tmp_path: Path,
) -> None:
    cast = read_checkpoint(write(tmp_path / "cast", hf_quant=modelopt_file("FP8"), tensors={}))
    assert followed_scale(cast, dtype=FNUZ).fixed == 2.0
    assert followed_scale(cast).fixed == 1.0
    plain = read_checkpoint(write(tmp_path / "plain", tensors={}))
    assert explicit_scale(plain, FNUZ).fixed == 1.0


# -- nvfp4's global scales -----------------------------------------------------------------------


def test_compressed_tensors_global_scales_are_used_as_inverses(tmp_path: Path) -> None:
    scale = followed_scale(with_scales(tmp_path, NVFP4_DECLARED, scales(GLOBALS)))
    assert scale.state is ScaleState.FOUND
    assert scale.tensor is not None
    assert scale.tensor.inverse
    assert "1/scale" in scale.because


def test_modelopts_scales_are_used_as_they_are(tmp_path: Path) -> None:
    tensors = scales(("k_proj.k_scale", "v_proj.v_scale"))
    scale = followed_scale(with_scales(tmp_path, None, tensors, hf_quant=modelopt_file("NVFP4")))
    assert scale.state is ScaleState.FOUND
    assert scale.tensor is not None
    assert not scale.tensor.inverse


@pytest.mark.case("A12")
@pytest.mark.parametrize("dtype", [FP8, FNUZ])
def test_nvfp4_scales_are_dropped_openly_where_fp8_is_stored(
    tmp_path: Path, dtype: KVDtype
) -> None:
    modelopt = with_scales(tmp_path / "m", None, scales(), hf_quant=modelopt_file("NVFP4"))
    compressed = with_scales(tmp_path / "c", NVFP4_DECLARED, scales(GLOBALS))
    for checkpoint in (modelopt, compressed):
        scale = explicit_scale(checkpoint, dtype)
        assert scale.state is ScaleState.UNUSED
        assert scale.tensor is not None
        assert scale.fixed == 1.0
        assert "calibrated for nvfp4" in scale.because


def test_fp8_scales_are_dropped_openly_where_nvfp4_is_stored(fp8: CheckpointKV) -> None:
    for side, fixed in ((Side.K, NVFP4_GLOBAL_K), (Side.V, NVFP4_GLOBAL_V)):
        scale = explicit_scale(fp8, NVFP4, side)
        assert scale.state is ScaleState.UNUSED
        assert scale.fixed == fixed
        assert "calibrated for fp8_e4m3" in scale.because


def test_scales_of_an_unreadable_format_are_not_guessed_at(tmp_path: Path) -> None:
    checkpoint = with_scales(tmp_path, INT8_DECLARED, scales())
    for dtype in TAKERS:
        scale = explicit_scale(checkpoint, dtype)
        assert scale.state is ScaleState.UNUSED
        assert "calibrated for what cannot be read" in scale.because


def test_each_side_of_a_pair_is_judged_by_its_own_format(tmp_path: Path) -> None:
    body = modelopt_file("FP8_K_NVFP4_V")
    checkpoint = with_scales(tmp_path, None, scales(), hf_quant=body)
    assert followed_scale(checkpoint, Side.K).state is ScaleState.FOUND
    assert followed_scale(checkpoint, Side.V).state is ScaleState.FOUND
    assert explicit_scale(checkpoint, FP8, Side.K).state is ScaleState.FOUND
    assert explicit_scale(checkpoint, FP8, Side.V).state is ScaleState.UNUSED


# -- scales that are not there -------------------------------------------------------------------


@pytest.mark.case("A10")
@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
def test_a_cast_recipe_expects_none_and_means_one(tmp_path: Path, algo: str) -> None:
    checkpoint = read_checkpoint(write(tmp_path, hf_quant=modelopt_file(algo), tensors={}))
    scale = followed_scale(checkpoint)
    assert (scale.state, scale.tensor, scale.fixed) == (ScaleState.CAST, None, 1.0)
    assert "cast recipe" in scale.because
    assert "no scales expected" in scale.because
    dtype = FP8 if algo == "FP8" else NVFP4
    assert explicit_scale(checkpoint, dtype) == scale


@pytest.mark.case("A09")
def test_explicit_fp8_on_a_plain_checkpoint_is_uncalibrated(tmp_path: Path) -> None:
    scale = explicit_scale(read_checkpoint(write(tmp_path, tensors={})), FP8)
    assert (scale.state, scale.fixed) == (ScaleState.UNCALIBRATED, 1.0)
    assert "uncalibrated" in scale.because


@pytest.mark.parametrize("side", Side)
def test_uncalibrated_nvfp4_alone_has_the_fixed_global_scales(
    tmp_path: Path, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvant.kv.checkpoint.audit.NVFP4_GLOBAL_K", 0.25)
    monkeypatch.setattr("kvant.kv.checkpoint.audit.NVFP4_GLOBAL_V", 0.125)
    plain = read_checkpoint(write(tmp_path, tensors={}))
    scale = explicit_scale(plain, NVFP4, side)
    assert scale.state is ScaleState.UNCALIBRATED
    assert scale.fixed == {Side.K: 0.25, Side.V: 0.125}[side]
    assert explicit_scale(plain, FP8, side).fixed == explicit_scale(plain, FNUZ, side).fixed == 1.0


def test_a_format_other_than_the_declared_one_was_promised_nothing(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write(tmp_path, FP8_DECLARED, tensors={}))
    assert explicit_scale(checkpoint, NVFP4).state is ScaleState.UNCALIBRATED


@pytest.mark.parametrize("declared", [FP8_DECLARED, PER_HEAD, NVFP4_DECLARED])
def test_promised_scales_that_are_missing_are_an_error_with_ways_out_that_work(
    tmp_path: Path, declared: Any
) -> None:
    checkpoint = read_checkpoint(write(tmp_path, declared, tensors={}))
    with pytest.raises(BadCheckpoint) as refused:
        followed_scale(checkpoint)
    assert "layer 0 (model.layers.0.self_attn)" in refused.value.what
    assert "config.json: quantization_config.kv_cache_scheme" in refused.value.why
    one, model = refused.value.ways_out
    assert one.arguments == ("--kv-missing-scales", "one")
    scale = followed_scale(checkpoint, one=True)
    assert (scale.state, scale.fixed) == (ScaleState.MISSING, 1.0)
    assert model.arguments == ("--kv-cache-dtype", "model")
    assert explicit_scale(checkpoint, KVDtype.BFLOAT16).state is ScaleState.NONE


def test_the_same_promise_holds_for_an_explicit_request_of_the_declared_format(
    tmp_path: Path,
) -> None:
    checkpoint = read_checkpoint(write(tmp_path, FP8_DECLARED, tensors={}))
    for dtype in (FP8, FNUZ):
        with pytest.raises(BadCheckpoint, match="is missing"):
            explicit_scale(checkpoint, dtype)
        assert explicit_scale(checkpoint, dtype, one=True).state is ScaleState.MISSING


def test_one_layer_without_its_scale_is_an_error_that_names_it(tmp_path: Path) -> None:
    checkpoint = with_scales(tmp_path, FP8_DECLARED, scales(num_layers=1))
    wish = wish_for(checkpoint, layer(1))
    assert isinstance(wish, KVWish)
    with pytest.raises(BadCheckpoint, match=r"layer 1 \(model\.layers\.1\.self_attn\)"):
        audit(layer(1), Side.K, FP8, wish, checkpoint, explicit=False, missing_scales_as_one=False)


@pytest.mark.parametrize("declared", [FP8_DECLARED, {"quant_method": "fp8"}, None])
@pytest.mark.parametrize(("there", "lost"), [("k_scale", Side.V), ("v_scale", Side.K)])
def test_one_side_alone_is_an_error_that_names_layer_and_file(
    tmp_path: Path, declared: Any, there: str, lost: Side
) -> None:
    checkpoint = with_scales(tmp_path, declared, scales((there,)))
    with pytest.raises(BadCheckpoint) as refused:
        explicit_scale(checkpoint, FP8, lost)
    assert f"the {lost.value}_scale of layer 0" in refused.value.what
    assert f"model.layers.0.self_attn.{there} in model.safetensors" in refused.value.why
    assert explicit_scale(checkpoint, FP8, lost, one=True).state is ScaleState.MISSING


def test_a_side_that_is_declared_unquantised_lost_nothing(tmp_path: Path) -> None:
    keys_alone = {
        "quant_method": "quark",
        "export": {"kv_cache_group": ["*k_proj"]},
        "layer_quant_config": {
            "*k_proj": {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
        },
    }
    checkpoint = with_scales(tmp_path, keys_alone, scales(("k_proj.output_scale",)))
    assert followed_scale(checkpoint, Side.K).state is ScaleState.FOUND
    assert explicit_scale(checkpoint, FP8, Side.V).state is ScaleState.UNCALIBRATED


@pytest.mark.parametrize("dtype", TAKERS)
@pytest.mark.parametrize("declared", [FP8_DECLARED, NVFP4_DECLARED, INT8_DECLARED, None])
def test_without_weight_files_scales_are_unchecked(
    tmp_path: Path, declared: Any, dtype: KVDtype
) -> None:
    scale = explicit_scale(read_checkpoint(write(tmp_path, declared)), dtype)
    assert scale.state is ScaleState.UNCHECKED
    assert "no weight files" in scale.because


# -- tensors that cannot be a scale --------------------------------------------------------------


@pytest.mark.case("A18")
@pytest.mark.parametrize("numel", [0, 2, 3, NUM_KV_HEADS + 1, 64])
def test_a_wrong_number_of_values_is_an_error_that_names_tensor_and_file(
    tmp_path: Path, numel: int
) -> None:
    tensors = {f"model.layers.0.self_attn.{s}_scale": f32(*[0.5] * numel) for s in "kv"}
    checkpoint = with_scales(tmp_path, PER_HEAD, tensors)
    with pytest.raises(BadCheckpoint) as refused:
        followed_scale(checkpoint)
    assert "model.layers.0.self_attn.k_scale in model.safetensors" in refused.value.what
    assert f"1 or {NUM_KV_HEADS}" in refused.value.why
    assert explicit_scale(checkpoint, KVDtype.BFLOAT16).state is ScaleState.UNUSED


def test_nvfp4s_global_scale_is_one_number(tmp_path: Path) -> None:
    tensors = {
        f"model.layers.0.self_attn.{s}_global_scale": f32(*[0.5] * NUM_KV_HEADS) for s in "kv"
    }
    with pytest.raises(BadCheckpoint, match=r"k_global_scale in model\.safetensors has 4 values"):
        followed_scale(with_scales(tmp_path, NVFP4_DECLARED, tensors))


@pytest.mark.parametrize(("dtype", "size"), [("F8_E4M3", 1), ("I32", 4), ("F64", 8)])
def test_a_dtype_no_scale_has_is_an_error(tmp_path: Path, dtype: str, size: int) -> None:
    tensors = {f"model.layers.0.self_attn.{s}_scale": Raw(dtype, (1,), bytes(size)) for s in "kv"}
    with pytest.raises(BadCheckpoint, match=f"scale of dtype {dtype}"):
        followed_scale(with_scales(tmp_path, FP8_DECLARED, tensors))


def test_half_precision_scales_are_fine(tmp_path: Path) -> None:
    tensors = {f"model.layers.0.self_attn.{s}_scale": bf16(0.5) for s in "kv"}
    assert followed_scale(with_scales(tmp_path, FP8_DECLARED, tensors)).state is ScaleState.FOUND


def test_rivals_are_an_error_that_names_them_all(tmp_path: Path) -> None:
    checkpoint = with_scales(tmp_path, FP8_DECLARED, scales(("k_scale", "kv_scale", "v_scale")))
    with pytest.raises(BadCheckpoint, match="several k_scales") as refused:
        followed_scale(checkpoint)
    assert "self_attn.k_scale" in refused.value.why
    assert "self_attn.kv_scale" in refused.value.why
    assert explicit_scale(checkpoint, KVDtype.FP8_PER_TOKEN_HEAD).state is ScaleState.UNUSED


# -- everything at once --------------------------------------------------------------------------


def tensors_for(side: Side) -> st.SearchStrategy[ScaleTensor | None]:
    return st.none() | st.builds(
        ScaleTensor,
        name=st.just(f"model.layers.0.self_attn.{side.value}_scale"),
        file=st.just("model.safetensors"),
        shape=st.sampled_from([(1,), (), (NUM_KV_HEADS, 1, 1), (3,)]),
        dtype=st.sampled_from(["F32", "BF16", "I8"]),
        layer=st.just("model.layers.0.self_attn"),
        side=st.just(side),
        inverse=st.booleans(),
    )


_FORMATS = st.sampled_from([None, FP8, NVFP4])
_WISHES = (
    st.none()
    | st.builds(KVWish, _FORMATS, _FORMATS, st.just("here"), st.sampled_from(ScalePromise))
    | st.just(UnreadableWish("here", "int8", "no format"))
)


@given(
    wish=_WISHES,
    k=tensors_for(Side.K),
    v=tensors_for(Side.V),
    checked=st.booleans(),
    dtype=st.sampled_from([dtype for dtype in KVDtype if not dtype.format.takes_rounding]),
    side=st.sampled_from(Side),
    one=st.booleans(),
)
def test_a_scale_is_used_only_where_it_fits_and_nothing_is_used_unseen(
    wish: KVWish | UnreadableWish | None,
    k: ScaleTensor | None,
    v: ScaleTensor | None,
    checked: bool,
    dtype: KVDtype,
    side: Side,
    one: bool,
) -> None:
    found = {(t.layer, t.side): t for t in (k, v) if t is not None and checked}
    checkpoint = CheckpointKV(scheme=wish, scales=found, checked=checked)
    try:
        scale = explicit_scale(checkpoint, dtype, side, one=one)
    except BadCheckpoint:
        assert dtype in TAKERS
        return
    tensor = found.get(("model.layers.0.self_attn", side))
    assert scale.because
    assert scale.tensor == tensor
    assert (scale.state in (ScaleState.FOUND, ScaleState.UNUSED)) is (tensor is not None)
    assert scale.state is not ScaleState.MISSING or one
    if scale.state is ScaleState.FOUND:
        assert tensor is not None
        assert dtype in TAKERS
        assert tensor.inverse <= (dtype is NVFP4)
        assert tensor.numel in (1, NUM_KV_HEADS)
        assert not isinstance(wish, UnreadableWish) or tensor.inverse
