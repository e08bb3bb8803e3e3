"""Checks the tensors of a DFlash drafter's checkpoint before any weight is loaded; without torch.

fc, hidden_norm             from the tapped hidden states to context features
layers.N.self_attn.*        q_proj k_proj v_proj o_proj, q_norm k_norm, attention_sink_bias
layers.N.mlp.*              gate_proj up_proj down_proj
layers.N.*layernorm, norm
embed_tokens, lm_head       optional: the target's are used if they are missing
d2t, t2d                    speculators' smaller vocabulary: token = number + d2t[number]
mask_embedding              optional: the embedding of masked positions; MiMo ships mask_embedding.pt
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant.errors import BadCheckpoint, ConfigError, NotServable, WayOut
from kvant.kv.checkpoint.json_file import COMPARE_CONFIG, COPY_AGAIN, INCOMPLETE
from kvant.kv.checkpoint.safetensors_header import Header, read_header
from kvant.kv.checkpoint.scales import read_scale_name
from kvant.kv.geometry import ModelGeometry
from kvant.kv.spec import KVPlan
from kvant.models.geometry import DraftFacts
from kvant.models.geometry.fields import Fields
from kvant.models.geometry.weight_recipe import NoRecipe, read_recipe
from kvant.models.weight_audit import (
    NUMBERS,
    OF_KV,
    Tensors,
    TensorState,
    TensorUse,
    WeightAudit,
    use_of_scale,
)

MASK_EMBEDDING_FILE = "mask_embedding.safetensors"
_PICKLED_MASK = "mask_embedding.pt"  # as MiMo publishes it
_MASK = "mask_embedding"

_UNUSED: Mapping[str, str] = {
    "verifier_norm.weight": "a copy of the target's weight, for training only",
    "verifier_lm_head.weight": "a copy of the target's weight, for training only",
    "rotary_emb.inv_freq": "its frequencies follow from config.json",
}
"""Tensors that nothing reads, and why."""

_NOT_WHOLE = "a drafter that is run without some of its weights drafts nonsense"
_TABLES = frozenset({"d2t", "t2d"})
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_NUMBERS = _FLOATS | {"BOOL", "U8", "I8", "I16", "I32", "I64"}


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Values of config.json that the network needs beside its geometry."""

    rms_norm_eps: float
    has_bias: bool
    intermediate_size: int


def read_network(config: Mapping[str, Any]) -> NetworkConfig:
    """Reads the network's values. Raises NotServable for a network that Kvant would compute wrongly."""
    top = Fields(config)
    inner = top.inside("transformer_layer_config") or top
    dflash = top.inside("dflash_config")
    for section in (top, inner, *(() if dflash is None else (dflash,))):
        if section.has("is_neox_style") and not section.flag("is_neox_style"):
            raise _other_network("is_neox_style false", "Kvant's drafter rotates halves of a head")
        if section.has("use_aux_hidden_state") and not section.flag("use_aux_hidden_state"):
            raise _other_network("use_aux_hidden_state false", "there would be nothing to read")
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            raise _other_network("a partial_rotary_factor", "Kvant's drafter rotates whole heads")
    activation = inner.text("hidden_act") or "silu"
    if activation != "silu":
        raise _other_network(f"hidden_act {activation}", "Kvant's drafter computes silu")
    recipe = read_recipe(config)
    if isinstance(recipe, NoRecipe) or (recipe is not None and recipe.groups):
        raise NotServable(
            "config.json: the drafter's weights are quantised (quantization_config)",
            why="Kvant stacks the drafter's K and V projections, which it does not do with codes",
            ways_out=(WayOut("use the drafter's unquantised checkpoint"),),
        )
    return NetworkConfig(
        rms_norm_eps=inner.number("rms_norm_eps", 1e-6),
        has_bias=inner.flag("attention_bias"),
        intermediate_size=inner.integer("intermediate_size"),
    )


def read_tensors(directory: Path, headers: Sequence[Header] | None) -> Tensors | None:
    """Returns dtype and shape of a drafter's tensors by name; None without safetensors files.

    A mask embedding in a file of its own takes the place of the checkpoint's. Raises BadCheckpoint if that
    file holds none.
    """
    if headers is None:
        return None
    path = directory / MASK_EMBEDDING_FILE
    own = [read_header(path)] if path.is_file() else []
    if any(_MASK not in header.tensors for header in own):
        raise BadCheckpoint(
            f"{path} holds no tensor {_MASK}", why=INCOMPLETE, ways_out=(COPY_AGAIN,)
        )
    return {
        name: (entry.dtype, entry.shape)
        for header in (*headers, *own)
        for name, entry in header.tensors.items()
    }


def audit_drafter(
    tensors: Tensors,
    config: Mapping[str, Any],
    geometry: ModelGeometry,
    facts: DraftFacts,
    kv: KVPlan,
) -> WeightAudit:
    """Returns what every tensor of a drafter is for, and which are missing or wrong. Pure.

    tensors: as `read_tensors` returns them. kv: the drafter's KV plan.
    """
    needed = required_tensors(read_network(config), geometry, facts)
    optional = _optional_tensors(geometry, facts)
    found = []
    for name, (dtype, shape) in tensors.items():
        plain = plain_name(name)
        found.append(_use(name, dtype, shape, needed.get(plain) or optional.get(plain), kv))
    for name in needed.keys() - set(map(plain_name, tensors)):
        fault = BadCheckpoint(f"{name} is missing", why=INCOMPLETE, ways_out=(COPY_AGAIN,))
        found.append(_tensor(name, TensorState.MISSING, INCOMPLETE, fault=fault))
    return WeightAudit(tuple(sorted(found, key=lambda one: one.name)))


