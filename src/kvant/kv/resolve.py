"""Decides the KV cache format of every layer and side, with reasons. Pure.

Nothing else decides a format of keys and values. `resolve_state` does the same for recurrent states, and
`wide` for the rows that are kept wide.

Precedence, first match wins:

    1  explicit rule for the layer          4  checkpoint's per-layer map
    2  explicit skip                        5  checkpoint's global scheme
    3  explicit global format               6  model dtype

A format's own default comes between 2 and 3: layers at a model's ends that would get the format
from 3 to 5 keep the model dtype, unless the request turns format defaults off.

A drafter's step 3 may be inherited from the target's explicit global format; such a wish, like the
checkpoint's, is soft: if no backend serves it, the layer gets the model dtype and the plan records a
downgrade (an error with `strict`). Everything else is hard: it is stored as asked, or it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvant.errors import KV_FORMAT, BadCheckpoint, NotServable, WayOut
from kvant.kv.checkpoint.audit import STORE_MODEL_DTYPE, audit
from kvant.kv.checkpoint.facts import CheckpointKV, KVWish, UnreadableWish
from kvant.kv.checkpoint.lookup import wish_for
from kvant.kv.dtype import ComputeDtype, Follow, KVDtype
from kvant.kv.format import Side
from kvant.kv.geometry import Attention, LayerGeometry, ModelGeometry
from kvant.kv.names import Request
from kvant.kv.request import Asked, KVRequest, LayerRule, check_request, closest
from kvant.kv.resolve_state import resolve_states
from kvant.kv.spec import Choice, KVPlan, LayerSpec, Rejected, Role, Source
from kvant.kv.warn import plan_warnings
from kvant.kv.wide import check_wide, wide_rows


@dataclass(frozen=True, slots=True)
class Served:
    """Which backend writes and reads a layer, and why others do not.

    is_served without a backend: the formats are possible, but the model cannot run yet.
    """

    is_served: bool
    backend: str | None
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The environment of a resolution: facts that it needs and that are no request.

    device_encodings: formats that this device stores in another encoding, and the phrase that says
    so. serve: which backend writes and reads K and V of a layer in these formats (v None for MLA).
    otherwise: other options under which these formats would be served, checked as `serve` checks.
    """

    role: Role
    model: str
    compute_dtype: ComputeDtype
    compute_because: str
    page_size: int
    device_encodings: Mapping[KVDtype, tuple[KVDtype, str]]
    serve: Callable[[LayerGeometry, KVDtype, KVDtype | None], Served]
    otherwise: Callable[[LayerGeometry, KVDtype, KVDtype | None], tuple[WayOut, ...]] = (
        lambda layer, k, v: ()
    )


@dataclass(frozen=True, slots=True)
class _Decision:
    """A side's format before scales and backends are known.

    wish: the checkpoint's wish, if it decided. soft: may be downgraded. is_of_layer: a
    rule or a skip for this very layer decided.
    """

    dtype: KVDtype
    source: Source
    because: str
    considered: tuple[str, ...]
    wish: KVWish | None = None
    soft: bool = False
    is_of_layer: bool = False


def resolve(
    request: KVRequest, checkpoint: CheckpointKV, geometry: ModelGeometry, around: Surroundings
) -> KVPlan:
    """Decides what every layer stores.

    Raises BadValue for rules that select nothing, BadCheckpoint for a wish that decides and cannot
    be read (or promises scales that are not there), NotServable for a hard request without a backend, and for
    wide rows beside recurrent states.
    """
    check_request(request, geometry)
    check_wide(request, geometry, around.compute_dtype)
    layers = tuple(
        _resolve_layer(layer, request, checkpoint, geometry, around) for layer in geometry.layers
    )
    plan = KVPlan(
        role=around.role,
        model=around.model,
        compute_dtype=around.compute_dtype,
        compute_because=around.compute_because,
        page_size=around.page_size,
        layers=layers,
    )
    _refuse_wide_beside_states(plan, request)
    return replace(plan, warnings=(*plan_warnings(plan, checkpoint), *_without_wide(plan, request)))


def _refuse_wide_beside_states(plan: KVPlan, request: KVRequest) -> None:
    """Refuses wide rows for models with recurrent states, which release no page before a sequence ends."""
    if plan.has_wide_rows and plan.has_states:
        raise NotServable(
            f"{request.every_wide[0].asked_by} is not offered for a model with recurrent layers",
            why="beside states no page is released early, so wide rows of every token would be kept",
            ways_out=(WayOut("leave the option out"),),
        )


