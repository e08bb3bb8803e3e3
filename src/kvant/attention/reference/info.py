"""What the reference backend serves, without torch."""

from __future__ import annotations

from kvant.attention.need import BackendInfo, Need
from kvant.kv.geometry import Attention


def refuse(need: Need) -> str | None:
    """Serve every format, device, window and head size that the format itself allows; no MLA yet."""
    layer = need.layer
    if layer.attention is Attention.MLA or need.v is None:
        return "MLA's latent cache is not implemented yet"
    if layer.num_kv_heads < 1 or layer.num_q_heads % layer.num_kv_heads:
        return f"{layer.num_q_heads} query heads do not share {layer.num_kv_heads} KV heads evenly"
    return need.k.format.refuse_head_dim(layer.head_dim_k) or need.v.format.refuse_head_dim(
        layer.head_dim_v
    )


INFO = BackendInfo("reference", "kvant.attention.reference.backend", refuse, batch_invariant=True)
