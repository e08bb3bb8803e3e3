"""Reads rotary embeddings from the config, and decides the frequencies of every position. No torch.

transformers recomputes the frequencies of `longrope` and `dynamic` models in every forward, from the
largest position in the batch. A cache holds keys that are rotated already, so Kvant decides once:
sequences end at the original length, where transformers' frequencies do not move, unless
--max-model-len asks for more. Then the frequencies are those of that length, for every sequence.
The memory for pages has no part in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvant.errors import BadCheckpoint, NotServable, WayOut
from kvant.kv.checkpoint.json_file import COMPARE_CONFIG
from kvant.kv.geometry import ModelGeometry
from kvant.models.geometry.fields import MAX_TOKENS, Fields, shown, text_section

LONGROPE, DYNAMIC = "longrope", "dynamic"

ROPE_TYPES = ("default", "linear", DYNAMIC, "yarn", LONGROPE, "llama3", "proportional")
"""Types that transformers computes. It still reads "su" and "mrope", which are former names."""

_FORMER = {"su": LONGROPE, "mrope": "default"}


_NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    DYNAMIC: ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Fields without which transformers does not compute a type's frequencies."""

_POSITIVE = (
    "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
)  # fmt: skip
"""Numbers that others are divided by, or whose logarithm counts."""

_LONG_ALONE = ("phi3",)
"""Classes that compute no type but longrope, which they also take "yarn" for."""

_NO_DEFAULT = ("mixtral",)
"""Classes that compute head_dim for plain frequencies alone."""

_KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers that may have rotary numbers of their own."""

_NUMBERS = (
    "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "beta_fast",
    "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MovingRotary:
    """The fixed length of frequencies that transformers changes with the length.

    length: tokens for which they are computed. original: tokens up to which they do not change.
    """

    rope_type: str
    length: int
    original: int
    because: str


def fix_rotary(
    config: Mapping[str, Any], geometry: ModelGeometry, max_model_len: int | None
) -> tuple[ModelGeometry, MovingRotary | None]:
    """Returns the geometry with the longest served context, and the decision; None if no frequency changes.

    max_model_len: of --max-model-len, or None. Raises NotServable for several types that change.
    """
    moving = _moving(config, geometry)
    if moving is None:
        return geometry, None
    rope_type, original = moving
    limit = geometry.max_model_len
    if max_model_len is None or max_model_len <= original:
        served = original if limit is None else min(limit, original)
        note = f"{rope_type} rotary frequencies are those of its original {original} tokens"
        if limit is not None and limit > original and max_model_len is None:
            note += f"; --max-model-len {limit} serves longer sequences, with other frequencies"
        return replace(geometry, max_model_len=served), MovingRotary(
            rope_type, original, original, note
        )
    note = (
        f"{rope_type} rotary frequencies are those of --max-model-len {max_model_len} for every "
        f"sequence: up to {original} tokens transformers takes others"
    )
    return geometry, MovingRotary(rope_type, max_model_len, original, note)


def rope_types(fields: Fields) -> tuple[str, ...]:
    """Returns the rotary types of a decoder's layers. Raises BadCheckpoint unless transformers knows them."""
    return tuple(_type_of(section) for section in _sections(fields))


def check_rotary(fields: Fields, *, by_kind: bool) -> None:
    """Raises BadCheckpoint for rotary numbers of a decoder that transformers cannot compute with.

    by_kind: its class has rotary numbers for each kind of layers.
    """
    sections, model_type = _sections(fields), fields.text("model_type")
    both = [fields.raw(name) for name in ("rope_parameters", "rope_scaling") if fields.raw(name)]
    if len(both) == 2 and _completed(fields, both[0]) != _completed(fields, both[1]):
        raise fields.bad(
            "rope_scaling", "rope_parameters is its newer name, and says something else"
        )
    if fields.number("rope_theta", 1.0) <= 0:
        raise fields.bad("rope_theta", "rotary frequencies are powers of it")
    if fields.is_null("rope_theta") and not any(one.has("rope_theta") for one in sections):
        raise fields.bad("rope_theta", "rotary frequencies are powers of it")
    for name in ("rope_parameters", "rope_scaling"):
        section = fields.inside(name)
        nested = () if section is None or by_kind else section.names()
        if not set(nested).isdisjoint(_KINDS):
            raise fields.bad(name, "all layers of this class have the same rotary frequencies")
    for section in sections:
        for name in _NUMBERS:
            value = section.number(name, 1.0)
            if value < 0 or (value == 0 and name in _POSITIVE):
                raise section.bad(name, "it must be more than 0")
        name = "type" if "rope_type" not in section.names() else "rope_type"
        if section.is_null(name):
            raise section.bad(name, f"transformers' rotary types are {', '.join(ROPE_TYPES)}")
        if section.is_null("rope_theta") or section.number("rope_theta", 1.0) <= 0:
            raise section.bad("rope_theta", "rotary frequencies are powers of it")
        if (
            section.is_null("partial_rotary_factor")
            or not 0 < section.number("partial_rotary_factor", 1.0) <= 1
        ):
            raise section.bad("partial_rotary_factor", "it is the share of a head that rotates")
        kind = _type_of(section)
        if model_type in _LONG_ALONE and kind != "default":
            if kind not in ("yarn", LONGROPE):
                raise section.bad(name, f"this class computes {LONGROPE} alone")
            kind = LONGROPE
        is_plain = kind in ("default", "linear", "llama3")
        if model_type in _NO_DEFAULT and not is_plain and not fields.has("head_dim"):
            raise fields.bad("head_dim", f"rotary type {kind} of this class needs it")
        if kind == LONGROPE:
            _check_factors(fields, section)
        needed = _NEEDED.get(kind, ())
        for name in needed:
            # A factor that is null follows from the two lengths.
            if not section.has(name) and not (kind == "yarn" and section.is_null(name)):
                raise section.bad(name, f"rotary type {kind} needs it")
        if kind in ("yarn", "llama3") and section.is_null("original_max_position_embeddings"):
            raise section.bad("original_max_position_embeddings", f"rotary type {kind} needs it")


