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

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant.errors import BadCheckpoint, NotServable, WayOut
from kvant.kv.checkpoint.safetensors_header import read_headers
from kvant.kv.checkpoint.scales import read_scale_name
from kvant.kv.geometry import ModelGeometry
from kvant.models.geometry import DraftFacts
from kvant.models.geometry.fields import Fields
from kvant.models.geometry.weight_recipe import NoRecipe, read_recipe

MASK_EMBEDDING_FILE = "mask_embedding.safetensors"
_PICKLED_MASK = "mask_embedding.pt"  # as MiMo publishes it

# Copies of the target's weights that speculators needs for training only, and frequencies that
# follow from the config.
_UNUSED = frozenset({"verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq"})

_TABLES = frozenset({"d2t", "t2d"})
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


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


def check_files(
    directory: Path, config: Mapping[str, Any], geometry: ModelGeometry, facts: DraftFacts
) -> None:
    """Raises BadCheckpoint if weights are missing, have another shape, or would not be used."""
    _refuse_pickled_mask(directory)
    headers = read_headers(directory)
    if headers is None:
        raise BadCheckpoint(
            f"{directory} has no safetensors weights",
            why="the drafter is to be loaded",
            ways_out=(WayOut("fetch its weights; without them only `kvant plan` works"),),
        )
    found = {
        plain_name(name): entry for header in headers for name, entry in header.tensors.items()
    }
    needed = required_tensors(read_network(config), geometry, facts)
    optional = _optional_tensors(geometry, facts)
    for name, entry in found.items():
        expected = needed.get(name) or optional.get(name)
        if expected is None:
            if name not in _UNUSED and read_scale_name(name) is None:
                raise BadCheckpoint(
                    f"{directory}: tensor {name} is no part of a DFlash drafter",
                    why="a drafter that is run without some of its weights drafts nonsense",
                )
        elif entry.shape != expected:
            raise BadCheckpoint(
                f"{directory}: {name} has shape {list(entry.shape)}",
                why=f"config.json and the target make it {list(expected)}",
            )
        elif name not in _TABLES and entry.dtype not in _FLOATS:
            raise BadCheckpoint(
                f"{directory}: {name} is stored as {entry.dtype}",
                why="the drafter's weights are codes, and Kvant reads numbers",
                ways_out=(WayOut("use the drafter's unquantised checkpoint"),),
            )
    missing = [name for name in needed if name not in found]
    if missing:
        shown = ", ".join(missing[:4]) + (", .." if len(missing) > 4 else "")
        raise BadCheckpoint(
            f"{directory} lacks {len(missing)} of the drafter's weights: {shown}",
            why="the files are incomplete or of another model",
        )


def _refuse_pickled_mask(directory: Path) -> None:
    path, wanted = directory / _PICKLED_MASK, directory / MASK_EMBEDDING_FILE
    if not path.is_file() or wanted.is_file():
        return
    command = (
        "import torch, safetensors.torch as s; "
        f"t = torch.load('{path}', weights_only=True); "
        "t = t['embedding'] if isinstance(t, dict) else t; "
        f"s.save_file({{'mask_embedding': t.reshape(-1).contiguous()}}, '{wanted}')"
    )
    raise BadCheckpoint(
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
