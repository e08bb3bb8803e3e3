"""compressed-tensors' kv_cache_scheme: what is legal, what it means, and what is never coerced."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant.kv.checkpoint.compressed_tensors import IllegalArgs, read, read_args, read_scheme
from kvant.kv.checkpoint.facts import KVWish, ScalePromise, UnreadableWish
from kvant.kv.dtype import KVDtype
from tests.kv.checkpoint.build import FP8_SCHEME

WHERE = "config.json: quantization_config.kv_cache_scheme"


def wish_of(scheme: Any) -> KVWish | UnreadableWish:
    return read_scheme(scheme, WHERE)[1]


def fp8(**changes: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", **changes}


@pytest.mark.parametrize(
    "scheme",
    [
        FP8_SCHEME,
        fp8(),
        fp8(type="FLOAT", strategy="TENSOR"),
        fp8(strategy="attn_head"),
        fp8(scale_dtype="torch.bfloat16", zp_dtype="torch.float8_e4m3fn"),
        fp8(scale_dtype="float32"),
        fp8(observer="static_minmax", observer_kwargs={"averaging_constant": 0.01}),
        fp8(strategy="tensor", group_size=-1),
        fp8(actorder=False),
    ],
)
def test_static_8_bit_floats_per_tensor_or_head_are_fp8_with_promised_scales(scheme: Any) -> None:
    expected = KVWish(KVDtype.FP8_E4M3, KVDtype.FP8_E4M3, WHERE, ScalePromise.STATIC)
    assert wish_of(scheme) == expected


@pytest.mark.case("A17")
@pytest.mark.parametrize("dynamic", ["local", "LOCAL", False])
def test_4_bit_floats_in_blocks_of_16_under_a_global_scale_are_nvfp4(dynamic: Any) -> None:
    scheme = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    expected = KVWish(KVDtype.NVFP4, KVDtype.NVFP4, WHERE, ScalePromise.STATIC)
    assert wish_of({**scheme, "dynamic": dynamic}) == expected


@pytest.mark.case("A17")
@pytest.mark.parametrize(
    ("scheme", "lacking", "nearest"),
    [
        ({}, "8-bit integers per tensor", KVDtype.INT8_PER_TOKEN_HEAD),
        ({"num_bits": 8}, "8-bit integers per tensor", KVDtype.INT8_PER_TOKEN_HEAD),
        ({"type": "int", "strategy": "attn_head"}, "integers per attn_head", KVDtype.INT8_PER_TOKEN_HEAD),
        ({"strategy": "token", "dynamic": True}, "integers per token", KVDtype.INT8_PER_TOKEN_HEAD),
        ({"num_bits": 4}, "4-bit integers", KVDtype.INT4_PER_TOKEN_HEAD),
        ({"num_bits": 4, "group_size": 128}, "4-bit integers per group", KVDtype.INT4_PER_TOKEN_HEAD),
        ({"num_bits": 2}, "2-bit integers", None),
        (fp8(symmetric=False), "zero points", KVDtype.FP8_PER_TOKEN_HEAD),
        ({"symmetric": False}, "zero points", KVDtype.INT8_PER_TOKEN_HEAD),
        ({"num_bits": 4, "symmetric": False}, "zero points", KVDtype.INT4_PER_TOKEN_HEAD),
        (fp8(dynamic=True), "run-time scales per tensor", KVDtype.FP8_PER_TOKEN_HEAD),
        (fp8(strategy="token", dynamic=True), "run-time scales per token", KVDtype.FP8_PER_TOKEN_HEAD),
        (fp8(strategy="channel"), "static scales per channel", KVDtype.FP8_PER_TOKEN_HEAD),
        (fp8(group_size=-1), "static scales per channel", KVDtype.FP8_PER_TOKEN_HEAD),
        (fp8(group_size=32), "static scales per group", KVDtype.FP8_PER_TOKEN_HEAD),
        (fp8(strategy="tensor_group", group_size=16), "per tensor_group", KVDtype.FP8_PER_TOKEN_HEAD),
        (fp8(num_bits=4), "4-bit floats with scales per tensor", KVDtype.NVFP4),
        (fp8(num_bits=4, group_size=16), "4-bit floats with scales per group of 16", KVDtype.NVFP4),
        (
            fp8(num_bits=4, strategy="tensor_group", group_size=32, dynamic="local"),
            "scales per tensor_group of 32",
            KVDtype.NVFP4,
        ),
        (
            fp8(num_bits=4, strategy="tensor_group", group_size=16, dynamic=True),
            "global scale that changes at run time",
            KVDtype.NVFP4,
        ),
        (fp8(num_bits=6), "6-bit floats", None),
        (fp8(num_bits=16), "16-bit floats", None),
    ],
)  # fmt: skip
def test_what_kvant_lacks_is_said_with_the_nearest_format_and_never_taken_for_another(
    scheme: dict[str, Any], lacking: str, nearest: KVDtype | None
) -> None:
    wish = wish_of(scheme)
    assert isinstance(wish, UnreadableWish)
    assert lacking in wish.why
    assert wish.nearest is nearest
    if nearest is not None:
        assert nearest.format.name in wish.why
    assert wish.where == WHERE


@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        (fp8(bits=8), "unknown keys bits"),
        (fp8(num_bits="8"), "num_bits"),
        (fp8(num_bits=True), "num_bits"),
        (fp8(num_bits=0), "num_bits"),
        (fp8(num_bits=None), "num_bits"),
        (fp8(type="bfloat"), "type"),
        (fp8(type=None), "type"),
        (fp8(symmetric="yes"), "symmetric"),
        (fp8(strategy="head"), "strategy"),
        (fp8(strategy=["tensor"]), "strategy"),
        (fp8(dynamic="global"), "dynamic"),
        (fp8(dynamic=None), "dynamic"),
        (fp8(group_size=0), "group_size"),
        (fp8(group_size=-2), "group_size"),
        (fp8(group_size="16"), "group_size"),
        (fp8(group_size=1.5), "group_size"),
        (fp8(strategy="group"), "strategy group needs a positive group_size"),
        (fp8(strategy="tensor_group", group_size=-1), "needs a positive group_size"),
        (fp8(strategy="tensor", group_size=16), "group_size 16 does not go with strategy tensor"),
        (fp8(strategy="token"), "strategy token needs dynamic"),
        (fp8(strategy="attn_head", dynamic=True), "attn_head cannot be dynamic"),
        (fp8(strategy="channel", dynamic=True), "channel cannot be dynamic"),
        (fp8(dynamic="local"), "dynamic local goes with strategy tensor_group"),
        (fp8(strategy="block", block_structure=[128, 128]), "blocks are for weights"),
        (fp8(block_structure=[128, 128]), "blocks are for weights"),
        (fp8(actorder="group"), "actorder"),
        (fp8(actorder=True), "actorder"),
        (fp8(scale_dtype="float3"), "scale_dtype"),
        (fp8(zp_dtype=8), "zp_dtype"),
        (fp8(observer=3), "observer"),
        (fp8(observer_kwargs=[]), "observer_kwargs"),
        ("static", "a scheme is an object"),
        (["float", 8], "a scheme is an object"),
        (8, "a scheme is an object"),
    ],
)
def test_an_illegal_scheme_is_unreadable_and_says_which_field(scheme: Any, says: str) -> None:
    wish = wish_of(scheme)
    assert isinstance(wish, UnreadableWish)
    assert says in wish.why


def test_no_key_is_no_declaration_and_null_declares_none() -> None:
    assert read({"config_groups": {}}, "here") is None
    declared = read({"kv_cache_scheme": None}, "here")
    assert declared is not None
    assert declared.scheme is None
    assert declared.said == "none"


_SCHEMES = st.fixed_dictionaries(
    {},
    optional={
        "num_bits": st.sampled_from([2, 4, 8]),
        "type": st.sampled_from(["int", "float", "Float"]),
        "symmetric": st.booleans(),
        "strategy": st.sampled_from(
            [None, "tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"]
        ),
        "group_size": st.sampled_from([None, -2, -1, 0, 16, 128]),
        "dynamic": st.sampled_from([True, False, "local", "global"]),
        "block_structure": st.sampled_from([None, [16, 16]]),
        "actorder": st.sampled_from([None, "group", False, True]),
        "scale_dtype": st.sampled_from([None, "torch.bfloat16", "torch.float8_e4m3fn"]),
        "zp_dtype": st.sampled_from([None, "torch.int8"]),
        "observer": st.sampled_from([None, "minmax"]),
        "observer_kwargs": st.just({}),
        "extra": st.just(1),
    },
)


@given(_SCHEMES)
def test_only_the_one_static_symmetric_scheme_is_ever_read_as_fp8(scheme: dict[str, Any]) -> None:
    wish = wish_of(scheme)
    if isinstance(wish, UnreadableWish) or wish.k is not KVDtype.FP8_E4M3:
        return
    assert scheme.get("num_bits", 8) == 8
    assert scheme["type"].lower() == "float"
    assert scheme.get("symmetric", True) is True
    assert scheme.get("dynamic", False) is False
    assert scheme.get("strategy") in (None, "tensor", "attn_head")


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("compressed_tensors.quantization")


@pytest.mark.filterwarnings("ignore:No observer is used")  # its oldest version says so
@given(scheme=_SCHEMES)
def test_the_library_itself_agrees_on_what_is_legal(library: Any, scheme: dict[str, Any]) -> None:
    try:
        theirs = library.QuantizationArgs(**scheme)
    except (ValueError, NotImplementedError):
        theirs = None
    try:
        ours = read_args(scheme)
    except IllegalArgs:
        # Stricter in one thing: order and blocks are for weights, which the library says elsewhere.
        for_weights = scheme.get("actorder") or scheme.get("strategy") == "block"
        assert theirs is None or for_weights
        return
    # The library refuses to name a zero-point dtype for floats it cannot store; Kvant says "lacks".
    if theirs is None:
        assert ours.is_float
        assert ours.num_bits == 2
        return
    assert ours.strategy == getattr(theirs.strategy, "value", theirs.strategy)
    assert (ours.num_bits, ours.symmetric, ours.group_size) == (
        theirs.num_bits,
        theirs.symmetric,
        theirs.group_size,
    )
    assert ours.dynamic == getattr(theirs.dynamic, "value", theirs.dynamic)
