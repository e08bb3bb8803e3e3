"""Weights beside the decoder: the towers that multimodal classes load with it.

Given the top of a config. What a config leaves out is as transformers' config classes have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from kvant.models.geometry.family import FOUR_NORMS
from kvant.models.geometry.fields import MAX_LAYERS, Fields
from kvant.models.geometry.parameters import (
    Weight,
    embedding,
    linear,
    norms,
    other,
    vector,
)

_SIGLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224,
    "patch_size": 16, "num_channels": 3, "num_attention_heads": 12,
}  # fmt: skip


def siglip_tower(top: Fields) -> Iterator[Weight]:
    """Gemma 3's vision tower, and the projection of its patches into the decoder."""
    vision = top.inside("vision_config", _SIGLIP) or Fields({}, defaults=_SIGLIP)
    hidden, size = vision.integer("hidden_size"), vision.integer("intermediate_size")
    heads = vision.integer("num_attention_heads")
    if hidden % heads:
        raise vision.bad("num_attention_heads", f"hidden_size {hidden} is no multiple of it")
    if top.is_null("mm_tokens_per_image") or top.has("mm_tokens_per_image"):
        top.integer("mm_tokens_per_image")
    at, patch = "model.vision_tower", vision.integer("patch_size")
    channels = vision.integer("num_channels", most=1024)
    yield other(f"{at}.embeddings.patch_embedding", hidden, channels, patch, patch)
    yield vector(f"{at}.embeddings.patch_embedding.bias", hidden)
    patches = (vision.integer("image_size") // patch) ** 2
    yield embedding(f"{at}.embeddings.position_embedding", patches, hidden)
    for index in range(vision.integer("num_hidden_layers", most=MAX_LAYERS)):
        layer = f"{at}.encoder.layers.{index}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{layer}.self_attn.{part}", hidden, hidden, bias=True)
        yield from linear(f"{layer}.mlp.fc1", size, hidden, bias=True)
        yield from linear(f"{layer}.mlp.fc2", hidden, size, bias=True)
        yield from norms(layer, hidden, "layer_norm1", "layer_norm2", bias=True)
    yield from norms(at, hidden, "post_layernorm", bias=True)
    if vision.flag("vision_use_head", True):
        yield other(f"{at}.head.probe", 1, 1, hidden)
        yield other(f"{at}.head.attention.in_proj_weight", 3 * hidden, hidden)
        yield vector(f"{at}.head.attention.in_proj_bias", 3 * hidden)
        yield from linear(f"{at}.head.attention.out_proj", hidden, hidden, bias=True)
        yield from linear(f"{at}.head.mlp.fc1", size, hidden, bias=True)
        yield from linear(f"{at}.head.mlp.fc2", hidden, size, bias=True)
        yield from norms(at, hidden, "head.layernorm", bias=True)
    at, width = "model.multi_modal_projector", _decoder_hidden(top)
    yield other(f"{at}.mm_input_projection_weight", hidden, width)
    yield vector(f"{at}.mm_soft_emb_norm", hidden)


def _decoder_hidden(top: Fields) -> int:
    text = top.inside("text_config")
    if text is None:
        raise top.bad("text_config", "the decoder's fields are missing")
    return text.integer("hidden_size")


_GEMMA3N_VISION = {"architecture": "mobilenetv5_300m_enc", "hidden_size": 2048, "vocab_size": 128}
_GEMMA3N_AUDIO = {
    "hidden_size": 1536, "vocab_size": 128, "conf_num_hidden_layers": 12,
    "conf_num_attention_heads": 8, "conf_conv_kernel_size": 5,
    "sscp_conv_channel_size": (128, 32), "input_feat_size": 128,
}  # fmt: skip

_TIMM_NUMEL = {"mobilenetv5_300m_enc": 294_126_912}
"""Elements of convolutional networks that a config only names: counted in timm 1.0.31."""


def gemma3n_towers(top: Fields) -> Iterable[Weight] | str:
    """Gemma 3n's convolutional vision tower and its audio tower."""
    vision = top.inside("vision_config", _GEMMA3N_VISION) or Fields({}, defaults=_GEMMA3N_VISION)
    audio = top.inside("audio_config", _GEMMA3N_AUDIO) or Fields({}, defaults=_GEMMA3N_AUDIO)
    name = vision.text("architecture") or ""
    if name not in _TIMM_NUMEL:
        return f"Kvant does not know the size of the vision tower {name!r}"
    hidden = _decoder_hidden(top)
    return (
        vector("model.vision_tower", _TIMM_NUMEL[name]),
        *_gemma3n_audio(audio),
        *_gemma3n_embedder("model.embed_vision", vision, hidden),
        *_gemma3n_embedder("model.embed_audio", audio, hidden),
    )


