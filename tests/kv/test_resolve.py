"""Properties of the resolver, and the result of wishes that no backend serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant.errors import BadValue, NotServable
from kvant.kv.checkpoint.facts import CheckpointKV, KVWish, ScalePromise, UnreadableWish
from kvant.kv.dtype import ComputeDtype, Follow, KVDtype
from kvant.kv.geometry import (
    Attention,
    LayerGeometry,
    ModelGeometry,
    StateGeometry,
    StateKind,
    spans,
)
from kvant.kv.names import FormatRequest
from kvant.kv.request import (
    Asked,
    AskedState,
    KVRequest,
    LayerRule,
    Selector,
    Skip,
    check_request,
    parse_rule,
)
from kvant.kv.resolve import Served, Surroundings, resolve
from kvant.kv.spec import Rejected, Role, Source

NUM_LAYERS = 6


def geometry() -> ModelGeometry:
    layers = tuple(
        LayerGeometry(
            i,
            f"model.layers.{i}.self_attn",
            Attention.SLIDING if i % 2 else Attention.FULL,
            8,
            2,
            64,
            64,
            window=128 if i % 2 else None,
        )
        for i in range(NUM_LAYERS)
    )
    return ModelGeometry("LlamaForCausalLM", "llama", layers, ComputeDtype.BFLOAT16, 100, 512, 4096)


def around(refused: Collection[KVDtype] = (), role: Role = Role.TARGET) -> Surroundings:
    """A place whose one backend refuses some formats, on either side."""

    def serve(layer: LayerGeometry, k: KVDtype, v: KVDtype | None) -> Served:
        no = [dtype for dtype in (k, v) if dtype in refused]
        if no:
            return Served(False, None, (Rejected("only", f"cannot do {no[0]}"),))
        return Served(True, "only", ())

    return Surroundings(
        role, "m", ComputeDtype.BFLOAT16, "config.json", 16, MappingProxyType({}), serve
    )


def asks(k: KVDtype | Follow, v: KVDtype | Follow | None = None) -> Asked:
    return Asked(FormatRequest(k, k if v is None else v), f"--kv-cache-dtype {k}")


def wishes(k: KVDtype | None, v: KVDtype | None) -> CheckpointKV:
    return CheckpointKV(scheme=KVWish(k, v, "config.json: scheme", ScalePromise.CAST), checked=True)


dtypes = st.sampled_from([dtype for dtype in KVDtype if not dtype.format.takes_rounding])
requests = st.one_of(dtypes, st.sampled_from(Follow))
selectors = st.one_of(
    st.integers(0, NUM_LAYERS - 1).map(lambda i: Selector(str(i), first=i, last=i)),
    st.just(Selector("0-", first=0)),
    st.just(Selector("sliding_window", kind=Attention.SLIDING)),
)
checkpoints = st.one_of(
    st.just(CheckpointKV()),
    st.builds(wishes, st.none() | dtypes, st.none() | dtypes),
    st.just(CheckpointKV(scheme=UnreadableWish("config.json", "int3", "no such format"))),
)


@given(dtypes, dtypes, checkpoints)
@pytest.mark.case("F1", "A01")
def test_an_explicit_global_format_always_wins(
    k: KVDtype, v: KVDtype, checkpoint: CheckpointKV
) -> None:
    request = KVRequest(explicit=(asks(k, v),), format_defaults=False)
    plan = resolve(request, checkpoint, geometry(), around())
    for layer in plan.layers:
        assert layer.k is not None
        assert layer.v is not None
        assert (layer.k.dtype, layer.v.dtype) == (k, v)
        assert layer.k.source is layer.v.source is Source.EXPLICIT


def deep(num_layers: int = 7) -> ModelGeometry:
    one = geometry().layers[0]
    layers = tuple(dataclasses.replace(one, index=i) for i in range(num_layers))
    return dataclasses.replace(geometry(), layers=layers)


TURBO = (KVDtype.TURBOQUANT_K4, KVDtype.TURBOQUANT_V4)


@pytest.mark.case("A25")
def test_turboquant_leaves_the_first_and_last_two_layers_wide_and_says_so() -> None:
    plan = resolve(KVRequest(explicit=(asks(*TURBO),)), CheckpointKV(), deep(), around())
    for layer in plan.layers:
        assert layer.k is not None
        assert layer.v is not None
        if layer.geometry.index in (2, 3, 4):
            assert (layer.k.dtype, layer.v.dtype) == TURBO
            assert layer.k.source is Source.EXPLICIT
        else:
            assert layer.k.dtype is layer.v.dtype is KVDtype.BFLOAT16
            assert layer.k.source is layer.v.source is Source.FORMAT_DEFAULT
            assert "--kv-format-defaults off" in layer.k.because
        assert any(rung.startswith("format-default") for rung in layer.k.considered)


def test_a_format_that_no_layer_of_a_small_model_stores_gives_a_warning() -> None:
    request = KVRequest(explicit=(asks(TURBO[0], KVDtype.FP8_E5M2),))
    four, five = (resolve(request, CheckpointKV(), deep(n), around()) for n in (4, 5))
    said = "keys are in no layer stored as asked: turboquant_k4"
    (line,) = [line for line in four.warnings if "in no layer" in line]
    assert line.startswith(said)
    assert "--kv-format-defaults off" in line
    assert not [line for line in five.warnings if "in no layer" in line]


@pytest.mark.case("A25")
def test_format_defaults_can_be_left_out() -> None:
    request = KVRequest(explicit=(asks(*TURBO),), format_defaults=False)
    plan = resolve(request, CheckpointKV(), deep(), around())
    assert {layer.k.dtype for layer in plan.layers if layer.k} == {KVDtype.TURBOQUANT_K4}


@pytest.mark.case("A25")
def test_a_rule_for_a_layer_stands_before_a_format_s_default() -> None:
    rule = LayerRule(Selector("0", first=0, last=0), TURBO[0], None, "rule")
    request = KVRequest(explicit=(asks(*TURBO),), rules=(rule,))
    first = resolve(request, CheckpointKV(), deep(), around()).layers[0]
    assert first.k is not None
    assert first.v is not None
    assert first.k.dtype is TURBO[0]
    assert first.v.dtype is KVDtype.BFLOAT16


def test_a_format_s_default_acts_on_a_checkpoint_s_wish_too() -> None:
    plan = resolve(KVRequest(), wishes(*TURBO), deep(), around())
    sources = [layer.k.source for layer in plan.layers if layer.k]
    ends, middle = [Source.FORMAT_DEFAULT] * 2, [Source.CHECKPOINT] * 3
    assert sources == [*ends, *middle, *ends]


@given(dtypes, st.lists(selectors, max_size=3), requests, checkpoints)
@pytest.mark.case("F3", "A22")
def test_a_skipped_layer_stores_the_model_dtype_under_any_other_option(
    rule: KVDtype, skipped: list[Selector], asked: KVDtype | Follow, checkpoint: CheckpointKV
) -> None:
    if isinstance(checkpoint.scheme, UnreadableWish) and asked is Follow.CHECKPOINT:
        asked = Follow.MODEL
    request = KVRequest(
        explicit=(asks(asked),),
        skips=tuple(Skip(s, "skip") for s in skipped),
        rules=(LayerRule(Selector("0", first=0, last=0), rule, rule, "rule"),),
    )
    plan = resolve(request, checkpoint, geometry(), around())
    for layer in plan.layers[1:]:
        if any(s.matches(layer.geometry, NUM_LAYERS) for s in skipped):
            assert layer.k is not None
            assert layer.k.dtype is KVDtype.BFLOAT16
            assert layer.k.source is Source.SKIP
    assert plan.layers[0].k is not None
    assert plan.layers[0].k.dtype is rule  # an explicit rule stands before a skip


@given(checkpoints.filter(lambda c: not isinstance(c.scheme, UnreadableWish)), requests)
def test_resolving_twice_changes_nothing(checkpoint: CheckpointKV, asked: KVDtype | Follow) -> None:
    request = KVRequest(explicit=(asks(asked),))
    first = resolve(request, checkpoint, geometry(), around())
    assert resolve(request, checkpoint, geometry(), around()) == first
    assert {type(c.dtype) for layer in first.layers for c in (layer.k, layer.v) if c} == {KVDtype}


@pytest.mark.case("A11")
def test_a_wish_without_a_backend_becomes_the_model_dtype_with_a_warning() -> None:
    here = around(refused={KVDtype.NVFP4})
    plan = resolve(KVRequest(), wishes(KVDtype.NVFP4, KVDtype.NVFP4), geometry(), here)
    for layer in plan.layers:
        assert layer.k is not None
        assert layer.k.dtype is KVDtype.BFLOAT16
        assert layer.k.source is Source.DOWNGRADE
        assert "only: cannot do nvfp4" in layer.k.because
    assert any("downgraded" in line for line in plan.warnings)


@pytest.mark.case("A11")
def test_a_downgrade_gives_up_no_more_than_it_must() -> None:
    here = around(refused={KVDtype.NVFP4})
    plan = resolve(KVRequest(), wishes(KVDtype.FP8_E4M3, KVDtype.NVFP4), geometry(), here)
    for layer in plan.layers:
        assert layer.k is not None
        assert layer.v is not None
        assert (layer.k.dtype, layer.k.source) == (KVDtype.FP8_E4M3, Source.CHECKPOINT)
        assert (layer.v.dtype, layer.v.source) == (KVDtype.BFLOAT16, Source.DOWNGRADE)


@pytest.mark.case("A11")
def test_strict_makes_a_downgrade_an_error() -> None:
    here = around(refused={KVDtype.NVFP4})
    request = KVRequest(strict=True)
    with pytest.raises(NotServable, match="cannot do nvfp4"):
        resolve(request, wishes(KVDtype.NVFP4, KVDtype.NVFP4), geometry(), here)


@pytest.mark.case("F2", "A29")
def test_an_explicit_format_without_a_backend_is_an_error_never_a_downgrade() -> None:
    here = around(refused={KVDtype.NVFP4, KVDtype.FP8_PER_TOKEN_HEAD})
    with pytest.raises(NotServable) as refused:
        resolve(KVRequest(explicit=(asks(KVDtype.NVFP4),)), CheckpointKV(), geometry(), here)
    ways = [way.arguments for way in refused.value.ways_out]
    assert ("--kv-cache-dtype", "int8_per_token_head") in ways
    assert ("--kv-cache-dtype", "fp8_per_token_head") not in ways


@pytest.mark.case("A30", "A31", "F5")
def test_an_inherited_format_is_a_wish() -> None:
    inherited = KVRequest(inherited=asks(KVDtype.FP8_E4M3))
    served = resolve(inherited, CheckpointKV(), geometry(), around(role=Role.DRAFT))
    assert all(layer.k and layer.k.dtype is KVDtype.FP8_E4M3 for layer in served.layers)
    here = around(refused={KVDtype.FP8_E4M3}, role=Role.DRAFT)
    refused = resolve(inherited, CheckpointKV(), geometry(), here)
    for layer in refused.layers:
        assert layer.k is not None
        assert (layer.k.dtype, layer.k.source) == (KVDtype.BFLOAT16, Source.DOWNGRADE)


def test_the_fingerprint_is_about_bytes_not_about_who_decided() -> None:
    explicit = resolve(
        KVRequest(explicit=(asks(KVDtype.BFLOAT16),)), CheckpointKV(), geometry(), around()
    )
    unset = resolve(KVRequest(), CheckpointKV(), geometry(), around())
    assert explicit != unset
    assert explicit.fingerprint == unset.fingerprint
    other = resolve(
        KVRequest(explicit=(asks(KVDtype.FLOAT16),)), CheckpointKV(), geometry(), around()
    )
    assert other.fingerprint != unset.fingerprint
    assert dataclasses.replace(unset, page_size=32).fingerprint != unset.fingerprint


def test_a_plan_names_every_format_that_it_stores_the_most_frequent_first() -> None:
    """Also pairs, and what a format that keeps the ends wide leaves wide."""
    request = KVRequest(explicit=(asks(KVDtype.INT8_PER_TOKEN_HEAD, KVDtype.FP8_E4M3),))
    rule = parse_rule("0:bf16", asked_by="--kv-cache-rule").target
    plan = resolve(request.merged(rule), CheckpointKV(), geometry(), around())
    assert list(plan.formats.items()) == [
        ("int8_per_token_head/fp8_e4m3", NUM_LAYERS - 1), ("bfloat16", 1),
    ]  # fmt: skip


def test_refused_selectors_list_layers_as_ranges() -> None:
    request = parse_rule("99:fp8", asked_by="a rule").target
    with pytest.raises(BadValue, match="'99' selects nothing") as refused:
        check_request(request, geometry())
    assert "full: 0, 2, 4; sliding_window: 1, 3, 5" in refused.value.why
    assert [spans(one) for one in ((), (3,), (0, 1, 2, 5), range(9))] == ["", "3", "0-2, 5", "0-8"]


def test_a_state_of_none_is_refused_by_what_the_layers_keep() -> None:
    plain = geometry()
    conv = StateGeometry(StateKind.CONV, (3, 8))
    first, *others = plain.layers
    short = dataclasses.replace(
        plain,
        layers=(dataclasses.replace(first, attention=Attention.NONE, states=(conv,)), *others),
    )
    asked = AskedState(StateKind.RECURRENT, KVDtype.BFLOAT16, "--state-dtype bf16")
    for model, why in (
        (plain, "no layer of it has a recurrence"),
        (short, "keep conv states alone"),
    ):
        with pytest.raises(BadValue, match="keeps no recurrent state") as refused:
            check_request(KVRequest(states=(asked,)), model)
        assert why in refused.value.why
