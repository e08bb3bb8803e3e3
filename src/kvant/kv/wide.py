"""Which layers store rows a second time, wide: those of the first and of the latest tokens.

The tokens near a query decide most of what narrow formats lose. Every token's row is stored in the layer's
own formats. Rows of the first `sink` and of the last `recent` tokens are stored in wide formats too, in pages
that are released behind that window. If one side alone is wide, these pages hold the other one as the layer
stores it, so that a kernel finds both sides of a row in one page. A query at position i reads key j wide
where j < sink or i - j < recent. That depends on the two positions alone. So tokens depend neither on how a
prompt is cut nor on cached prefixes, and a rejected draft leaves nothing behind: no row is ever converted.
"""

from __future__ import annotations

from kvant.errors import BadValue, WayOut
from kvant.kv.dtype import ComputeDtype, Follow, KVDtype
from kvant.kv.format import ScalePlace
from kvant.kv.geometry import Attention, LayerGeometry, ModelGeometry
from kvant.kv.names import Request, SideRequests
from kvant.kv.request import AskedWide, KVRequest
from kvant.kv.spec import Choice, Scale, ScaleState, Source, WideRows

SINK_TOKENS = 16
"""First tokens that are wide beside recent ones unless a request says otherwise: those of a usual page."""

_WHICH = "wide rows are those of causal layers with keys and values of every token"


def ask_wide(
    sink: int | None, recent: int | None, stored: SideRequests | None, *, asked_by: str
) -> AskedWide | None:
    """Reads the options; None where nothing is asked. Raises BadValue for options without recent tokens.

    sink, recent: tokens. stored: the format of wide rows, None for the model dtype.
    """
    if not recent:
        if sink or stored is not None:
            raise BadValue(
                f"{asked_by}: no recent tokens are wide",
                why="first tokens are stored wide beside the recent ones only",
                ways_out=(WayOut("store recent tokens wide", ("--kv-recent-tokens", "128")),),
            )
        return None
    model = SideRequests(Follow.MODEL, Follow.MODEL)
    return AskedWide(SINK_TOKENS if sink is None else sink, recent, stored or model, asked_by)


def check_wide(request: KVRequest, geometry: ModelGeometry, compute: ComputeDtype) -> None:
    """Raises BadValue for wide rows that none of the layers asked can have, or in a narrow format."""
    for asked in request.every_wide:
        for side in asked.format.named:
            dtype = _dtype(side, compute)
            if dtype is None or _refused(dtype):
                raise BadValue(
                    f"{asked.asked_by}: wide rows cannot be {side}",
                    why="they have 8 bits or more, and no scale from the checkpoint",
                    ways_out=(
                        WayOut("store the model dtype: leave --kv-recent-dtype out"),
                        WayOut(
                            "store 8 bits", ("--kv-recent-dtype", str(KVDtype.INT8_PER_TOKEN_HEAD))
                        ),
                    ),
                )
    able = [layer for layer in geometry.layers if reads_all(layer, geometry)]
    if request.wide is not None and not able:
        raise BadValue(
            f"{request.wide.asked_by}: no layer of {geometry.architecture} can store wide rows",
            why=_WHICH,
            ways_out=(WayOut("leave the option out"),),
        )
    num_layers = len(geometry.layers)
    for rule in request.wide_rules:
        if rule.wide and not any(rule.selector.matches(layer, num_layers) for layer in able):
            raise BadValue(
                f"{rule.asked_by}: {rule.selector.text!r} selects no layer that can store wide rows",
                why=_WHICH,
                ways_out=(WayOut("leave recent_tokens out of this rule"),),
            )


def reads_all(layer: LayerGeometry, geometry: ModelGeometry) -> bool:
    """Whether a layer owns keys and values, and all layers that read them are causal and without a window."""
    readers = [one for one in geometry.layers if one.shared_with == layer.index]
    return layer.attention is Attention.FULL and all(
        one.causal and one.window is None for one in (layer, *readers)
    )


def wide_rows(
    request: KVRequest,
    layer: LayerGeometry,
    geometry: ModelGeometry,
    k: KVDtype,
    v: KVDtype | None,
    compute: ComputeDtype,
) -> WideRows | None:
    """Returns the wide rows of a layer that stores k and v; None where it has none."""
    asked = request.wide_of(layer, len(geometry.layers))
    if asked is None or v is None or not reads_all(layer, geometry):
        return None
    wide_k, wide_v = (_dtype(side, compute) for side in (asked.format.k, asked.format.v))
    if not any(
        wide is not None and own.format.bits < wide.format.bits
        for own, wide in ((k, wide_k), (v, wide_v))
    ):
        return None
    return WideRows(_choice(wide_k, asked), _choice(wide_v, asked), asked.sink, asked.recent)


def _dtype(side: Request | None, compute: ComputeDtype) -> KVDtype | None:
    if isinstance(side, KVDtype):
        return side
    return compute.kv_dtype if side is Follow.MODEL else None


def _refused(dtype: KVDtype) -> bool:
    return dtype.format.bits < 8 or dtype.format.scale_place is ScalePlace.PARAMETER


def _choice(dtype: KVDtype | None, asked: AskedWide) -> Choice | None:
    if dtype is None:
        return None
    return Choice(dtype, Source.EXPLICIT, asked.asked_by, (), Scale(ScaleState.NONE))
