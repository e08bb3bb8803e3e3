"""gpt-oss: learned sinks on every layer, a window on every other one, experts with biases."""

from __future__ import annotations

from collections.abc import Iterator

from kvant.models.geometry.family import NORMS, Family, Layers, attention_layers
from kvant.models.geometry.fields import Fields
from kvant.models.geometry.heads import read_heads
from kvant.models.geometry.parameters import (
    Weight,
    attention,
    experts,
    norms,
    other,
    router,
    vector,
)
from kvant.models.geometry.windows import full_every, read_window, windows_of

_HEAD_DIM = 64  # GptOssConfig's default


def _layers(fields: Fields, prefix: str) -> Layers:
    heads = read_heads(fields, head_dim=_HEAD_DIM, kv_defaults_to_q=True)
    windows = windows_of(fields, full_every(fields, 2), read_window(fields))
    return attention_layers(prefix, heads, windows, sinks=True)


def _weights(fields: Fields, layers: Layers) -> Iterator[Weight]:
    hidden, size = fields.integer("hidden_size"), fields.integer("intermediate_size")
    count = fields.integer("num_local_experts", "num_experts")
    bias = fields.flag("attention_bias", True)
    for layer in layers:
        at = layer.name.removesuffix(".self_attn")
        yield from attention(layer, hidden, qkv_bias=bias, o_bias=bias)
        yield router(f"{at}.mlp.router", count, hidden)
        yield vector(f"{at}.mlp.router.bias", count)
        yield from experts(f"{at}.mlp", count, hidden, size, columns_first=True)
        yield other(f"{at}.mlp.experts.gate_up_proj_bias", count, 2 * size)
        yield other(f"{at}.mlp.experts.down_proj_bias", count, hidden)
        yield from norms(at, hidden, *NORMS)


GPT_OSS = Family(
    "gpt-oss", ("gpt_oss",), ("GptOssForCausalLM",), _layers, _weights,
    defaults={"sliding_window": 128},
)  # fmt: skip
