"""Reads from config.json the shape that planning and storage need. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvant.errors import BadCheckpoint
from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import Attention, ModelGeometry
from kvant.models.geometry.declared import refuse_undeclared, type_of_section
from kvant.models.geometry.families import class_defaults, decoder_weights, find_family, text_fields
from kvant.models.geometry.family import Family, Layers
from kvant.models.geometry.fields import MAX_LAYERS, MAX_TOKENS, Fields, MissingField, shown
from kvant.models.geometry.rope import DYNAMIC, check_rotary, rope_section, rope_types
from kvant.models.geometry.windows import num_layers

NONE_ATTENDS = "none of its layers attends: Kvant counts memory in pages of keys and values"

_MAX_VOCABULARY = 2**28

_MAX_POSITIONS = 2**20
"""Rows of a table of positions, which a probe of CTRL computes."""

_COUNTS = re.compile(r"(?:layer|expert|block|time)s?$|depth$")
"""Ends of the names of fields that count modules."""


def read_geometry(config: Mapping[str, Any]) -> ModelGeometry:
    """Returns the shape of the model of a config.json.

    Layers have the names of the attention modules in the class that transformers'
    AutoModelForCausalLM makes of the config. Raises BadCheckpoint, naming field and value, for a
    model of an unknown family and for missing or invalid fields.
    """
    if not isinstance(config, Mapping):
        raise BadCheckpoint("config.json is no JSON object", why=f"it is {shown(config)}")
    family = find_family(config)
    fields = text_fields(config, family)
    _refuse_unread_overrides(fields, family)
    top = Fields(config)
    for name in ("rope_parameters", "rope_scaling", "layer_types") if family.in_text_config else ():
        if top.has(name):
            raise top.bad(
                name, "the decoder's fields stand in text_config: this one changes nothing"
            )
    model_type = top.text("model_type") or family.model_types[0]
    check_rotary(fields, by_kind=family.rotary_by_kind)
    for name in ("layer_types", "mlp_layer_types"):
        _refuse_other_length(fields, name)
    layers = family.layers(fields, family.prefix)
    defaults = class_defaults(config, family)
    geometry = ModelGeometry(
        architecture=(top.words("architectures") or (model_type,))[0],
        model_type=model_type,
        layers=layers,
        dtype=read_dtype(top, fields),
        vocab_size=fields.integer("vocab_size", most=_MAX_VOCABULARY),
        hidden_size=fields.integer("hidden_size"),
        max_model_len=read_max_model_len(fields),
        not_runnable=_why_not_runnable(family, fields.completed(defaults))
        or _why_none_attends(layers),
        state_dtype=read_state_dtype(fields),
    )
    _refuse_padding(fields, defaults, geometry.vocab_size)
    with suppress(MissingField):  # the cache's shape does not depend on all of them
        for _ in decoder_weights(config, family, layers):
            pass
        for _ in () if family.towers is None else family.towers(top):
            pass
    refuse_undeclared(top, model_type)
    _refuse_dropouts(top)
    for name in top.names():
        is_model = name.endswith("_config") and name != "quantization_config"
        section = top.inside(name) if is_model else None
        if section is None:
            continue
        read_dtype(section)
        said = section.text("model_type") or type_of_section(name, model_type)
        refuse_undeclared(section, said)
        _refuse_dropouts(section)
    return geometry


def _why_not_runnable(family: Family, fields: Fields) -> str | None:
    why = family.not_runnable
    return why(fields) if callable(why) else why


def _why_none_attends(layers: Layers) -> str | None:
    return NONE_ATTENDS if all(one.attention is Attention.NONE for one in layers) else None


def refuse_absurd(config: Mapping[str, Any]) -> None:
    """Raises BadCheckpoint for numbers with which a model of no family can be made or computed.

    A probe of a model with a billion layers or experts would not end.
    """
    top = Fields(config)
    sections = (top.inside(name) for name, value in config.items() if isinstance(value, Mapping))
    for fields in (top, *sections):
        assert fields is not None
        for name in fields.names():
            value, counts = fields.given(name), _COUNTS.search(name)
            if value != value:  # NaN
                raise fields.bad(name, "it must be a number")
            most = 2**16 if counts is not None and "expert" in counts[0] else MAX_LAYERS
            if counts is not None and type(value) is int and value > most:
                raise fields.bad(name, f"it must be at most {most}")
            if name == "n_positions" and type(value) is int and value > _MAX_POSITIONS:
                raise fields.bad(name, f"it must be at most {_MAX_POSITIONS}")
        if fields.given("logits_scaling") == 0:
            raise fields.bad("logits_scaling", "logits are divided by it")


def read_dtype(*sections: Fields) -> ComputeDtype:
    """Returns `dtype`, or `torch_dtype` (its former name), of the first section that has one.

    Without any it is float32, as in transformers.
    """
    for section in sections:
        for name in ("dtype", "torch_dtype"):
            word = section.text(name)
            if word is None:
                continue
            known = {dtype.value: dtype for dtype in ComputeDtype}
            if word not in known:
                raise section.bad(name, f"Kvant computes in {', '.join(known)}")
            return known[word]
    return ComputeDtype.FLOAT32


def read_state_dtype(fields: Fields) -> str | None:
    """Returns the config's dtype of recurrent states, or None."""
    return fields.text("mamba_ssm_dtype") if fields.has("mamba_ssm_dtype") else None