def _without_wide(plan: KVPlan, request: KVRequest) -> tuple[str, ...]:
    """Returns a warning where wide rows were asked for and no layer has any."""
    asked = request.every_wide
    if not asked or any(layer.wide is not None for layer in plan.layers):
        return ()
    return (f"{asked[0].asked_by} has no effect: no layer stores rows narrower than these",)


def _resolve_layer(
    layer: LayerGeometry,
    request: KVRequest,
    checkpoint: CheckpointKV,
    geometry: ModelGeometry,
    around: Surroundings,
) -> LayerSpec:
    states = resolve_states(layer, request, geometry, around.compute_dtype)
    if not layer.has_kv:
        return LayerSpec(layer, None, None, None, states=states)
    sides = (Side.K,) if layer.attention is Attention.MLA else (Side.K, Side.V)
    decisions = {
        side: _encode_for_device(
            _decide(layer, side, request, checkpoint, geometry, around), around
        )
        for side in sides
    }
    decisions, served = _place(layer, decisions, request, geometry, around)
    choices: dict[Side, Choice] = {}
    for side, decided in decisions.items():
        scale = audit(
            layer,
            side,
            decided.dtype,
            decided.wish,
            checkpoint,
            explicit=decided.source is Source.EXPLICIT,
            missing_scales_as_one=request.missing_scales_as_one,
        )
        choices[side] = Choice(
            decided.dtype, decided.source, decided.because, decided.considered, scale
        )
    k, v = choices[Side.K], choices.get(Side.V)
    wide = wide_rows(
        request, layer, geometry, k.dtype, None if v is None else v.dtype, around.compute_dtype
    )
    return LayerSpec(layer, k, v, served.backend, served.rejected, states, wide)


# -- who decides -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of the precedence list for one side. asked None: no request at this level."""

    label: str
    asked: Request | None
    asked_by: str
    source: Source
    soft: bool = False

    def __str__(self) -> str:
        if self.asked is None:
            return f"{self.label}: {self.asked_by or 'none'}"
        return f"{self.label}: {self.asked} ({self.asked_by})"


def _decide(
    layer: LayerGeometry,
    side: Side,
    request: KVRequest,
    checkpoint: CheckpointKV,
    geometry: ModelGeometry,
    around: Surroundings,
) -> _Decision:
    """Applies the precedence list, then the default of the format that it found."""
    decided = _climb(layer, side, request, checkpoint, len(geometry.layers), around)
    if decided.is_of_layer or not decided.dtype.format.wide_ends:
        return decided
    rung = _format_default(layer, decided.dtype, request, geometry)
    places = decided.considered
    if rung.asked is None:
        return replace(decided, considered=(*places[:2], str(rung), *places[2:]))
    said = replace(rung, asked=around.compute_dtype.kv_dtype)
    considered = (*places[:2], str(said), *places[2:])
    return _Decision(around.compute_dtype.kv_dtype, rung.source, rung.asked_by, considered)


def _format_default(
    layer: LayerGeometry, dtype: KVDtype, request: KVRequest, geometry: ModelGeometry
) -> _Step:
    """The step of a format that keeps a model's ends wide; it applies if this layer is an end."""
    label, source = "format-default", Source.FORMAT_DEFAULT
    if not request.format_defaults:
        return _Step(label, None, "left out by --kv-format-defaults off", source)
    ends = dtype.format.wide_ends
    owners = [one.index for one in geometry.layers if one.has_kv]
    if layer.index not in (*owners[:ends], *owners[-ends:]):
        return _Step(label, None, "", source)
    because = (
        f"{dtype} leaves the first and last {ends} layers wide; --kv-format-defaults off does not"
    )
    return _Step(label, Follow.MODEL, because, source)


