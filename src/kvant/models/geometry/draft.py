"""Reads the shape and weights of a DFlash drafter, and facts about its target.

Two styles of config.json. z-lab's is a Qwen3 config with a `dflash_config` section; speculators' is
a config of its own with a `transformer_layer_config` section. Both describe the same network: a few
decoder layers that read hidden states of chosen target layers and fill a block of tokens at once.

Which layers have a window and which look both ways in the block:

    z-lab        window  on every layer where `use_swa` and layer_types has no sliding layer,
                         else where layer_types says so, else nowhere
                 size    dflash_config.swa_window_size, else sliding_window
                 causal  is_causal, else dflash_config.causal, else the layers that layer_types
                         calls sliding
    speculators  window  where layer_types says so; size: sliding_window
                 causal  windowed layers, unless sliding_window_non_causal

(vLLM's models/qwen3_dflash.py and speculators' training mask, read in autumn 2026.) A layer that
looks both ways in the block still sees a window's width of the past.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvant.errors import BadCheckpoint, WayOut
from kvant.kv.geometry import LayerGeometry, ModelGeometry
from kvant.models.geometry.declared import refuse_undeclared
from kvant.models.geometry.family import attention_layer, dense_weights
from kvant.models.geometry.fields import MAX_LAYERS, MAX_TOKENS, Fields, shown
from kvant.models.geometry.heads import read_heads
from kvant.models.geometry.parameters import QKNorm, Weight, linear, norms
from kvant.models.geometry.read import read_dtype, read_max_model_len
from kvant.models.geometry.rope import check_rotary
from kvant.models.geometry.windows import LayerType, num_layers, read_layer_types, read_window

_MAX_BLOCK = 1024
_SPECULATORS_BLOCK = 8  # speculators' default block_size
_QWEN3_HEAD_DIM = 128  # Qwen3Config's default

ROTARY_FIELDS = (
    "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "head_dim",
    "hidden_size", "num_attention_heads",
)  # fmt: skip
"""Fields from which transformers' Qwen3 class computes a drafter's rotary frequencies."""

# Fields of relatives that need more than a DFlash drafter's network.
_RELATIVES = {"markov_rank": "DSpark", "selector_rank": "DFlash2"}


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """Facts for running a drafter, besides its geometry.

    block_size: tokens of a block; the first is known, so it drafts at most block_size - 1.
    target_layer_ids: decoder layers of the target whose outputs the drafter reads and concatenates in
    this order. mask_token_id: the token in the block at places to be drafted.
    draft_vocab_size: rows of the drafter's own head. If it is less than target_vocab_size, the
    checkpoint's d2t table maps its tokens to the target's.
    """

    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    draft_vocab_size: int
    target_vocab_size: int


def read_draft_geometry(
    config: Mapping[str, Any], target: ModelGeometry
) -> tuple[ModelGeometry, DraftFacts]:
    """Returns a drafter's shape and facts, checked against its target.

    Layers are called "layers.0.self_attn". Raises BadCheckpoint, naming field and value, for a
    config of another kind of model or for another target, and for invalid fields.
    """
    if not isinstance(config, Mapping):
        raise BadCheckpoint("config.json is no JSON object", why=f"it is {shown(config)}")
    top = Fields(config)
    for name, relative in _RELATIVES.items():
        if top.has(name) or _has_inside(top, "dflash_config", name):
            raise top.bad(name, f"this is a {relative} drafter; Kvant knows DFlash only")
    kind = top.text("speculators_model_type")
    if kind is not None:
        if kind != "dflash":
            raise top.bad("speculators_model_type", "Kvant knows drafters of type 'dflash'")
        return _speculators(top, target)
    if top.has("dflash_config"):
        return _z_lab(top, target)
    names = top.words("architectures") or ("of no name",)
    raise BadCheckpoint(
        f"config.json: architecture {shown(names[0])} is no DFlash drafter",
        why="it has neither dflash_config nor speculators_model_type",
        ways_out=(WayOut("give a DFlash drafter that was trained for this target"),),
    )


def draft_weights(config: Mapping[str, Any], geometry: ModelGeometry) -> Iterator[Weight] | str:
    """Returns every weight, or why they cannot be listed.

    z-lab's drafters have their own layers and projection of the target's hidden states. They use the
    target's embedding and head.
    """
    top = Fields(config)
    dflash = top.inside("dflash_config")
    if dflash is None:
        return (
            "Kvant does not know what a speculators checkpoint brings beside the drafter's layers"
        )
    return _z_lab_weights(top, dflash, geometry)


def _z_lab_weights(top: Fields, dflash: Fields, geometry: ModelGeometry) -> Iterator[Weight]:
    yield from dense_weights(reads_bias=True, qk_norm=QKNorm.HEAD)(top, geometry.layers)
    hidden, ids = geometry.hidden_size, dflash.integers("target_layer_ids", most=MAX_LAYERS)
    yield from linear("fc", hidden, hidden * len(ids or geometry.layers))
    yield from norms("", hidden, "hidden_norm", "norm")


def _z_lab(top: Fields, target: ModelGeometry) -> tuple[ModelGeometry, DraftFacts]:
    dflash = top.inside("dflash_config")
    assert dflash is not None
    kinds, sliding = _z_lab_kinds(top, dflash)
    window = None
    if any(sliding):
        window = read_window(dflash, "swa_window_size") or read_window(top)
        if window is None:
            raise top.bad("sliding_window", "layers with a window need its size")
    forced = _first_flag((top, "is_causal"), (dflash, "causal"))
    sinks = _first_flag((dflash, "attention_sink_bias"), (top, "add_swa_attention_sink_bias"))
    layers = _layers(
        top,
        [window if slides else None for slides in sliding],
        [kind is LayerType.SLIDING if forced is None else forced for kind in kinds],
        sinks=bool(sinks),
    )
    expected = top.optional_integer("num_target_layers", most=MAX_LAYERS)
    if expected is not None and expected != len(target.layers):
        raise _other_target(top, "num_target_layers", f"{len(target.layers)} layers")
    _check_hidden(top, top, target)
    vocab = top.integer("vocab_size")
    if vocab != target.vocab_size:
        raise _other_target(top, "vocab_size", f"a vocabulary of {target.vocab_size}")
    ids = dflash.integers("target_layer_ids", most=MAX_LAYERS)
    facts = DraftFacts(
        block_size=_z_lab_block(top, dflash),
        target_layer_ids=_tapped(
            dflash, "target_layer_ids", ids or _evenly_spaced(dflash, target, len(layers)), target
        ),
        mask_token_id=_mask_token(dflash, target),
        draft_vocab_size=vocab,
        target_vocab_size=vocab,
    )
    return _geometry(top, top, layers, vocab), facts


def _z_lab_kinds(top: Fields, dflash: Fields) -> tuple[Sequence[LayerType], Sequence[bool]]:
    """Returns the layers' types, and which layers have a window, as in the table above."""
    count = num_layers(top)
    kinds = read_layer_types(top, (LayerType.FULL,) * count)
    sliding = [kind is LayerType.SLIDING for kind in kinds]
    if dflash.flag("use_swa") and not any(sliding):
        sliding = [True] * count
    return kinds, sliding


