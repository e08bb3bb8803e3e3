"""Translates a GGUF header to transformers' config, generation config, and names of tensors.

Every hyper-parameter of the file must be known, and every tensor must have a place with the
shape that the config implies: a wrong model is worse than a refusal. Key and tensor names are
llama.cpp's (gguf-py `constants.py`); the results use the names of transformers' model classes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvant.errors import BadCheckpoint, WayOut
from kvant.models.gguf_header import GGUFHeader, malformed

FLOAT32_BYTES = 4
_FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture` that Kvant imports.

    model_type, model_class: transformers' names.
    fixed: config keys that follow from the architecture alone.
    rotary_pairs: llama.cpp stores the rows of Q and K so that rotary pairs are neighbours.
    qkv_bias, qk_norm: whether an attention layer has these tensors besides the four projections.
    """

    model_type: str
    model_class: str
    fixed: Mapping[str, object]
    rotary_pairs: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False


ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False}, rotary_pairs=True
    ),
    "qwen2": Architecture(
        "qwen2", "Qwen2ForCausalLM", {"use_sliding_window": False}, qkv_bias=True
    ),
    "qwen3": Architecture(
        "qwen3", "Qwen3ForCausalLM", {"use_sliding_window": False, "attention_bias": False}, qk_norm=True
    ),
}  # fmt: skip

# Known keys after "<architecture>." in the metadata. Any other key is refused, since it could change
# the model's results.
_KNOWN_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        # Some converters write these, though they add no information:
        "expert_count",  # must be 0
        "expert_used_count",
        "rope.scaling.original_context_length",  # Llama 3.1's; the file's factors are used instead
        "rope.scaling.finetuned",
    }
)

# A tensor of divisors of the rotary frequencies; they become part of the config.
ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one GGUF tensor is stored by the import.

    name, shape: in the transformers checkpoint. rotary_heads: number of heads whose rows are reordered
    from rotary pairs to halves, 0 for none. stored_bytes: bytes of kept blocks, None for float32.
    """

    name: str
    shape: tuple[int, ...]
    rotary_heads: int = 0
    stored_bytes: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the imported tensor."""
        if self.stored_bytes is not None:
            return self.stored_bytes
        return math.prod(self.shape) * FLOAT32_BYTES


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """The import of a header. config, generation: contents of config.json and generation_config.json. places:
    by GGUF name."""

    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    places: Mapping[str, TensorPlace]

    @property
    def weights_bytes(self) -> int:
        return sum(place.nbytes for place in self.places.values())


def read_config(header: GGUFHeader, rope_freqs: tuple[float, ...] | None) -> ImportedConfig:
    """Translates the header. rope_freqs: the values of the tensor `rope_freqs.weight`, if any.

    Raises BadCheckpoint for an architecture or setting that Kvant does not import, and for a tensor
    that is missing, left over, or of another shape than the metadata says.
    """
    facts = _Facts(header)
    architecture = ARCHITECTURES.get(facts.name)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise facts.refuse(f"its architecture is {facts.name!r}; Kvant imports {known}")
    _refuse_unknown_settings(facts)
    layers = facts.count("block_count", at_most=len(header.tensors))
    hidden = facts.count("embedding_length")
    heads = facts.count("attention.head_count")
    kv_heads = facts.count("attention.head_count_kv", default=heads)
    if heads % kv_heads:
        raise facts.malformed(f"{heads} attention heads cannot share {kv_heads} KV heads")
    head_dim = _head_dim(facts, hidden, heads)
    vocab = _vocab_size(facts)
    config: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": facts.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": facts.count("context_length"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(facts, head_dim, rope_freqs),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": vocab,
        **architecture.fixed,
    }
    tokens = _token_ids(facts, vocab)
    config.update(tokens)
    places = dict(_places(architecture, config))
    _check_tensors(facts, places)
    return ImportedConfig(
        config=config, generation=_generation(facts, tokens, vocab), places=places
    )