def read_max_model_len(fields: Fields) -> int | None:
    """Returns the longest context that the positions allow, None if the config has no number.

    `max_position_embeddings` is the length after rope scaling (transformers' meaning). A config to
    which its user added YaRN by hand often keeps the old number: there the scaled length counts,
    `original_max_position_embeddings` times `factor`, because the rotary frequencies follow these.
    Dynamic NTK scaling stretches `max_position_embeddings` itself by up to `factor`.
    """
    limit = fields.optional_integer("max_position_embeddings", most=MAX_TOKENS)
    rope = rope_section(fields)
    if limit is None or rope is None:
        return limit
    kinds = rope_types(fields)
    factor = rope.number("factor", 1.0)
    if kinds == (DYNAMIC,):
        return max(limit, min(int(limit * factor), MAX_TOKENS))
    if kinds != ("yarn",):
        return limit
    original = rope.optional_integer("original_max_position_embeddings", most=MAX_TOKENS)
    if original is None or factor <= 1:
        return limit
    return max(limit, min(int(original * factor), MAX_TOKENS))


def _refuse_dropouts(fields: Fields) -> None:
    """Raises BadCheckpoint for dropouts that torch's module does not take, though only training drops."""
    for name in fields.names():
        if "dropout" in name or name.endswith("pdrop"):
            value = fields.given(name)
            if isinstance(value, int | float) and not 0 <= value <= 1:
                raise fields.bad(name, "it is a probability, from 0 to 1")


def _refuse_unread_overrides(fields: Fields, family: Family) -> None:
    """Raises BadCheckpoint for overrides of single layers' fields if the family does not read them."""
    if fields.has("per_layer_config") and not family.single_layers_differ:
        raise fields.bad(
            "per_layer_config", f"Kvant does not know {family.title} with layers that differ"
        )


def _refuse_other_length(fields: Fields, name: str) -> None:
    """Raises BadCheckpoint for a list of layers' kinds that does not name each layer's."""
    words, count = fields.words(name), num_layers(fields)
    if words is not None and len(words) != count:
        raise fields.bad(name, f"it has {len(words)} entries for {count} layers")


def _refuse_padding(fields: Fields, defaults: Mapping[str, Any], vocab_size: int) -> None:
    """Raises BadCheckpoint for a padding token that has no row of the embedding.

    defaults: values that transformers takes for missing fields.
    """
    pad = fields.completed(defaults).raw("pad_token_id")
    if type(pad) is int and not -vocab_size <= pad < vocab_size:
        why = f"the vocabulary has {vocab_size} tokens"
        if fields.raw("pad_token_id") is None:
            why = f"transformers then takes {pad}, and {why}"
        raise fields.bad("pad_token_id", why)