def _climb(
    layer: LayerGeometry,
    side: Side,
    request: KVRequest,
    checkpoint: CheckpointKV,
    num_layers: int,
    around: Surroundings,
) -> _Decision:
    """Goes through the list; every step, taken or not, is kept in `considered`."""
    model = around.compute_dtype.kv_dtype
    wish = wish_for(checkpoint, layer)
    rungs = _explicit_steps(layer, side, request, num_layers)
    considered = (
        *map(str, rungs),
        f"checkpoint: {_describe(wish, side)}",
        f"model: {model} ({around.compute_because})",
    )
    step = next((rung for rung in rungs if rung.asked is not None), None)
    if step is not None and isinstance(step.asked, KVDtype):
        return _Decision(
            step.asked,
            step.source,
            step.asked_by,
            considered,
            soft=step.soft,
            is_of_layer=step in rungs[:2],
        )
    if step is not None and step.asked is Follow.MODEL:
        return _Decision(model, step.source, f"{step.asked_by} (model dtype)", considered)

    if isinstance(wish, UnreadableWish):
        raise BadCheckpoint(
            f"{wish.where} asks for {wish.asked} in layer {layer.index} of {around.model}",
            why=wish.why,
            tried=considered,
            ways_out=(*_nearest(wish), STORE_MODEL_DTYPE),
        )
    wished = None if wish is None else _wished(wish, side)
    if wish is None or wished is None:
        return _Decision(model, Source.MODEL, around.compute_because, considered)
    return _Decision(wished, Source.CHECKPOINT, wish.where, considered, wish, soft=True)


def _nearest(wish: UnreadableWish) -> tuple[WayOut, ...]:
    if wish.nearest is None:
        return ()
    arguments = (KV_FORMAT, str(wish.nearest))
    return (WayOut("choose the nearest format there is", arguments),)


def _explicit_steps(
    layer: LayerGeometry, side: Side, request: KVRequest, num_layers: int
) -> tuple[_Step, ...]:
    """Steps 1 to 3, in order."""
    rule = _closest_rule(layer, side, request, num_layers)
    skip = next((s for s in request.skips if s.selector.matches(layer, num_layers)), None)
    steps = [
        _Step("rule", None, "", Source.EXPLICIT)
        if rule is None
        else _Step("rule", _rule_side(rule, side), rule.asked_by, Source.EXPLICIT),
        _Step("skip", None, "", Source.SKIP)
        if skip is None
        else _Step("skip", Follow.MODEL, skip.asked_by, Source.SKIP),
    ]
    if not request.explicit:
        steps.append(_Step("global", None, "", Source.EXPLICIT))
    for number, asked in enumerate(request.explicit):
        label = "overridden" if number else "global"
        steps.append(_Step(label, _side(asked, side), asked.asked_by, Source.EXPLICIT))
    if request.inherited is not None:
        asked_by = f"the target's {request.inherited.asked_by}"
        steps.append(
            _Step("inherited", _side(request.inherited, side), asked_by, Source.EXPLICIT, soft=True)
        )
    return tuple(steps)


def _closest_rule(
    layer: LayerGeometry, side: Side, request: KVRequest, num_layers: int
) -> LayerRule | None:
    """Returns the most specific rule for this side. Raises BadValue if two equally close ones disagree."""
    rules = [rule for rule in request.rules if _rule_side(rule, side) is not None]
    return closest(
        rules, layer, num_layers, lambda rule: _rule_side(rule, side), side.value.upper()
    )


def _rule_side(rule: LayerRule, side: Side) -> Request | None:
    return rule.k if side is Side.K else rule.v


def _side(asked: Asked, side: Side) -> Request:
    return asked.format.k if side is Side.K else asked.format.v


def _describe(wish: KVWish | UnreadableWish | None, side: Side) -> str:
    if wish is None:
        return "none"
    if isinstance(wish, UnreadableWish):
        return f"{wish.asked}, unreadable ({wish.where})"
    wished = _wished(wish, side)
    return f"{'model dtype' if wished is None else wished} ({wish.where})"


def _wished(wish: KVWish, side: Side) -> KVDtype | None:
    return wish.k if side is Side.K else wish.v


def _encode_for_device(decided: _Decision, around: Surroundings) -> _Decision:
    if decided.dtype not in around.device_encodings:
        return decided
    dtype, phrase = around.device_encodings[decided.dtype]
    return replace(decided, dtype=dtype, because=f"{decided.because} ({phrase})")


# -- who serves --------------------------------------------------------------------------------


def _place(
    layer: LayerGeometry,
    decisions: dict[Side, _Decision],
    request: KVRequest,
    geometry: ModelGeometry,
    around: Surroundings,
) -> tuple[dict[Side, _Decision], Served]:
    """Finds a backend; soft sides that no backend serves become the model dtype."""

    def serve(found: Mapping[Side, _Decision]) -> Served:
        v = found.get(Side.V)
        return around.serve(layer, found[Side.K].dtype, None if v is None else v.dtype)

    served = serve(decisions)
    if served.is_served:
        return decisions, served
    refused = served
    if not request.strict:
        for given_up in _soft_subsets(decisions):
            lowered = {
                side: _downgrade(decided, refused, around) if side in given_up else decided
                for side, decided in decisions.items()
            }
            served = serve(lowered)
            if served.is_served:
                return lowered, served
    raise _not_servable(layer, decisions, refused, geometry, around)


