"""The scale audit: for one side of one layer, what was expected, what was found, what is used.

A wrong scale is worse than none, so nothing is guessed. Which tensor counts follows
from what it was calibrated *for*, and that is what the checkpoint declares for the layer:

    declared        stored fp8_e4m3         stored nvfp4               stored anything else
    fp8, or bare    used                    not used, fixed global     unused
    nvfp4           not used, 1.0           used as global scale       unused
    unreadable      not used, 1.0           not used, fixed global     unused

nvfp4 scales are not converted to fp8 ones: ModelOpt has exported both amax/448 and amax/(6*448)
under the same name, and the files do not say which. Either serves as nvfp4's global scale: Kvant
encodes with it, and only the room above the calibrated maximum differs.

e4m3fnuz (AMD gfx942) ends at 240 where e4m3fn ends at 448, so a scale meant for e4m3fn is doubled:
codes then end at 224 for the same values, and the representable numbers are e4m3fn's own. That
holds for every scale of the checkpoint, a cast recipe's 1.0 included. Where nothing says what range
the values need, 1.0 stays 1.0.
"""

from __future__ import annotations

from kvant.errors import KV_FORMAT, BadCheckpoint, WayOut
from kvant.kv.checkpoint.facts import CheckpointKV, KVWish, ScalePromise, UnreadableWish
from kvant.kv.checkpoint.lookup import scale_for, wish_for
from kvant.kv.checkpoint.rounding import audit_rounding
from kvant.kv.dtype import KVDtype
from kvant.kv.format import CheckpointScales, Encoding, Granularity, Side
from kvant.kv.geometry import LayerGeometry
from kvant.kv.nvfp4_scales import NVFP4_GLOBAL_K, NVFP4_GLOBAL_V
from kvant.kv.spec import Scale, ScaleState, ScaleTensor

SCALE_DTYPES = ("F32", "F16", "BF16")
"""Dtypes of scales, as safetensors headers name them."""

STORE_MODEL_DTYPE = WayOut("store the model dtype", (KV_FORMAT, "model"))
GO_ON_WITH_ONE = WayOut("go on with scale 1.0", ("--kv-missing-scales", "one"))


def audit(
    layer: LayerGeometry,
    side: Side,
    dtype: KVDtype,
    followed: KVWish | None,
    checkpoint: CheckpointKV,
    *,
    explicit: bool,
    missing_scales_as_one: bool,
) -> Scale:
    """Returns where the scale of one side of a layer comes from, given that it stores `dtype`.

    followed: the checkpoint's wish, if it decided. explicit: a user named the format.
    missing_scales_as_one: use 1.0 if the checkpoint promised a scale and has none.
    Raises BadCheckpoint for a promised scale that is missing, one side's scale without the other's,
    two tensors for one scale, and a tensor of the wrong size or dtype.
    """
    if dtype.format.takes_rounding:
        return audit_rounding(layer, side, dtype, checkpoint)
    tensor = scale_for(checkpoint, layer, side)
    if dtype.format.checkpoint_scales is CheckpointScales.NEVER:
        return _without(dtype, tensor, explicit)
    if not checkpoint.checked:
        return Scale(
            ScaleState.UNCHECKED,
            fixed=_fixed(dtype, side),
            because="no weight files here to look into",
        )
    wish = followed if followed is not None else wish_for(checkpoint, layer)
    if tensor is not None:
        return _with_tensor(layer, side, dtype, wish, tensor)
    return _lacking(layer, side, dtype, wish, checkpoint, missing_scales_as_one)


def _without(dtype: KVDtype, tensor: ScaleTensor | None, explicit: bool) -> Scale:
    """Returns a format that takes no scale from a checkpoint."""
    if tensor is None:
        return Scale(ScaleState.NONE, because=f"{dtype} takes no scale from a checkpoint")
    by = f"explicit {dtype}" if explicit else f"{dtype} takes no scale from a checkpoint"
    return Scale(ScaleState.UNUSED, tensor, because=f"present, unused ({by})")


def _with_tensor(
    layer: LayerGeometry,
    side: Side,
    dtype: KVDtype,
    wish: KVWish | UnreadableWish | None,
    tensor: ScaleTensor,
) -> Scale:
    calibrated = _calibrated_for(wish, side, tensor)
    if not _takes(dtype, calibrated):
        fixed = _fixed(dtype, side)
        what = "what cannot be read" if calibrated is None else f"{calibrated}, not for {dtype}"
        because = f"present, calibrated for {what}: {fixed} instead"
        return Scale(ScaleState.UNUSED, tensor, fixed=fixed, because=because)
    _refuse_unusable(layer, dtype, tensor)
    because = f"checkpoint's {tensor.name}"
    if dtype is KVDtype.FP8_E4M3FNUZ:
        because += ", doubled for e4m3fnuz"
    if tensor.inverse:
        because += ", which holds 1/scale"
    return Scale(ScaleState.FOUND, tensor, factor=_factor(dtype), because=because)