def _use(
    name: str, dtype: str, shape: tuple[int, ...], expected: tuple[int, ...] | None, kv: KVPlan
) -> TensorUse:
    """Returns what a stored tensor is for. expected: its shape; None if the network has no such tensor."""
    plain = plain_name(name)
    numbers = _NUMBERS if plain in _TABLES else _FLOATS
    if read_scale_name(name) is not None:
        state, because = use_of_scale(name, kv)
        return _tensor(name, state, because, dtype, shape, role=OF_KV)
    if plain in _UNUSED:
        return _tensor(name, TensorState.UNUSED, _UNUSED[plain], dtype, shape)
    if expected is None:
        what, because = f"{name} is no part of a DFlash drafter", _NOT_WHOLE
        way = WayOut("give a DFlash drafter that was trained for this target")
    elif shape != expected:
        what = f"{name} has the shape {list(shape)}"
        because, way = f"config.json and the target make it {list(expected)}", COMPARE_CONFIG
    elif dtype not in numbers:
        what, because = f"{name} is stored as {dtype}", "it holds codes, and Kvant reads numbers"
        way = WayOut("use the drafter's unquantised checkpoint")
    else:
        return _tensor(name, TensorState.USED, "loaded as the compute dtype", dtype, shape)
    fault = BadCheckpoint(what, why=because, ways_out=(way,))
    return _tensor(name, TensorState.WRONG, because, dtype, shape, fault=fault)


def _tensor(
    name: str,
    state: TensorState,
    because: str,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    *,
    role: str = NUMBERS,
    fault: BadCheckpoint | None = None,
) -> TensorUse:
    layer = name.rpartition(".")[0]
    return TensorUse(name, layer, dtype or "absent", role, state, because, dtype, shape, fault)


def refuse_pickled_mask(directory: Path) -> ConfigError | None:
    """Returns the error for a mask embedding that is stored as a pickle alone, else None."""
    path, wanted = directory / _PICKLED_MASK, directory / MASK_EMBEDDING_FILE
    if not path.is_file() or wanted.is_file():
        return None
    command = (
        "import torch, safetensors.torch as s; "
        f"t = torch.load('{path}', weights_only=True); "
        "t = t['embedding'] if isinstance(t, dict) else t; "
        f"s.save_file({{'mask_embedding': t.reshape(-1).contiguous()}}, '{wanted}')"
    )
    return BadCheckpoint(
        f"{directory} has its mask embedding in {_PICKLED_MASK}",
        why="that is a Python pickle, which can run code when opened; without it drafts are nonsense",
        ways_out=(WayOut(f'if you trust it, convert it once: python -c "{command}"'),),
    )


def plain_name(name: str) -> str:
    """Returns a tensor's name without the prefix "model." of some exporters."""
    return name.removeprefix("model.")


def required_tensors(
    network: NetworkConfig, geometry: ModelGeometry, facts: DraftFacts
) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every required tensor, by name."""
    hidden, wide = geometry.hidden_size, network.intermediate_size
    needed: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, hidden * len(facts.target_layer_ids)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in geometry.layers:
        at = f"layers.{layer.index}"
        q_width = layer.num_q_heads * layer.head_dim_k
        kv_width = layer.num_kv_heads * layer.head_dim_k
        for name, rows, columns in (
            ("q_proj", q_width, hidden),
            ("k_proj", kv_width, hidden),
            ("v_proj", kv_width, hidden),
            ("o_proj", hidden, q_width),
        ):
            needed[f"{at}.self_attn.{name}.weight"] = (rows, columns)
            if network.has_bias:
                needed[f"{at}.self_attn.{name}.bias"] = (rows,)
        for name in ("q_norm", "k_norm"):
            needed[f"{at}.self_attn.{name}.weight"] = (layer.head_dim_k,)
        if layer.sinks:
            needed[f"{at}.self_attn.attention_sink_bias"] = (layer.num_q_heads,)
        for name, rows, columns in (
            ("gate_proj", wide, hidden),
            ("up_proj", wide, hidden),
            ("down_proj", hidden, wide),
        ):
            needed[f"{at}.mlp.{name}.weight"] = (rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            needed[f"{at}.{name}.weight"] = (hidden,)
    if _has_own_vocabulary(geometry, facts):
        needed["lm_head.weight"] = (facts.draft_vocab_size, hidden)
        needed["d2t"] = (facts.draft_vocab_size,)
    return needed


def _optional_tensors(geometry: ModelGeometry, facts: DraftFacts) -> dict[str, tuple[int, ...]]:
    hidden, vocab = geometry.hidden_size, facts.target_vocab_size
    return {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (facts.draft_vocab_size, hidden),
        "mask_embedding": (hidden,),
        "d2t": (facts.draft_vocab_size,),
        "t2d": (vocab,),
    }


def _has_own_vocabulary(geometry: ModelGeometry, facts: DraftFacts) -> bool:
    return facts.draft_vocab_size != facts.target_vocab_size


def _other_network(what: str, why: str) -> NotServable:
    return NotServable(
        f"config.json: the drafter has {what}",
        why=why,
        ways_out=(WayOut("give a DFlash drafter without it"),),
    )