class _Facts:
    """Typed access to the metadata. Raises BadCheckpoint for a value of another type than expected.

    name: the file's architecture, which prefixes the keys of `text`, `count` and `number`.
    """

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.name = self._text("general.architecture", None)

    def malformed(self, why: str) -> BadCheckpoint:
        return malformed(self.header.path, why)

    def refuse(self, why: str) -> BadCheckpoint:
        """Returns the error of a file that Kvant does not import."""
        return BadCheckpoint(
            f"Kvant cannot import {self.header.path}",
            why=why,
            ways_out=[
                WayOut("use the model's original checkpoint (safetensors): a directory or hub id")
            ],
        )

    def text(self, key: str, default: str) -> str:
        return self._text(f"{self.name}.{key}", default)

    def _text(self, key: str, default: str | None) -> str:
        value = self.header.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.malformed(f"metadata {key!r} is {_shown(value)}, not a text")
        return value

    def count(self, key: str, *, default: int | None = None, at_most: int = 1 << 31) -> int:
        key = f"{self.name}.{key}"
        value = self.header.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= at_most:
            said = f"metadata {key!r} is {_shown(value)}"
            raise self.malformed(f"{said}, not a number between 1 and {at_most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        key = f"{self.name}.{key}"
        value = self.header.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.malformed(f"metadata {key!r} is {_shown(value)}, not a number")
        if not 0 < value <= _FLOAT32_MAX:  # also false for NaN
            raise self.malformed(f"metadata {key!r} is {value}")
        return shortest_float32(float(value))

    def token_id(self, which: str, vocab: int) -> int | None:
        key = f"tokenizer.ggml.{which}_token_id"
        value = self.header.metadata.get(key)
        if value is None or value == 0xFFFFFFFF:  # llama.cpp's null token, -1 in 32 bits
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab:
            raise self.malformed(f"metadata {key!r} is {_shown(value)}, no token id below {vocab}")
        return value


def shortest_float32(value: float) -> float:
    """Returns the decimal number with the fewest digits that equals the float32.

    GGUF keeps numbers such as 1e-05 in float32, which reads back as 9.999999747378752e-06.
    """
    packed = struct.pack("<f", value)
    for digits in range(1, 10):  # nine significant digits tell any two float32 apart
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == packed:
            return candidate
    return value


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, tuple):
        return f"a list of {len(value)}"
    return repr(value)[:80]


def _refuse_unknown_settings(facts: _Facts) -> None:
    metadata, prefix = facts.header.metadata, f"{facts.name}."
    if metadata.get(f"{prefix}expert_count", 0) != 0:
        raise facts.refuse("it is a mixture of experts")
    if metadata.get("split.count", 0) not in (0, 1):
        raise facts.refuse(
            "it is one part of a split file; `llama-gguf-split --merge` of llama.cpp joins them"
        )
    settings = (key for key in metadata if key.startswith(prefix))
    unknown = [key for key in settings if key.removeprefix(prefix) not in _KNOWN_KEYS]
    if unknown:
        raise facts.refuse(f"it has settings Kvant does not know: {', '.join(unknown)}")


