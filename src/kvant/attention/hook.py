"""The one function through which transformers' attention layers reach Kvant's pages.

    model(input_ids, position_ids=.., use_cache=False, kvant=StepCall)
        -> each attention layer: attend_through_pages(module, q, k, v, None, .., kvant=StepCall)
            -> backend.write (unless the layer reads another's cache), then backend.attend

The step travels in the keyword `kvant`; there is no global state. What a layer asks of its
attention must be something this function honours and the plan knows: any keyword it has no meaning
for, and any disagreement with the plan's geometry, is an `EngineFault` naming the layer's class.
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

# Keywords that models hand through to attention and that ask for nothing here: positions are
# already in q and k, and hidden states are collected outside of attention.
_WITHOUT_MEANING = frozenset({"position_ids", "cache_position", "output_hidden_states"})
# Keywords that ask for nothing as long as they are None or False.
_MUST_BE_FALSE = frozenset({"use_cache", "output_attentions", "output_router_logits", "labels"})


def register() -> None:
    """Make `attn_implementation="kvant"` known to transformers; doing it again changes nothing.

    No mask function is registered beside it: transformers then builds no mask at all.
    """
    AttentionInterface.register(ATTENTION_NAME, attend_through_pages)
    if ATTENTION_NAME in ALL_MASK_ATTENTION_FUNCTIONS:
        raise EngineFault(f"somebody registered a mask function for {ATTENTION_NAME!r} attention")


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
    """Query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv] -> [1, T, Hq, Dv].

    Query and key come after rotary. Writes key and value into the layer's pages, then attends over
    what is stored there; a layer that shares another's KV writes nothing.
    """
    call = _call(module, kvant)
    layer = _layer(module, call)
    step = call.step
    _check_others(module, others)
    if attention_mask is not None:
        raise _fault(module, "was given an attention mask; Kvant's layers know only the step's")
    if dropout:
        raise _fault(module, f"asks for dropout {dropout}")
    if query.shape[0] != 1 or query.shape[2] != step.slot_mapping.shape[0]:
        raise _fault(
            module,
            f"brings queries of batch {query.shape[0]} and length {query.shape[2]}, "
            f"but the step packs {step.slot_mapping.shape[0]} tokens into a batch of one",
        )
    _check_geometry(
        module,
        layer,
        window=sliding_window,
        softcap=softcap or 0.0,
        sinks=s_aux is not None,
        causal=step.causal,
        head_dims=(query.shape[3], value.shape[3]),
        heads=(query.shape[1], key.shape[1]),
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
    """The planned geometry of the layer this module is."""
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
        if name in _WITHOUT_MEANING:
            continue
        if name in _MUST_BE_FALSE and (value is None or value is False):
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
    head_dims: tuple[int, int],
    heads: tuple[int, int],
) -> None:
    """What the layer does must be what was planned; the plan's backend was chosen for that."""
    for what, found, planned in (
        ("window", window, layer.window),
        ("soft cap", softcap, layer.softcap),
        ("sinks", sinks, layer.sinks),
        ("causal", causal, layer.causal),
        ("head sizes of K and V", head_dims, (layer.head_dim_k, layer.head_dim_v)),
        ("query and KV heads", heads, (layer.num_q_heads, layer.num_kv_heads)),
    ):
        if found != planned:
            raise _fault(module, f"has {what} {found}, the plan says {planned}")