def _lacking(
    layer: LayerGeometry,
    side: Side,
    dtype: KVDtype,
    wish: KVWish | UnreadableWish | None,
    checkpoint: CheckpointKV,
    missing_scales_as_one: bool,
) -> Scale:
    """This side has no tensor: by recipe, by loss, or because none was promised."""
    promise = ScalePromise.NONE
    if isinstance(wish, KVWish) and _takes(dtype, _side(wish, side)):
        promise = wish.promise
    if promise is ScalePromise.CAST:
        because = "cast recipe of the checkpoint, no scales expected"
        return Scale(ScaleState.CAST, fixed=_factor(dtype), because=because)
    other = scale_for(checkpoint, layer, Side.V if side is Side.K else Side.K)
    if other is not None and not _is_half(wish, side, dtype, other):
        other = None
    if promise is ScalePromise.NONE and other is None:
        fixed = _fixed(dtype, side)
        because = f"the checkpoint has no scale for {dtype}: {fixed}, uncalibrated"
        return Scale(ScaleState.UNCALIBRATED, fixed=fixed, because=because)
    if missing_scales_as_one:
        return Scale(ScaleState.MISSING, because="promised, not there, 1.0 as asked")
    if other is not None:
        why = f"there is {other.name} in {other.file}, and K and V differ in range"
    else:
        assert isinstance(wish, KVWish)
        why = f"{wish.where} promises a static scale, and no weight file has one"
    raise BadCheckpoint(
        f"the {side.value}_scale of layer {layer.index} ({layer.name}) is missing",
        why=why,
        ways_out=(GO_ON_WITH_ONE, STORE_MODEL_DTYPE),
    )


def _is_half(
    wish: KVWish | UnreadableWish | None, side: Side, dtype: KVDtype, other: ScaleTensor
) -> bool:
    """Returns whether `other`, the other side's scale, shows that this side's own is missing.

    False if the checkpoint declares that it quantises only the other side.
    """
    if isinstance(wish, KVWish) and _side(wish, side) is None:
        return False
    declared = _side(wish, side) if isinstance(wish, KVWish) else None
    return _takes(dtype, declared or _calibrated_for(wish, other.side, other))


def _calibrated_for(
    wish: KVWish | UnreadableWish | None, side: Side, tensor: ScaleTensor
) -> KVDtype | None:
    """Returns the format whose range a tensor was measured for; None if that is unknown."""
    if tensor.inverse:
        return KVDtype.NVFP4
    if isinstance(wish, UnreadableWish):
        return None
    declared = None if wish is None else _side(wish, side)
    # Plain fp8 checkpoints have scales without a declaration.
    return KVDtype.FP8_E4M3 if declared is None else declared


def _takes(dtype: KVDtype, calibrated: KVDtype | None) -> bool:
    return calibrated is not None and _ENCODED_FOR.get(dtype, dtype) is calibrated


_ENCODED_FOR = {KVDtype.FP8_E4M3FNUZ: KVDtype.FP8_E4M3}


def _side(wish: KVWish, side: Side) -> KVDtype | None:
    return wish.k if side is Side.K else wish.v


def _factor(dtype: KVDtype) -> float:
    """Returns the factor for a checkpoint's scale, see the top of this file."""
    return 2.0 if dtype.format.encoding is Encoding.E4M3FNUZ else 1.0


def _fixed(dtype: KVDtype, side: Side) -> float:
    """Returns the value if no tensor is used and no recipe sets one."""
    if dtype is KVDtype.NVFP4:
        return NVFP4_GLOBAL_K if side is Side.K else NVFP4_GLOBAL_V
    return 1.0


def _refuse_unusable(layer: LayerGeometry, dtype: KVDtype, tensor: ScaleTensor) -> None:
    where = f"{tensor.name} in {tensor.file}"
    if tensor.rivals:
        raise BadCheckpoint(
            f"layer {layer.index} has several {tensor.side.value}_scales",
            why=f"{where} and {', '.join(tensor.rivals)} claim to be the same",
            ways_out=(STORE_MODEL_DTYPE,),
        )
    if tensor.dtype not in SCALE_DTYPES:
        raise BadCheckpoint(
            f"{where} is a scale of dtype {tensor.dtype}",
            why=f"scales are {', '.join(SCALE_DTYPES)}",
            ways_out=(STORE_MODEL_DTYPE,),
        )
    per_head = dtype.format.granularity is Granularity.TENSOR_OR_HEAD
    if tensor.numel == 1 or (per_head and tensor.numel == layer.num_kv_heads):
        return
    expected = f"1 or {layer.num_kv_heads} (KV heads)" if per_head else "1"
    raise BadCheckpoint(
        f"{where} has {tensor.numel} values",
        why=f"layer {layer.index} in {dtype} takes {expected}",
        ways_out=(STORE_MODEL_DTYPE,),
    )
