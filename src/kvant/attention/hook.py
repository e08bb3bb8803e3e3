"""The function through which transformers' attention layers reach Kvant's pages.

    model(input_ids, position_ids=.., use_cache=False, kvant=StepCall)
        -> each attention layer: attend_through_pages(module, q, k, v, None, .., kvant=StepCall)
            -> backend.write (unless the layer reads another's cache), then backend.attend

The step travels in the keyword `kvant`; there is no global state. A keyword that Kvant does not know
and whose value is not None, and any disagreement with the plan's geometry, is an `EngineFault` that
names the layer's class.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvant.attention.base import AttentionParams, StepCall
from kvant.errors import EngineFault
from kvant.kv.geometry import LayerGeometry

ATTENTION_NAME = "kvant"

# Keywords that models pass to attention and that have no effect here: q and k contain positions
# already, and hidden states and logits are collected outside of attention.
_WITHOUT_MEANING = frozenset(
    {"position_ids", "cache_position", "output_hidden_states", "logits_to_keep"}
)
# Keywords without effect while they are False. None has no effect in any keyword.
_MUST_BE_FALSE = frozenset({"use_cache", "output_attentions", "output_router_logits", "labels"})


def register() -> None:
    """Makes `attn_implementation="kvant"` known to transformers. Idempotent.

    No mask function is registered, so transformers builds no mask.
    """
    AttentionInterface.register(ATTENTION_NAME, attend_through_pages)
    if ATTENTION_NAME in ALL_MASK_ATTENTION_FUNCTIONS:
        raise EngineFault(f"other code registered a mask function for {ATTENTION_NAME!r} attention")


def attend_through_pages(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kvant: StepCall | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Writes this step's keys and values into the layer's pages, then attends over the stored rows.

    query: [1, num_q_heads, T, head_dim_k], key: [1, num_kv_heads, T, head_dim_k], both after rotary
    embedding; value: [1, num_kv_heads, T, head_dim_v]; any floating dtype. T is the step's number of
    tokens. A layer that shares another layer's KV writes nothing.

    Returns [1, T, num_q_heads, head_dim_v] in the query's dtype, and None for the attention weights.
    Raises EngineFault, before any write, if the layer needs something that Kvant lacks or disagrees
    with the plan.
    """
    call = _call(module, kvant)
    layer = _layer(module, call)
    step = call.step_of(layer.index)
    _check_others(module, others)
    if attention_mask is not None:
        raise _fault(module, "was given an attention mask; Kvant's layers know only the step's")
    if dropout:
        raise _fault(module, f"asks for dropout {dropout}")
    _check_geometry(
        module,
        layer,
        window=sliding_window,
        softcap=softcap or 0.0,
        sinks=s_aux is not None,
        causal=step.causal,
    )
    num_tokens = step.slot_mapping.shape[0]
    for what, x, heads, head_dim in (
        ("queries", query, layer.num_q_heads, layer.head_dim_k),
        ("keys", key, layer.num_kv_heads, layer.head_dim_k),
        ("values", value, layer.num_kv_heads, layer.head_dim_v),
    ):
        expected = (1, heads, num_tokens, head_dim)
        if tuple(x.shape) != expected:
            raise _fault(
                module,
                f"brings {what} of shape {tuple(x.shape)}; the plan's heads and head size and the "
                f"step's {num_tokens} tokens make {expected}",
            )
    if is_causal is not None and is_causal != step.causal:
        raise _fault(module, f"asks for is_causal={is_causal}, the step has {step.causal}")

    backend = call.backends[layer.index]
    cache = call.pool[layer.index]
    if layer.shared_with is None:
        backend.write(cache, key[0].transpose(0, 1), value[0].transpose(0, 1), step)
    params = AttentionParams(
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    out = backend.attend(cache, query[0].transpose(0, 1), step, params)
    return out[None], None


def _fault(module: nn.Module, what: str) -> EngineFault:
    name = type(module).__name__
    index = getattr(module, "layer_idx", None)
    return EngineFault(f"{name} (layer {index}) {what}")


def _call(module: nn.Module, kvant: StepCall | None) -> StepCall:
    if kvant is None:
        raise _fault(module, f"was called without a step: no keyword {ATTENTION_NAME!r} reached it")
    return kvant


def _layer(module: nn.Module, call: StepCall) -> LayerGeometry:
    """Returns the planned geometry of this module's layer."""
    index = getattr(module, "layer_idx", None)
    layers = call.pool.plan.layers
    if not isinstance(index, int) or not 0 <= index < len(layers):
        raise _fault(module, f"has no layer index among the plan's {len(layers)} layers")
    layer = layers[index].geometry
    if not layer.has_kv and layer.shared_with is None:
        raise _fault(module, f"does attention, but the plan has it as {layer.attention.value!r}")
    return layer


def _check_others(module: nn.Module, others: Mapping[str, object]) -> None:
    for name, value in others.items():
        if value is None or name in _WITHOUT_MEANING:
            continue
        if name in _MUST_BE_FALSE and value is False:
            continue
        raise _fault(module, f"passes {name}={value!r} to attention, which Kvant does not honour")


def _check_geometry(
    module: nn.Module,
    layer: LayerGeometry,
    *,
    window: int | None,
    softcap: float,
    sinks: bool,
    causal: bool,
) -> None:
    """Raises EngineFault if a layer differs from the plan: its backend was chosen for the plan's layer."""
    for what, found, planned in (
        ("window", window, layer.window),
        ("soft cap", softcap, layer.softcap),
        ("sinks", sinks, layer.sinks),
        ("causal", causal, layer.causal),
    ):
        if found != planned:
            raise _fault(module, f"has {what} {found}, the plan says {planned}")