def _head_dim(facts: _Facts, hidden: int, heads: int) -> int:
    head_dim = facts.count("attention.key_length", default=max(1, hidden // heads))
    value_dim = facts.count("attention.value_length", default=head_dim)
    rotated = facts.count("rope.dimension_count", default=head_dim)
    if value_dim != head_dim:
        raise facts.refuse(f"K has heads of {head_dim} numbers and V of {value_dim}")
    if rotated != head_dim or head_dim % 2:
        raise facts.refuse(f"it rotates {rotated} of {head_dim} numbers of a head")
    return head_dim


def _vocab_size(facts: _Facts) -> int:
    tokens = facts.header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, tuple) or not tokens:
        raise facts.malformed("it has no vocabulary (tokenizer.ggml.tokens)")
    vocab = facts.count("vocab_size", default=len(tokens))
    if len(tokens) > vocab:
        raise facts.malformed(f"it lists {len(tokens)} tokens for a vocabulary of {vocab}")
    return vocab


def _rope(facts: _Facts, head_dim: int, rope_freqs: tuple[float, ...] | None) -> dict[str, object]:
    theta = facts.number("rope.freq_base", default=10000.0)
    kind = facts.text("rope.scaling.type", default="none")
    if rope_freqs is not None:
        if kind != "none":
            raise facts.refuse(f"it has both rope_freqs and rope scaling {kind!r}")
        return {"rope_theta": theta, **_llama3_scaling(facts, theta, head_dim, rope_freqs)}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        factor = facts.number("rope.scaling.factor")
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    raise facts.refuse(f"it has rope scaling {kind!r}")


def _llama3_scaling(
    facts: _Facts, theta: float, head_dim: int, freqs: tuple[float, ...]
) -> dict[str, object]:
    """Returns Llama 3.1's scaling, which GGUF stores as one divisor per rotary frequency.

    The divisors are recomputed from the parameters of all published models of the family, and must
    agree up to float32 rounding. Formula: transformers' `_compute_llama3_parameters`.
    """
    low, high, original = 1.0, 4.0, 8192
    factor = shortest_float32(max(freqs, default=0.0))
    expected = []
    for i in range(len(freqs)):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        expected.append(1 / ((1 - smooth) / factor + smooth) if factor > 0 else math.nan)
    agree = len(freqs) == head_dim // 2 and all(
        math.isclose(a, b, rel_tol=1e-5) for a, b in zip(freqs, expected, strict=True)
    )
    if not agree:
        raise facts.refuse("its rope_freqs are not those of Llama 3.1's scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _token_ids(facts: _Facts, vocab: int) -> dict[str, int | None]:
    return {
        "bos_token_id": facts.token_id("bos", vocab),
        "eos_token_id": facts.token_id("eos", vocab),
        "pad_token_id": facts.token_id("padding", vocab),
    }


def _generation(facts: _Facts, tokens: dict[str, int | None], vocab: int) -> dict[str, Any]:
    """Returns generation_config.json. Its EOS tokens are all that end an answer: of text, turn or message."""
    ends = [
        tokens["eos_token_id"],
        facts.token_id("eot", vocab),
        facts.token_id("eom", vocab),
    ]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    generation: dict[str, Any] = {
        key: value for key, value in tokens.items() if value is not None and key != "eos_token_id"
    }
    if unique:
        generation["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return generation


def _places(
    architecture: Architecture, config: Mapping[str, Any]
) -> Iterator[tuple[str, TensorPlace]]:
    """Yields the GGUF names and places of exactly the tensors that a file of this config must have."""
    hidden, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    head_dim = config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q_rows, kv_rows = heads * head_dim, kv_heads * head_dim
    q_rotary, k_rotary = (heads, kv_heads) if architecture.rotary_pairs else (0, 0)

    yield "token_embd.weight", TensorPlace("model.embed_tokens.weight", (vocab, hidden))
    yield "output_norm.weight", TensorPlace("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield "output.weight", TensorPlace("lm_head.weight", (vocab, hidden))
    for i in range(config["num_hidden_layers"]):
        here, there = f"blk.{i}", f"model.layers.{i}"
        attention, mlp = f"{there}.self_attn", f"{there}.mlp"
        rows = {
            "attn_norm.weight": TensorPlace(f"{there}.input_layernorm.weight", (hidden,)),
            "ffn_norm.weight": TensorPlace(f"{there}.post_attention_layernorm.weight", (hidden,)),
            "attn_q.weight": TensorPlace(f"{attention}.q_proj.weight", (q_rows, hidden), q_rotary),
            "attn_k.weight": TensorPlace(f"{attention}.k_proj.weight", (kv_rows, hidden), k_rotary),
            "attn_v.weight": TensorPlace(f"{attention}.v_proj.weight", (kv_rows, hidden)),
            "attn_output.weight": TensorPlace(f"{attention}.o_proj.weight", (hidden, q_rows)),
            "ffn_gate.weight": TensorPlace(f"{mlp}.gate_proj.weight", (inner, hidden)),
            "ffn_up.weight": TensorPlace(f"{mlp}.up_proj.weight", (inner, hidden)),
            "ffn_down.weight": TensorPlace(f"{mlp}.down_proj.weight", (hidden, inner)),
        }
        if architecture.qkv_bias:
            rows["attn_q.bias"] = TensorPlace(f"{attention}.q_proj.bias", (q_rows,))
            rows["attn_k.bias"] = TensorPlace(f"{attention}.k_proj.bias", (kv_rows,))
            rows["attn_v.bias"] = TensorPlace(f"{attention}.v_proj.bias", (kv_rows,))
        if architecture.qk_norm:
            rows["attn_q_norm.weight"] = TensorPlace(f"{attention}.q_norm.weight", (head_dim,))
            rows["attn_k_norm.weight"] = TensorPlace(f"{attention}.k_norm.weight", (head_dim,))
        for name, place in rows.items():
            yield f"{here}.{name}", place


def _check_tensors(facts: _Facts, places: Mapping[str, TensorPlace]) -> None:
    tensors = facts.header.tensors
    missing = [name for name in places if name not in tensors]
    if missing:
        raise facts.malformed(f"{_some(missing)} missing: the metadata calls for them")
    surplus = [name for name in tensors if name not in places and name != ROPE_FREQS]
    if surplus:
        raise facts.refuse(f"Kvant has no place for its tensors {_some(surplus)}")
    for name, place in places.items():
        shape = tensors[name].shape
        if shape != place.shape:
            raise facts.malformed(
                f"tensor {name!r} has shape {shape}, the metadata calls for {place.shape}"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
