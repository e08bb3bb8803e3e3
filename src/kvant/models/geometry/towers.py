"""Weights beside the decoder: the towers that multimodal classes load with it.

Given the top of a config. What a config leaves out is as transformers' config classes have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvant.models.geometry.fields import MAX_LAYERS, Fields
from kvant.models.geometry.parameters import (
    Weight,
    WeightKind,
    embedding,
    linear,
    mlp,
    norms,
    vector,
)

_SIGLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224,
    "patch_size": 16, "num_channels": 3,
}  # fmt: skip


def siglip_tower(top: Fields) -> Iterator[Weight]:
    """Gemma 3's vision tower, and the projection of its patches into the decoder."""
    vision = top.inside("vision_config", _SIGLIP) or Fields({}, defaults=_SIGLIP)
    hidden, size = vision.integer("hidden_size"), vision.integer("intermediate_size")
    at, patch = "model.vision_tower", vision.integer("patch_size")
    pixels = vision.integer("num_channels", most=1024) * patch * patch
    yield Weight(f"{at}.embeddings.patch_embedding", WeightKind.OTHER, hidden, pixels)
    yield vector(f"{at}.embeddings.patch_embedding.bias", hidden)
    patches = (vision.integer("image_size") // patch) ** 2
    yield Weight(f"{at}.embeddings.position_embedding", WeightKind.OTHER, patches, hidden)
    for index in range(vision.integer("num_hidden_layers", most=MAX_LAYERS)):
        layer = f"{at}.encoder.layers.{index}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{layer}.self_attn.{part}", hidden, hidden, bias=True)
        yield from linear(f"{layer}.mlp.fc1", size, hidden, bias=True)
        yield from linear(f"{layer}.mlp.fc2", hidden, size, bias=True)
        yield from norms(layer, 2 * hidden, "layer_norm1", "layer_norm2")  # weight and bias
    yield vector(f"{at}.post_layernorm", 2 * hidden)
    if vision.flag("vision_use_head", True):
        yield vector(f"{at}.head.probe", hidden)
        yield from linear(f"{at}.head.attention.in_proj", 3 * hidden, hidden, bias=True)
        yield from linear(f"{at}.head.attention.out_proj", hidden, hidden, bias=True)
        yield from linear(f"{at}.head.mlp.fc1", size, hidden, bias=True)
        yield from linear(f"{at}.head.mlp.fc2", hidden, size, bias=True)
        yield vector(f"{at}.head.layernorm", 2 * hidden)
    yield Weight("model.multi_modal_projector", WeightKind.OTHER, hidden, _decoder_hidden(top))
    yield vector("model.multi_modal_projector.mm_soft_emb_norm", hidden)


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
    """Gemma 4's vision and audio towers; the four clipping bounds of each projection left out."""
    hidden = _decoder_hidden(top)
    vision = top.inside("vision_config", _GEMMA4_VISION)
    if vision is not None:
        yield from _gemma4_vision(vision)
        yield from linear("model.embed_vision", hidden, vision.integer("hidden_size"))
    audio = top.inside("audio_config", _GEMMA4_AUDIO)
    if audio is not None:
        yield from _gemma4_audio(audio)
        yield from linear("model.embed_audio", hidden, audio.integer("output_proj_dims"))


def _gemma4_vision(vision: Fields) -> Iterator[Weight]:
    hidden, size = vision.integer("hidden_size"), vision.integer("intermediate_size")
    head_dim = vision.integer("head_dim")
    q_width = vision.integer("num_attention_heads") * head_dim
    kv_width = vision.integer("num_key_value_heads") * head_dim
    at, patch = "model.vision_tower", vision.integer("patch_size")
    rows = 2 * vision.integer("position_embedding_size")
    yield Weight(f"{at}.patch_embedder.position_embedding", WeightKind.OTHER, rows, hidden)
    yield from linear(f"{at}.patch_embedder.input_proj", hidden, 3 * patch * patch)
    for index in range(vision.integer("num_hidden_layers", most=MAX_LAYERS)):
        layer = f"{at}.encoder.layers.{index}"
        yield from linear(f"{layer}.self_attn.q_proj", q_width, hidden)
        yield from linear(f"{layer}.self_attn.k_proj", kv_width, hidden)
        yield from linear(f"{layer}.self_attn.v_proj", kv_width, hidden)
        yield from linear(f"{layer}.self_attn.o_proj", hidden, q_width)
        yield from norms(layer, head_dim, "self_attn.q_norm", "self_attn.k_norm")
        yield from mlp(f"{layer}.mlp", hidden, size)
        yield vector(f"{layer}.norms", 4 * hidden)
    if vision.flag("standardize"):
        yield from norms(at, hidden, "std_bias", "std_scale")


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
) -> Iterator[Weight]:
    """Two convolutions, then layers of attention, convolution and two feed-forward networks."""
    hidden, at = audio.integer("hidden_size"), "model.audio_tower"
    before = 1
    for index, width in enumerate(channels):
        conv = f"{at}.subsample_conv_projection.layer{index}"
        yield Weight(f"{conv}.conv", WeightKind.OTHER, width, before * 9)
        yield vector(f"{conv}.norm", width)
        before = width
    yield from linear(f"{at}.subsample_conv_projection.input_proj", hidden, bins * channels[1])
    for index in range(num_layers):
        layer = f"{at}.layers.{index}"
        for part in ("feed_forward1", "feed_forward2"):
            yield from linear(f"{layer}.{part}.ffw_layer_1", 4 * hidden, hidden)
            yield from linear(f"{layer}.{part}.ffw_layer_2", hidden, 4 * hidden)
            yield vector(f"{layer}.{part}.norms", 2 * hidden)
        for part in ("q_proj", "k_proj", "v_proj", "post", "relative_k_proj"):
            yield from linear(f"{layer}.self_attn.{part}", hidden, hidden)
        yield vector(f"{layer}.self_attn.per_dim_scale", hidden // num_heads)
        yield from linear(f"{layer}.lconv1d.linear_start", 2 * hidden, hidden)
        yield from linear(f"{layer}.lconv1d.linear_end", hidden, hidden)
        yield Weight(f"{layer}.lconv1d.depthwise_conv1d", WeightKind.OTHER, hidden, kernel)
        yield vector(f"{layer}.norms", 5 * hidden)


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
        rows = 2 * vision.integer("mm_posemb_size")
        yield Weight(f"{at}.pos_embedding", WeightKind.OTHER, rows, width)
        yield from linear(f"{at}.patch_dense", width, pixels, bias=True)
        yield vector(f"{at}.norms", 2 * pixels + 4 * width)  # three norms, weight and bias
        yield from linear(f"{at}.multimodal_embedder", hidden, vision.integer("output_proj_dims"))
    audio = top.inside("audio_config", _UNIFIED_AUDIO)
    if audio is not None:
        yield from linear("model.embed_audio", hidden, audio.integer("audio_embed_dim"))