def _gemma3n_embedder(at: str, tower: Fields, hidden: int) -> Iterator[Weight]:
    """Tokens of their own, and the way of a tower's features into the decoder."""
    width = tower.integer("hidden_size")
    yield embedding(f"{at}.embedding", tower.integer("vocab_size"), width)
    yield from norms(at, width, "hard_embedding_norm", "soft_embedding_norm")
    yield from linear(f"{at}.embedding_projection", hidden, width)


def _gemma3n_audio(audio: Fields) -> Iterator[Weight]:
    yield from _conformer(
        audio,
        num_layers=audio.integer("conf_num_hidden_layers", most=MAX_LAYERS),
        num_heads=audio.integer("conf_num_attention_heads"),
        kernel=audio.integer("conf_conv_kernel_size"),
        channels=_two(audio, "sscp_conv_channel_size"),
        # Two convolutions of stride 2 leave a quarter of the spectrum's bins.
        bins=audio.integer("input_feat_size") // 4,
    )


_GEMMA4_VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16,
    "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64, "patch_size": 16,
    "position_embedding_size": 10240,
}  # fmt: skip
_GEMMA4_AUDIO = {
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8,
    "subsampling_conv_channels": (128, 32), "conv_kernel_size": 5, "output_proj_dims": 1536,
}  # fmt: skip


def gemma4_towers(top: Fields) -> Iterator[Weight]:
    """Gemma 4's vision and audio towers."""
    hidden = _decoder_hidden(top)
    vision = top.inside("vision_config", _GEMMA4_VISION)
    if vision is not None:
        yield from _gemma4_vision(vision)
        width = vision.integer("hidden_size")
        yield from linear("model.embed_vision.embedding_projection", hidden, width)
    audio = top.inside("audio_config", _GEMMA4_AUDIO)
    if audio is not None:
        yield from _gemma4_audio(audio)
        width = audio.integer("output_proj_dims")
        yield from linear("model.embed_audio.embedding_projection", hidden, width)


def _gemma4_vision(vision: Fields) -> Iterator[Weight]:
    hidden, size = vision.integer("hidden_size"), vision.integer("intermediate_size")
    head_dim = vision.integer("head_dim")
    q_width = vision.integer("num_attention_heads") * head_dim
    kv_width = vision.integer("num_key_value_heads") * head_dim
    at, patch = "model.vision_tower", vision.integer("patch_size")
    project = partial(_clippable, clips=vision.flag("use_clipped_linears"))
    rows = vision.integer("position_embedding_size")
    yield other(f"{at}.patch_embedder.position_embedding_table", 2, rows, hidden)
    yield from linear(f"{at}.patch_embedder.input_proj", hidden, 3 * patch * patch)
    for index in range(vision.integer("num_hidden_layers", most=MAX_LAYERS)):
        layer = f"{at}.encoder.layers.{index}"
        yield from project(f"{layer}.self_attn.q_proj", q_width, hidden)
        yield from project(f"{layer}.self_attn.k_proj", kv_width, hidden)
        yield from project(f"{layer}.self_attn.v_proj", kv_width, hidden)
        yield from project(f"{layer}.self_attn.o_proj", hidden, q_width)
        yield from norms(layer, head_dim, "self_attn.q_norm", "self_attn.k_norm")
        yield from project(f"{layer}.mlp.gate_proj", size, hidden)
        yield from project(f"{layer}.mlp.up_proj", size, hidden)
        yield from project(f"{layer}.mlp.down_proj", hidden, size)
        yield from norms(layer, hidden, *FOUR_NORMS)
    if vision.flag("standardize"):
        yield from norms(at, hidden, "std_bias", "std_scale")


def _clippable(name: str, rows: int, columns: int, *, clips: bool) -> Iterator[Weight]:
    """Yields a projection with bounds of its inputs and outputs, which it clips or only could clip."""
    yield from linear(f"{name}.linear", rows, columns)
    for bound in ("input_min", "input_max", "output_min", "output_max") if clips else ():
        yield other(f"{name}.{bound}")


