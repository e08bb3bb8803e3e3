"""What `kvant tune` refuses by the plan, before weights are loaded. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from kvant.errors import BadValue, NotServable, WayOut
from kvant.kv.geometry import Attention, ModelGeometry
from kvant.kv.request import AskedWide
from kvant.kv.wide import reads_all
from kvant.measure.tuning.costs import Costs
from kvant.models.stored import lists_experts
from kvant.plan.plan import Plan


def check_tunable(planned: Plan, costs: Costs) -> None:
    """Raises NotServable for a model that cannot be tuned, or not with these costs."""
    name = planned.target.local.name
    if any(layer.attention is Attention.MLA for layer in planned.target.geometry.layers):
        raise NotServable(
            f"{name} cannot be tuned: it stores one latent instead of K and V",
            why="tuning chooses formats of K and V apart",
            ways_out=(WayOut("compare formats for all layers: kvant eval"),),
        )
    reason = None if costs is Costs.MEASURED else _refuse_gradients(planned)
    if reason is not None:
        ways = [WayOut("measure each cost", ("--costs", Costs.MEASURED.value))]
        if not planned.request.on_cpu:
            ways.append(WayOut("compute on the CPU", ("--device", "cpu")))
        raise NotServable(
            f"--costs {costs.value} is not available for {name} here", why=reason, ways_out=ways
        )


def _refuse_gradients(planned: Plan) -> str | None:
    geometry, forward = planned.target.geometry, planned.forward
    if not planned.request.on_cpu:
        return "gradients are computed on a CPU, and this model runs on a GPU"
    if forward.quantization is not None or forward.activations is not None:
        return "its products round weights or activations, which transformers' modules do not"
    if geometry.has_states:
        return "it has recurrent layers, of which Kvant has no gradients"
    for layer in geometry.layers:
        if layer.shared_with is not None:
            return (
                f"layer {layer.index} reads the rows of layer {layer.shared_with}, and Kvant has gradients "
                "of rows for one reader alone"
            )
        for what, has in (("a soft cap", layer.softcap), ("sinks", layer.sinks)):
            if has:
                return (
                    f"attention of layer {layer.index} has {what}, of which Kvant has no gradients"
                )
    if lists_experts(planned.target.config):
        return "rounding changes which experts its tokens get, which no gradient shows"
    return None


def layers_with_rows(geometry: ModelGeometry) -> frozenset[int]:
    """Returns the layers that can store wide rows, by index; none beside recurrent states."""
    if geometry.has_states:
        return frozenset()
    return frozenset(layer.index for layer in geometry.layers if reads_all(layer, geometry))


def rows_to_choose(
    planned: Plan, rows: Sequence[AskedWide | None], *, named: bool
) -> list[AskedWide | None]:
    """Returns `rows`, or None alone for a model whose layers cannot store them; if named, raises BadValue."""
    if layers_with_rows(planned.target.geometry):
        return list(rows)
    asked = next((one for one in rows if one is not None), None)
    if named and asked is not None:
        raise BadValue(
            f"{asked.asked_by}: no layer of {planned.target.local.name} can store wide rows",
            why="they are those of causal layers that keep every token, in models without recurrent layers",
            ways_out=(WayOut("leave the option out"),),
        )
    return [None]
