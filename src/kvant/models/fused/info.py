"""What planning knows about Kvant's own decoder of plain models, dense or of experts. No torch."""

from __future__ import annotations

from kvant.models.forward_info import ForwardFacts, ForwardInfo
from kvant.models.weights import ELEMENT_BYTES

DENSE_TYPES = ("llama", "mistral", "qwen2", "qwen3")
EXPERT_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe")
FUSED_TYPES = DENSE_TYPES + EXPERT_TYPES
"""model_type of the models whose layers it computes."""

MOST_ANGLES = 1 << 18
"""Positions whose rotary angles are kept: 64 MiB for heads of 128."""

_DEFAULT_INNER = 11008  # LlamaConfig's; the other classes' defaults are multiples of 32 too


def refuse_layers(facts: ForwardFacts) -> str | None:
    """Why the decoder does not compute this model's layers; None if it does."""
    config, kind = facts.config, facts.geometry.model_type
    if kind not in FUSED_TYPES:
        return f"Kvant's own decoder runs {', '.join(FUSED_TYPES)}, not {kind}"
    if kind == "mistral" and config.get("layer_types") is not None:
        return "a mistral with layer_types is a ministral, which Kvant's own decoder does not run"
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        return f"Kvant's own decoder computes silu, not {activation}"
    if facts.kept_codes is not None:
        return f"the weights stay quantised by {facts.kept_codes}"
    if has_experts(facts) and facts.config.get("quantization_config") is not None:
        return "it reads experts from checkpoints that do not quantise them"
    return None


def has_experts(facts: ForwardFacts) -> bool:
    """Whether layers choose among experts."""
    return facts.geometry.model_type in EXPERT_TYPES


def products(facts: ForwardFacts) -> list[tuple[int, int]]:
    """Rows and columns of the matrices that the decoder multiplies with: joined ones, and the head.

    Without experts.
    """
    geometry = facts.geometry
    hidden, layer = geometry.hidden_size, geometry.layers[0]
    heads, dim = layer.num_q_heads, layer.head_dim_k
    inner = facts.config.get("intermediate_size", _DEFAULT_INNER)
    return [
        ((heads + 2 * layer.num_kv_heads) * dim, hidden),
        (hidden, heads * dim),
        (2 * inner, hidden),
        (hidden, inner),
        (geometry.vocab_size, hidden),
    ]


def table_bytes(facts: ForwardFacts) -> int:
    """Bytes of the rotary angles of all positions, which are kept on a GPU."""
    if facts.on_cpu:
        return 0
    most = min(facts.geometry.max_model_len or MOST_ANGLES, MOST_ANGLES)
    return most * facts.geometry.layers[0].head_dim_k * ELEMENT_BYTES[facts.compute]


def _refuse(facts: ForwardFacts) -> str | None:
    if facts.quantization is not None:
        return "its products are torch's, which do not multiply with weights that Kvant rounds"
    if facts.batch_invariant and has_experts(facts):
        return "how an expert's rows are multiplied depends on their number"
    return refuse_layers(facts)


INFO = ForwardInfo("fused", "kvant.models.fused.decoder", _refuse, table_bytes)