def _z_lab_block(top: Fields, dflash: Fields) -> int:
    """Reads block_size, which older configs have at the top and newer ones inside."""
    inside = dflash.optional_integer("block_size", least=2, most=_MAX_BLOCK)
    outside = top.optional_integer("block_size", least=2, most=_MAX_BLOCK)
    if inside is not None and outside is not None and inside != outside:
        raise top.bad("block_size", f"dflash_config says {inside}")
    block = inside if inside is not None else outside
    if block is None:
        raise top.bad("block_size", "a drafter cannot be planned without it")
    return block


def _evenly_spaced(fields: Fields, target: ModelGeometry, count: int) -> tuple[int, ...]:
    """Returns the target layers that z-lab's code reads by default: as many as draft layers."""
    layers = len(target.layers)
    if count == 1:
        return (layers // 2,)
    first, last = 1, layers - 3
    if last <= first:
        raise fields.bad("target_layer_ids", f"a target of {layers} layers has no default for it")
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def _speculators(top: Fields, target: ModelGeometry) -> tuple[ModelGeometry, DraftFacts]:
    inner = top.inside("transformer_layer_config")
    if inner is None:
        raise top.bad("transformer_layer_config", "the drafter's layers are described there")
    if top.flag("sample_from_anchor"):
        raise top.bad("sample_from_anchor", "Kvant drafts from masked positions only")
    kinds = read_layer_types(inner, (LayerType.FULL,) * num_layers(inner))
    window = read_window(inner)
    if window is None and LayerType.SLIDING in kinds:
        raise inner.bad("sliding_window", "layers with a window need its size")
    both_ways = top.flag("sliding_window_non_causal")
    layers = _layers(
        inner,
        [window if kind is LayerType.SLIDING else None for kind in kinds],
        [kind is LayerType.SLIDING and not both_ways for kind in kinds],
        sinks=False,
    )
    _check_hidden(top, inner, target)
    vocab = inner.integer("vocab_size")
    if vocab != target.vocab_size:
        raise _other_target(inner, "vocab_size", f"a vocabulary of {target.vocab_size}")
    name = "draft_vocab_size"
    draft_vocab = top.optional_integer(name) or vocab
    if draft_vocab > target.vocab_size:
        raise _other_target(top, name, f"a vocabulary of {target.vocab_size}")
    # Number 0 is the embedding's output, so the output of decoder layer n is number n + 1.
    name = "aux_hidden_state_layer_ids"
    ids = top.integers(name, least=1, most=MAX_LAYERS)
    if ids is None:
        raise top.bad(name, "a drafter cannot be planned without it")
    block = top.optional_integer("block_size", least=2, most=_MAX_BLOCK)
    facts = DraftFacts(
        block_size=_SPECULATORS_BLOCK if block is None else block,
        target_layer_ids=_tapped(top, name, tuple(i - 1 for i in ids), target),
        mask_token_id=_mask_token(top, target),
        draft_vocab_size=draft_vocab,
        target_vocab_size=vocab,
    )
    return _geometry(top, inner, layers, draft_vocab), facts


def _layers(
    fields: Fields, windows: Sequence[int | None], causal: Sequence[bool], *, sinks: bool
) -> tuple[LayerGeometry, ...]:
    is_qwen3 = fields.text("model_type") == "qwen3"
    heads = read_heads(fields, head_dim=_QWEN3_HEAD_DIM if is_qwen3 else None)
    return tuple(
        attention_layer(index, "layers", heads, window, sinks=sinks, causal=ordered)
        for index, (window, ordered) in enumerate(zip(windows, causal, strict=True))
    )


def _geometry(
    top: Fields, inner: Fields, layers: tuple[LayerGeometry, ...], vocab_size: int
) -> ModelGeometry:
    model_type = inner.text("model_type") or "dflash"
    check_rotary(inner, by_kind=False)
    rotary = {name: inner.given(name) for name in ROTARY_FIELDS if inner.has(name)}
    refuse_undeclared(Fields(rotary), "qwen3")
    return ModelGeometry(
        architecture=(top.words("architectures") or (model_type,))[0],
        model_type=model_type,
        layers=layers,
        dtype=read_dtype(top, inner),
        vocab_size=vocab_size,
        hidden_size=inner.integer("hidden_size"),
        max_model_len=read_max_model_len(inner),
    )


def _check_hidden(top: Fields, inner: Fields, target: ModelGeometry) -> None:
    """Raises BadCheckpoint unless the drafter has the target's hidden size, since it reads hidden states."""
    wide = f"a hidden size of {target.hidden_size}"
    size = top.optional_integer("target_hidden_size")
    if size is not None and size != target.hidden_size:
        raise _other_target(top, "target_hidden_size", wide)
    if inner.integer("hidden_size") != target.hidden_size:
        raise _other_target(inner, "hidden_size", wide)


def _tapped(
    fields: Fields, name: str, ids: tuple[int, ...], target: ModelGeometry
) -> tuple[int, ...]:
    layers = len(target.layers)
    if not ids or len(set(ids)) != len(ids):
        raise fields.bad(name, "it must name at least one layer, and none twice")
    if not all(0 <= i < layers for i in ids):
        raise _other_target(fields, name, f"{layers} layers")
    return ids


def _mask_token(fields: Fields, target: ModelGeometry) -> int:
    mask = fields.integer("mask_token_id", least=0, most=MAX_TOKENS)
    if mask >= target.vocab_size:
        raise _other_target(fields, "mask_token_id", f"a vocabulary of {target.vocab_size}")
    return mask


def _other_target(fields: Fields, name: str, has: str) -> BadCheckpoint:
    fault = fields.bad(name, "")
    return BadCheckpoint(
        fault.what,
        why=f"the target has {has}: the drafter was trained for another model",
        ways_out=(WayOut("give a DFlash drafter that was trained for this target"),),
    )


def _first_flag(*places: tuple[Fields, str]) -> bool | None:
    """Returns the first of several spellings of a flag that is present, else None."""
    for fields, name in places:
        if fields.has(name):
            return fields.flag(name)
    return None


def _has_inside(top: Fields, section: str, name: str) -> bool:
    inner = top.inside(section)
    return inner is not None and inner.has(name)
