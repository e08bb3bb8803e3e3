"""Decide the format of every state of every layer, with reasons. Pure, as `kvant.kv.resolve`, which calls it.

Precedence, first match wins:

    1  explicit rule for the layer (state=.., conv=..)     3  the checkpoint's wish (mamba_ssm_dtype)
    2  explicit global format (--state-dtype)              4  the default

The default keeps recurrent states in float32, and the inputs of convolutions in the compute dtype, which
stores them exactly. A format with a scale per token and head has one for each row of a recurrent state.
"""

from __future__ import annotations

from kvant.errors import NotServable, WayOut
from kvant.kv.dtype import ComputeDtype, Follow, KVDtype
from kvant.kv.geometry import LayerGeometry, ModelGeometry, StateGeometry, StateKind
from kvant.kv.names import Request, parse_one
from kvant.kv.request import KVRequest
from kvant.kv.spec import Choice, Scale, ScaleState, Source, StateSpec

RECURRENT_FORMATS = (
    KVDtype.FLOAT32, KVDtype.BFLOAT16, KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.INT8_PER_TOKEN_HEAD,
)  # fmt: skip
"""Formats of recurrent states, widest first."""

OPTIONS = {StateKind.RECURRENT: "--state-dtype", StateKind.CONV: "--conv-state-dtype"}

_FLOAT16 = (
    "float16 ends at 65504 and flushes small decays to zero; models whose states are rounded to it at every "
    "token lose most of their accuracy"
)


def resolve_states(
    layer: LayerGeometry, request: KVRequest, geometry: ModelGeometry, compute: ComputeDtype
) -> tuple[StateSpec, ...]:
    """Returns the states of one layer. Raises NotServable for a format that a state cannot have."""
    return tuple(_resolve(layer, state, request, geometry, compute) for state in layer.states)


def _resolve(
    layer: LayerGeometry,
    state: StateGeometry,
    request: KVRequest,
    geometry: ModelGeometry,
    compute: ComputeDtype,
) -> StateSpec:
    kind, model = state.kind, compute.kv_dtype
    default, why = model, f"the inputs of a convolution, stored exactly in {model}"
    if kind is StateKind.RECURRENT:
        default, why = KVDtype.FLOAT32, "recurrent states are kept in float32"
    rule = request.state_rule(layer, kind, len(geometry.layers))
    steps: list[tuple[str, Request | None, str, Source]] = [
        ("rule", None, "", Source.EXPLICIT) if rule is None else
        ("rule", rule.of_state(kind), rule.asked_by, Source.EXPLICIT)
    ]  # fmt: skip
    asked = [one for one in request.states if one.kind is kind]
    if not asked:
        steps.append(("global", None, "", Source.EXPLICIT))
    for number, one in enumerate(asked):
        label = "overridden" if number else "global"
        steps.append((label, one.format, one.asked_by, Source.EXPLICIT))
    wish = geometry.state_dtype if kind is StateKind.RECURRENT else None
    where = "config.json: mamba_ssm_dtype"
    wished = None if wish is None else parse_one(wish, asked_by=where)
    steps.append(("checkpoint", wished, where if wish else "", Source.CHECKPOINT))
    considered = (
        *(
            f"{label}: {'none' if found is None else f'{found} ({by})'}"
            for label, found, by, _ in steps
        ),
        f"default: {default} ({why})",
    )
    dtype, because, source = default, why, Source.MODEL
    for _, found, by, of in steps:
        if found is None or found is Follow.CHECKPOINT:
            continue
        dtype, because, source = (model if found is Follow.MODEL else found), by, of
        break
    _check(layer, kind, dtype, because, compute)
    return StateSpec(state, Choice(dtype, source, because, considered, Scale(ScaleState.NONE)))


def _check(
    layer: LayerGeometry, kind: StateKind, dtype: KVDtype, because: str, compute: ComputeDtype
) -> None:
    possible = list(RECURRENT_FORMATS)
    if kind is StateKind.CONV:
        possible = [one for one in possible if one.format.is_native]
    if kind is StateKind.CONV and compute.kv_dtype not in possible:
        possible.append(compute.kv_dtype)  # what is computed in it is stored exactly
    if dtype in possible:
        return
    names = ", ".join(map(str, possible))
    why = f"{kind.value} states are stored in {names}"
    if dtype is KVDtype.FLOAT16:
        why = _FLOAT16
    raise NotServable(
        f"layer {layer.index} cannot keep its {kind.value} state in {dtype}; asked by {because}",
        why=why,
        ways_out=tuple(
            WayOut("choose a format that it can keep", (OPTIONS[kind], str(one)))
            for one in possible[:2]
        ),
    )