def _soft_subsets(decisions: Mapping[Side, _Decision]) -> Sequence[frozenset[Side]]:
    """Sets of sides to downgrade, smallest first, so that no side is downgraded needlessly."""
    soft = [side for side, decided in decisions.items() if decided.soft]
    return [frozenset({side}) for side in soft] + ([frozenset(soft)] if len(soft) > 1 else [])


def _downgrade(decided: _Decision, refused: Served, around: Surroundings) -> _Decision:
    reasons = "; ".join(f"{r.backend}: {r.reason}" for r in refused.rejected)
    return replace(
        decided,
        dtype=around.compute_dtype.kv_dtype,
        source=Source.DOWNGRADE,
        because=f"{decided.because} wished for {decided.dtype}, which nothing here serves ({reasons})",
        wish=None,
    )


def _not_servable(
    layer: LayerGeometry,
    decisions: Mapping[Side, _Decision],
    refused: Served,
    geometry: ModelGeometry,
    around: Surroundings,
) -> NotServable:
    asked = "/".join(dict.fromkeys(str(decided.dtype) for decided in decisions.values()))
    by = ", ".join(dict.fromkeys(decided.because for decided in decisions.values()))
    sizes = f"head sizes {layer.head_dim_k}/{layer.head_dim_v}"
    return NotServable(
        f"no backend can store and read {asked} in {around.role.value} layer {layer.index} "
        f"({layer.attention.value}, {'causal' if layer.causal else 'non-causal'}, {sizes}); asked by {by}",
        why="every backend refused",
        tried=[f"{r.backend}: {r.reason}" for r in refused.rejected],
        ways_out=_ways_out(layer, decisions, geometry, around),
    )


def _ways_out(
    layer: LayerGeometry,
    decisions: Mapping[Side, _Decision],
    geometry: ModelGeometry,
    around: Surroundings,
) -> list[WayOut]:
    """Returns ways out that would not be refused too: a narrow format that every layer can store, the
    model dtype for some or all layers, or another option.
    """
    flag = "--kv-cache-rule" if around.role is Role.DRAFT else KV_FORMAT
    prefix = "draft:" if around.role is Role.DRAFT else ""
    everywhere = "draft:0-:" if around.role is Role.DRAFT else ""
    owners = [one for one in geometry.layers if one.has_kv]
    model = around.compute_dtype.kv_dtype

    def refuses(one: LayerGeometry, k: KVDtype, v: KVDtype) -> bool:
        latent = one.attention is Attention.MLA
        return not around.serve(one, k, None if latent else v).is_served

    def stuck(k: KVDtype, v: KVDtype) -> list[LayerGeometry]:
        return [one for one in owners if refuses(one, k, v)]

    narrow = (KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.INT8_PER_TOKEN_HEAD)
    works = next((str(dtype) for dtype in narrow if not stuck(dtype, dtype)), None)
    model_works = not stuck(model, model)
    k = decisions[Side.K].dtype
    v = decisions[Side.V].dtype if Side.V in decisions else k
    ways: list[WayOut] = []
    if any(decided.is_of_layer for decided in decisions.values()):
        # A rule is closer than every other flag, so the rule itself must change.
        names = [*((works,) if works else ()), *((Follow.MODEL.value,) if model_works else ())]
        if names:
            ways.append(WayOut(f"name {' or '.join(names)} in the rule for this layer"))
    else:
        if works:
            ways.append(WayOut("choose a format that works here", (flag, everywhere + works)))
        left = stuck(k, v)
        if len(left) < len(owners) and not any(refuses(one, model, model) for one in left):
            rule = f"{prefix}{','.join(str(one.index) for one in left)}:model"
            ways.append(WayOut("store these layers in the model dtype", ("--kv-cache-rule", rule)))
        if model_works and around.role is Role.DRAFT:
            text = "store the model dtype instead"
            ways.append(WayOut(text, (flag, everywhere + Follow.MODEL.value)))
        elif model_works:
            ways.append(STORE_MODEL_DTYPE)
    latent = layer.attention is Attention.MLA
    return [*ways, *around.otherwise(layer, k, None if latent else v)]