def _completed(fields: Fields, rope: Any) -> Any:
    """Returns a rotary section with its type and rope_theta where transformers looks for them."""
    if not isinstance(rope, Mapping):
        return rope
    said = {"rope_type": rope.get("type", "default"), "rope_theta": fields.raw("rope_theta")}
    return said | {name: value for name, value in rope.items() if name != "type"}


def _check_factors(fields: Fields, section: Fields) -> None:
    """Raises BadCheckpoint unless longrope has a positive factor for every frequency of a head."""
    head_dim = fields.optional_integer("qk_rope_head_dim") or fields.optional_integer("head_dim")
    if head_dim is None:
        heads = fields.optional_integer("num_attention_heads")
        head_dim = fields.integer("hidden_size") // (heads or 1)
    share = section if section.has("partial_rotary_factor") else fields
    wanted = int(head_dim * share.number("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        found = section.raw(name)
        is_list = isinstance(found, list) and all(type(one) in (int, float) for one in found)
        if not is_list or len(found) != wanted or min(found, default=1) <= 0:
            raise section.bad(
                name, f"it must be a list of {wanted} numbers above 0, one per frequency"
            )


def original_length(fields: Fields, rope: Fields) -> int | None:
    """Returns the number of tokens up to which transformers does not change the frequencies.

    It does not read original_max_position_embeddings for dynamic frequencies.
    """
    if _type_of(rope) == DYNAMIC:
        return fields.optional_integer("max_position_embeddings", most=MAX_TOKENS)
    return (
        fields.optional_integer("original_max_position_embeddings", most=MAX_TOKENS)
        or rope.optional_integer("original_max_position_embeddings", most=MAX_TOKENS)
        or fields.optional_integer("max_position_embeddings", most=MAX_TOKENS)
    )


def rope_section(fields: Fields) -> Fields | None:
    """Returns the section `rope_parameters`, or `rope_scaling`, its former name."""
    return fields.inside("rope_parameters") or fields.inside("rope_scaling")


def _sections(fields: Fields) -> list[Fields]:
    """Returns one section for all layers, or one for each kind of layer."""
    rope = rope_section(fields)
    if rope is None:
        return []
    nested = [name for name in rope.names() if name in _KINDS]
    found = [rope.inside(name) for name in nested]
    return [section for section in found if section is not None] or [rope]


def _type_of(section: Fields) -> str:
    name = "rope_type" if section.has("rope_type") else "type"
    word = section.text(name) or "default"
    word = _FORMER.get(word, word)
    if word not in ROPE_TYPES:
        raise section.bad(name, f"transformers' rotary types are {', '.join(ROPE_TYPES)}")
    return word


def _moving(config: Mapping[str, Any], geometry: ModelGeometry) -> tuple[str, int] | None:
    """Returns the rotary type whose frequencies change, and its original length."""
    fields = Fields(text_section(config))
    sections = _sections(fields)
    # `read_geometry` refuses unknown types; transformers did so where the shape was probed.
    kinds = [str(s.raw("rope_type") or s.raw("type") or "default") for s in sections]
    kinds = [_FORMER.get(kind, kind) for kind in kinds]
    # Phi's "yarn" is longrope to transformers.
    if geometry.model_type in ("phi3", "phi4_multimodal"):
        kinds = [LONGROPE if kind == "yarn" else kind for kind in kinds]
    moving = [kind for kind in kinds if kind in (LONGROPE, DYNAMIC)]
    if not moving:
        return None
    rope = rope_section(fields)
    if rope is not None and not set(rope.names()).isdisjoint(_KINDS):
        raise NotServable(
            f"{geometry.architecture} has rotary frequencies that move, in layers of several kinds",
            why=f"its rotary types are {', '.join(kinds)}; Kvant fixes those of one kind only",
            ways_out=(WayOut("choose a model with fixed rotary frequencies"),),
        )
    original = original_length(fields, sections[0])
    if original is None:
        lacks = "max_position_embeddings is missing"
        if moving[0] == LONGROPE:
            lacks += f", and so is original_max_position_embeddings: {shown(sections[0].names())}"
        raise BadCheckpoint(
            f"config.json: {moving[0]} rotary embeddings without an original length",
            why=lacks,
            ways_out=(COMPARE_CONFIG,),
        )
    return moving[0], original