def _gemma4_audio(audio: Fields) -> Iterator[Weight]:
    hidden = audio.integer("hidden_size")
    channels = _two(audio, "subsampling_conv_channels")
    yield from _conformer(
        audio,
        num_layers=audio.integer("num_hidden_layers", most=MAX_LAYERS),
        num_heads=audio.integer("num_attention_heads"),
        kernel=audio.integer("conv_kernel_size"),
        channels=channels,
        bins=channels[0] // 4,
        project=partial(_clippable, clips=audio.flag("use_clipped_linears", True)),
    )
    out = audio.integer("output_proj_dims")
    yield from linear("model.audio_tower.output_proj", out, hidden, bias=True)


def _conformer(
    audio: Fields,
    *,
    num_layers: int,
    num_heads: int,
    kernel: int,
    channels: tuple[int, int],
    bins: int,
    project: Callable[[str, int, int], Iterator[Weight]] = linear,
) -> Iterator[Weight]:
    """Two convolutions, then layers of attention, convolution and two feed-forward networks.

    project: lists a projection, given its path, rows and columns.
    """
    hidden, at = audio.integer("hidden_size"), "model.audio_tower"
    before = 1
    for index, width in enumerate(channels):
        conv = f"{at}.subsample_conv_projection.layer{index}"
        yield other(f"{conv}.conv", width, before, 3, 3)
        yield vector(f"{conv}.norm", width)
        before = width
    yield from linear(
        f"{at}.subsample_conv_projection.input_proj_linear", hidden, bins * channels[1]
    )
    for index in range(num_layers):
        layer = f"{at}.layers.{index}"
        for part in ("feed_forward1", "feed_forward2"):
            yield from project(f"{layer}.{part}.ffw_layer_1", 4 * hidden, hidden)
            yield from project(f"{layer}.{part}.ffw_layer_2", hidden, 4 * hidden)
            yield from norms(f"{layer}.{part}", hidden, "pre_layer_norm", "post_layer_norm")
        for part in ("q_proj", "k_proj", "v_proj", "post"):
            yield from project(f"{layer}.self_attn.{part}", hidden, hidden)
        yield from linear(f"{layer}.self_attn.relative_k_proj", hidden, hidden)
        yield vector(f"{layer}.self_attn.per_dim_scale", hidden // num_heads)
        yield from project(f"{layer}.lconv1d.linear_start", 2 * hidden, hidden)
        yield from project(f"{layer}.lconv1d.linear_end", hidden, hidden)
        yield other(f"{layer}.lconv1d.depthwise_conv1d", hidden, 1, kernel)
        yield from norms(f"{layer}.lconv1d", hidden, "pre_layer_norm", "conv_norm")
        yield from norms(layer, hidden, "norm_pre_attn", "norm_post_attn", "norm_out")


def _two(fields: Fields, name: str) -> tuple[int, int]:
    numbers = fields.integers(name, least=1) or ()
    if len(numbers) != 2:
        raise fields.bad(name, "it must be two numbers")
    return numbers[0], numbers[1]


_UNIFIED_VISION = {
    "patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 3840, "mm_posemb_size": 1120,
    "output_proj_dims": 3840,
}  # fmt: skip
_UNIFIED_AUDIO = {"audio_embed_dim": 640}


def unified_towers(top: Fields) -> Iterable[Weight]:
    """Gemma 4 unified has no towers, only embeddings of patches and of audio frames."""
    hidden = _decoder_hidden(top)
    vision = top.inside("vision_config", _UNIFIED_VISION)
    if vision is not None:
        width = vision.integer("mm_embed_dim")
        side = vision.integer("patch_size") * vision.integer("pooling_kernel_size")
        at, pixels = "model.embed_vision", 3 * side * side
        yield other(f"{at}.pos_embedding", vision.integer("mm_posemb_size"), 2, width)
        yield from linear(f"{at}.patch_dense", width, pixels, bias=True)
        yield from norms(at, pixels, "patch_ln1", bias=True)
        yield from norms(at, width, "patch_ln2", "pos_norm", bias=True)
        out = vision.integer("output_proj_dims")
        yield from linear(f"{at}.multimodal_embedder.embedding_projection", hidden, out)
    audio = top.inside("audio_config", _UNIFIED_AUDIO)
    if audio is not None:
        width = audio.integer("audio_embed_dim")
        yield from linear("model.embed_audio.embedding_projection", hidden, width)
