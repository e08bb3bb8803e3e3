"""Head counts and head sizes, read once and checked against each other."""

from __future__ import annotations

from dataclasses import dataclass

from kvant.models.geometry.fields import Fields


@dataclass(frozen=True, slots=True)
class Heads:
    """num_q heads read num_kv heads' keys (head_dim_k numbers) and values (head_dim_v numbers)."""

    num_q: int
    num_kv: int
    head_dim_k: int
    head_dim_v: int


def read_heads(
    fields: Fields, *, head_dim: int | None = None, kv_defaults_to_q: bool = False
) -> Heads:
    """num_attention_heads, num_key_value_heads and head_dim.

    head_dim: what the family's class takes where the config has none; None for hidden_size divided
    by the heads. kv_defaults_to_q: the class takes a missing num_key_value_heads as multi-head
    attention; other classes would take a number of their own, which no config means.
    """
    num_q = fields.integer("num_attention_heads")
    num_kv = fields.optional_integer("num_key_value_heads")
    if num_kv is None:
        if not kv_defaults_to_q:
            raise fields.bad("num_key_value_heads", "a model cannot be planned without it")
        num_kv = num_q
    refuse_uneven(fields, "num_key_value_heads", num_q, num_kv)
    size = fields.optional_integer("head_dim") or head_dim or divided_head_dim(fields, num_q)
    return Heads(num_q, num_kv, size, size)


def refuse_uneven(fields: Fields, name: str, num_q: int, num_kv: int) -> None:
    """Raises if KV heads would serve different numbers of query heads."""
    if num_q % num_kv:
        raise fields.bad(name, f"{num_q} query heads cannot share {num_kv} KV heads evenly")


def divided_head_dim(fields: Fields, num_q: int) -> int:
    hidden = fields.integer("hidden_size")
    if hidden % num_q:
        raise fields.bad(
            "num_attention_heads",
            f"hidden_size {hidden} is no multiple of it, and there is no head_dim",
        )
    return hidden // num_q
