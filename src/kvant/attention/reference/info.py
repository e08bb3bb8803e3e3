"""What the reference backend serves, without torch."""

from __future__ import annotations

from kvant.attention.need import BackendInfo, Need


def refuse(need: Need) -> str | None:
    """Returns None: it serves every format, device, window and head size that the format itself allows."""
    layer = need.layer
    if layer.num_kv_heads < 1 or layer.num_q_heads % layer.num_kv_heads:
        return f"{layer.num_q_heads} query heads do not share {layer.num_kv_heads} KV heads evenly"
    reason = need.k.format.refuse_head_dim(layer.head_dim_k)
    if reason is None and need.v is not None:
        reason = need.v.format.refuse_head_dim(layer.head_dim_v)
    return reason


INFO = BackendInfo(
    "reference",
    "kvant.attention.reference.backend",
    refuse,
    batch_invariant=True,
    wide_rows=True,
)
