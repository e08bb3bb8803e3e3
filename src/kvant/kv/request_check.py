"""Requests that are meaningless for a model in any format."""

from __future__ import annotations

from kvant.errors import BadValue, WayOut
from kvant.kv.dtype import Follow
from kvant.kv.geometry import Attention, ModelGeometry
from kvant.kv.names import Request
from kvant.kv.request import KVRequest, Selector


def check_request(request: KVRequest, geometry: ModelGeometry) -> None:
    """Raise BadValue for rules and skips that select nothing, and for pairs where K and V are one."""
    _refuse_empty_selectors(request, geometry)
    _refuse_pairs_on_latents(request, geometry)


def _refuse_empty_selectors(request: KVRequest, geometry: ModelGeometry) -> None:
    """A selector that reaches no layer with KV of its own is a mistake, not a no-op."""
    num_layers = len(geometry.layers)
    asked: list[tuple[Selector, str]] = [(r.selector, r.asked_by) for r in request.rules]
    asked += [(s.selector, s.asked_by) for s in request.skips]
    for selector, asked_by in asked:
        hit = [layer for layer in geometry.layers if selector.matches(layer, num_layers)]
        if any(layer.has_kv for layer in hit):
            continue
        shared = next((layer for layer in hit if layer.shared_with is not None), None)
        if shared is not None:
            why = f"layer {shared.index} keeps no KV: it reads layer {shared.shared_with}'s"
            ways = (WayOut(f"address the owner, layer {shared.shared_with}"),)
        else:
            why = "it keeps no KV" if hit else "it matches no layer"
            ways = (WayOut("address one of the layers listed"),)
        raise BadValue(
            f"{asked_by}: {selector.text!r} selects nothing that is stored",
            why=f"{why}; {_list_layers(geometry)}",
            ways_out=ways,
        )


def _list_layers(geometry: ModelGeometry) -> str:
    kinds: dict[str, list[str]] = {}
    for layer in geometry.layers:
        kind = "sliding_window" if layer.attention is Attention.SLIDING else layer.attention.value
        kinds.setdefault(kind, []).append(str(layer.index))
    listed = "; ".join(f"{kind}: {', '.join(indices)}" for kind, indices in kinds.items())
    return f"layers of this model: {listed}; names like {geometry.layers[0].name!r}"


def _refuse_pairs_on_latents(request: KVRequest, geometry: ModelGeometry) -> None:
    if not any(layer.attention is Attention.MLA for layer in geometry.layers):
        return
    asked: list[tuple[Request | None, Request | None, str]]
    asked = [(a.format.k, a.format.v, a.asked_by) for a in request.explicit[:1]]
    asked += [(rule.k, rule.v, rule.asked_by) for rule in request.rules]
    for k, v, asked_by in asked:
        if k is not v:
            raise BadValue(
                f"{asked_by}: K and V cannot differ in {geometry.architecture}",
                why="its attention keeps one latent instead of keys and values",
                ways_out=(
                    WayOut("name one format", ("--kv-cache-dtype", str(k or v or Follow.MODEL))),
                ),
            )
