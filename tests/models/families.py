"""Tiny random models of every decoder family in transformers, and their comparison with Kvant.

A family's tiny config is made from its class: every field of `_TINY` that the class has, and of what
it needs beside them the entries of `_EXTRA`. Towers of multimodal models keep one layer.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from kvant import LLM, SamplingParams
from kvant.attention.reference.backend import backend
from kvant.errors import ConfigError, EngineFault
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.geometry import Attention, ModelGeometry
from kvant.models import read_shape
from kvant.models.classes import auto_class
from kvant.models.geometry import read_geometry
from kvant.models.geometry.families import is_listed
from kvant.models.loaded import LoadedModel
from kvant.models.probe import probe
from kvant.models.quiet import quiet_transformers
from kvant.scheduling import kept_states
from kvant.scheduling.row_table import HeldPages
from tests.attention import driver
from tests.models import loading

WINDOW = 12
NUM_TOKENS = 24
PROMPTS = ([3, 17, 5, 90, 41], [7], list(range(20, 43)), [(7 * i) % 97 + 3 for i in range(40)])
CHUNKS = (1000, 7)
PAGE_SIZE = 4
LONGEST = 64
"""Tokens of the longest prompt and its answer."""
LOGITS_BOUND = {ComputeDtype.FLOAT32: 1e-3, ComputeDtype.FLOAT64: 1e-4}
"""Largest difference of logits over their largest number.

float32: sums in other orders. float64: keys, values and states pass through float32, and transformers' own
norms and delta rules compute in it.
"""

_MOST_WEIGHTS = 500_000_000

_ENCODERS = """
    bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert cpmant
    data2vec-text electra ernie git marian mbart megatron-bert mvp pegasus plbart prophetnet rembert
    roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta xlm-roberta-xl xlnet
    xmod musicgen musicgen_melody moshi reformer gemma4_assistant gemma4_unified_assistant
    blip blip-2 florence2 instructblip instructblipvideo pix2struct pp_formulanet t5gemma2 udop
    vision-encoder-decoder pi0 evolla shieldgemma2
"""
NO_DECODERS = frozenset(_ENCODERS.split())
"""Encoders, decoders of encoder-decoder models, drafters and others that continue no text alone."""

FAMILIES = tuple(
    name
    for name in {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    if name not in NO_DECODERS
)
"""By model_type: all that transformers makes a generating decoder of."""

_SIZES: dict[int, str] = {
    1: "bos_token_id n_group topk_group first_k_dense_replace",
    2: "num_key_value_heads eos_token_id num_experts_per_tok moe_k moe_topk top_k_experts "
    "linear_num_key_heads",
    4: "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads "
    "num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads "
    "linear_conv_kernel_dim",
    8: "qk_rope_head_dim",
    WINDOW: "sliding_window",
    16: "head_dim kv_lora_rank qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim",
    24: "q_lora_rank",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size",
    64: "hidden_size n_embd d_model dim word_embed_proj_dim",
    96: "intermediate_size ffn_dim n_inner",
    128: "vocab_size",
    512: "max_position_embeddings n_positions n_ctx max_seq_len",
}
COUNTS_OF_4 = tuple(name for name in _SIZES[4].split() if "head" in name or "experts" in name)
"""Numbers of heads and experts."""

_TINY: dict[str, Any] = {
    "initializer_range": 0.15, "pad_token_id": 0, "tie_word_embeddings": False,
    **{name: size for size, names in _SIZES.items() for name in names.split()},
}  # fmt: skip

_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_MAMBA = ["mamba", "attention"] * 2
_SMALL_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
_LINEAR = ["linear_attention", "full_attention"] * 2
_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
_ROTARY_IN_THREE = {
    "text_config": {
        "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
    }
}  # fmt: skip
_ROTARY_IN_THREE_OF_64 = {
    "text_config": {
        "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    }
}  # fmt: skip
_STARTS_OF_MEDIA = {"vision_start_token_id": 101, "audio_start_token_id": 102}
_TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
_BYTES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 96,
    "vocab_size": 128,
}  # fmt: skip
_PER_KIND = {
    "layer_types": _ALTERNATING,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0}
        for kind in ("sliding_attention", "full_attention")
    },
}
_SMALL_QWEN_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
}
_SMALL_MUSE_TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1,
}  # fmt: skip
_INDEXED = {
    "bos_token_id": 1, "eos_token_id": 2, "indexer_n_heads": 4, "indexer_kv_heads": 1,
    "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4, "hc_lowrank": 8,
}  # fmt: skip
_PER_LAYER = {
    "layer_types": _ALTERNATING, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
}  # fmt: skip

_EXTRA: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "dots3_note_text", "glm4_moe_lite",
         "longcat_flash", "minicpm3", "youtu"), _LATENT,
    ),
    "mistral4": {"num_key_value_heads": 4, "qk_nope_head_dim": 8},
    **dict.fromkeys(
        ("ernie4_5_vl_moe", "glm4v_moe", "paddleocr_vl", "qwen2_5_vl",
         "qwen2_vl"), _ROTARY_IN_THREE,
    ),
    **dict.fromkeys(("glm46v", "glm4v", "glm_ocr", "glmga"), _ROTARY_IN_THREE_OF_64),
    "aya_vision": {
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
    },
    "bailing_hybrid": {"layer_types": _LINEAR, "num_key_value_heads": 4},
    "bamba": {"attn_layer_indices": [1, 3], **_SMALL_MAMBA},
    "blt": {
        "patcher_config": _BYTES, "encoder_config": {**_BYTES, "hidden_size_global": 64},
        "decoder_config": {**_BYTES, "hidden_size_global": 64}, "global_config": _BYTES,
        "encoder_hash_byte_group_vocab": 128, "encoder_hash_byte_group_size": [2, 3],
    },
    "chameleon": {
        "vocabulary_map": {"<image>": 100, "IMGIMGAZ": 101},
        "vq_config": {
            "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "embed_dim": 32,
            "latent_channels": 32, "num_embeddings": 1, "resolution": 16,
        },
    },
    "codegen": {"rotary_dim": 8},
    "emu3": {
        "vocabulary_map": {"<image>": 100},
        "vq_config": {
            "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "embed_dim": 32,
            "latent_channels": 32, "codebook_size": 8, "attn_resolutions": [],
        },
    },
    "qwen2_5_omni_thinker": {**_ROTARY_IN_THREE, **_STARTS_OF_MEDIA},
    "qwen3_omni_moe_thinker": _STARTS_OF_MEDIA,
    "cohere_compass": {
        "text_config": _PER_KIND, "vision_config": {**_SMALL_QWEN_TOWER, "deepstack_visual_indexes": [0]},
    },
    "cohere_compass_text": _PER_KIND,
    "cosmos3_edge": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2],
            }
        },
        "projector_hidden_size": 64,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"] * 2},
        "vision_config": {
            "sam_config": {
                "hidden_size": 32, "output_channels": 32, "num_hidden_layers": 1, "image_size": 64,
                "num_attention_heads": 2, "mlp_dim": 32, "downsample_channels": [32, 32],
            },
            "encoder_config": {**_BYTES, "num_key_value_heads": 4, "hidden_size": 32},
        },
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {
        "text_config": _LATENT, "vision_config": {"adapter_out_dim": 64},
        "audio_config": {"adapter_out_dim": 64},
    },
    "ernie4_5_vl_moe": {
        "text_config": {**_ROTARY_IN_THREE["text_config"], "moe_intermediate_size": [48, 48]}
    },
    "falcon_h1": {**_SMALL_MAMBA, "mamba_d_ssm": 128},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False},
    "gemma3": {
        "vision_config": {**_TOWER, "image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4,
    },
    "gemma3n_text": {
        **_PER_LAYER, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [96] * 4,
    },
    "gemma4": {
        "vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 16}, "audio_config": None,
    },
    "gemma4_text": {**_PER_LAYER, "global_head_dim": 32, "num_global_key_value_heads": 2},
    "glm5_next": {
        "text_config": {
            "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16, "index_topk": 16,
            "index_n_heads": 4, "index_head_dim": 16, "index_kpool": 4, "qk_rope_head_dim": 0,
        }
    },
    "got_ocr2": {
        "vision_config": {
            "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 32, "patch_size": 16, "mlp_dim": 32,
        }
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "granite_docling": {"vision_config": {"out_hidden_size": 64}},
    "granitemoehybrid": {"layer_types": _MAMBA, **_SMALL_MAMBA},
    "hunyuan_vl": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2, 2],
            }
        },
        "vision_config": {"out_hidden_size": 64, "text_hidden_size": 64},
    },
    "inkling2": {"vision_config": {"text_hidden_size": 64}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _LINEAR, "linear_num_heads": 4, "linear_head_dim": 16,
        "num_key_value_heads": 4},
    "kimi_k25": {"text_config": _LATENT},
    "minimax": {"layer_types": _LINEAR, "block_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"] * 2}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0], "text_hidden_size": 64},
        "vision_config": {"num_hidden_layers": 1}},
    "muse_glimmer": {"vision_config": _SMALL_MUSE_TOWER},
    "muse_spark": {
        "vision_config": _SMALL_MUSE_TOWER, "text_config": {"moe_hidden_size": 32},
        "audio_config": {
            "out_hidden_size": 64, "num_hidden_layers": 1, "patch_sizes": [16], "hidden_sizes": [32],
            "depths": [1],
        },
    },
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    },
    "olmo3": {"layer_types": _ALTERNATING},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 8, "mamba_d_state": 16,
        "mamba_ngroups": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


TIE = {ComputeDtype.FLOAT32: 1e-5, ComputeDtype.FLOAT64: 0.0}
"""Two logits are tied if they differ by no more than this share of the largest: float32 cannot tell them."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a family fared in one dtype, beside transformers in the same dtype.

    whole, pieces, cached, preempted: greedy tokens that are transformers': generate's, or else what the
    forward without a cache chooses or ties with it. All prompts ran batched: whole; in pieces; once more,
    from the prefix cache; and while they lose their pages. A quick comparison leaves the last two out: None.
    hits: prompt tokens from the cache. preemptions: how often a sequence lost its pages. logits_error:
    largest difference over the largest logit. distinct: different tokens among transformers'.
    """

    forward: str | None
    whole: int
    pieces: int
    logits_error: float
    distinct: int
    cached: int | None = None
    preempted: int | None = None
    hits: int = 0
    preemptions: int = 0

    @property
    def equal(self) -> dict[str, int]:
        """Equal tokens of every way in which it ran."""
        ways = ("whole", "pieces", "cached", "preempted")
        return {way: getattr(self, way) for way in ways if getattr(self, way) is not None}


@dataclass(frozen=True, slots=True)
class Compared:
    """How a family fared.

    ran: by dtype; empty if nothing ran. why: the reason for which it is not served, None if it is.
    """

    geometry: ModelGeometry | None
    ran: Mapping[ComputeDtype, Ran]
    why: str | None

    @property
    def forward(self) -> str | None:
        """What ran it in float32, None for nothing."""
        found = self.ran.get(ComputeDtype.FLOAT32)
        return None if found is None else found.forward

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of its layers' attention."""
        layers = () if self.geometry is None else self.geometry.layers
        return tuple(kind.value for kind in Attention if any(x.attention is kind for x in layers))


ALL_EQUAL = NUM_TOKENS * len(PROMPTS)
"""Greedy tokens of one way to run."""


OLDEST = {"nemotron_h": (5, 23)}
"""transformers' versions whose modules of a family fit the probe; older ones are refused with the reason."""


def too_old(name: str) -> bool:
    """Whether the installed transformers is older than the family needs."""
    installed = tuple(map(int, transformers.__version__.split(".")[:2]))
    return installed < OLDEST.get(name, installed)


def tiny_config(name: str) -> PreTrainedConfig:
    """A family's config with few and small layers; transformers' error where it takes none such."""
    kind = CONFIG_MAPPING[name]
    extra, fields = _EXTRA.get(name, {}), _tiny_fields(kind)
    if "text_config" in getattr(kind, "sub_configs", {}):
        text = kind().text_config
        if text is not None:
            fields["text_config"] = {
                **_tiny_fields(type(text)), **extra.get("text_config", {}),
                "model_type": text.model_type,
            }  # fmt: skip
    made = kind(**{**fields, **{k: v for k, v in extra.items() if k != "text_config"}})
    for section in getattr(kind, "sub_configs", {}):
        if section not in ("text_config", "thinker_config"):
            _cut_tower(getattr(made, section, None))
    assert isinstance(made, PreTrainedConfig)
    return made


def _tiny_fields(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    try:
        default = kind()
    except Exception:  # a class without defaults takes what it is given
        return dict(_TINY)
    known = {*vars(default), *getattr(kind, "attribute_map", {}), *default.to_dict()}
    return {field: value for field, value in _TINY.items() if field in known}


def _cut_tower(tower: Any) -> None:
    for field in ("num_hidden_layers", "depth", "num_layers", "encoder_layers"):
        if isinstance(getattr(tower, field, None), int) and not hasattr(tower, "layer_types"):
            setattr(tower, field, 1)


def build(name: str, directory: Path, **changed: int) -> Mapping[str, Any]:
    """Save a random float32 model of the family in `directory`; its config.json. changed: fields."""
    config = tiny_config(name)
    for field, value in changed.items():
        assert hasattr(config, field)
        setattr(config, field, value)
    with torch.device("meta"):
        count = sum(p.numel() for p in auto_class(config).from_config(config).parameters())
    if count > _MOST_WEIGHTS:
        raise ValueError(f"its smallest model here has {count / 1e6:.0f} million weights")
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.numel() and float(parameter.std()) < 1e-6:
                parameter.normal_(0, 0.15)
        for kind, buffer in model.named_buffers():
            if kind.endswith("correction_bias"):
                buffer.normal_(0, 0.2)
    model.save_pretrained(directory)
    said: Mapping[str, Any] = json.loads((directory / "config.json").read_text())
    return said


def compare(name: str, directory: Path, *, quick: bool = False) -> Compared:
    """Run a family through Kvant and through transformers; everything that goes wrong is a reason.

    quick: in float32 alone, and without the engine's cache and preemptions.
    """
    try:
        with quiet_transformers():
            config = build(name, directory)
    except ImportError as fault:
        return _refused(
            None, f"transformers needs a package that is not installed: {_missing(fault)}"
        )
    except Exception as fault:  # each class has its own rules for sizes
        return _refused(None, f"no tiny model was made to compare: {_short(fault)}")
    try:
        return _compare(name, directory, config, quick=quick)
    finally:
        shutil.rmtree(directory)


def _compare(name: str, directory: Path, config: Mapping[str, Any], *, quick: bool) -> Compared:
    try:
        geometry = read_geometry(config) if is_listed(name) else probe(config).geometry
    except ConfigError as refusal:
        return _refused(None, refusal.why)
    if geometry.not_runnable is not None:
        return _refused(geometry, geometry.not_runnable)
    ran: dict[ComputeDtype, Ran] = {}
    for dtype in [ComputeDtype.FLOAT32] if quick else LOGITS_BOUND:
        found = _ran(name, directory, geometry, dtype, quick=quick)
        if isinstance(found, str):
            return Compared(geometry, ran, found)
        ran[dtype] = found
        wrong = [
            f"{way}: {equal} of {ALL_EQUAL}"
            for way, equal in found.equal.items()
            if equal != ALL_EQUAL
        ]
        if not found.logits_error < LOGITS_BOUND[dtype]:
            wrong.append(f"logits within {found.logits_error:.0e}")
        if wrong:
            why = f"its greedy tokens are not transformers' in {dtype.value} ({'; '.join(wrong)})"
            return Compared(geometry, ran, why)
    return Compared(geometry, ran, None)


def _ran(
    name: str, directory: Path, geometry: ModelGeometry, dtype: ComputeDtype, *, quick: bool
) -> Ran | str:
    """How a family fares in a dtype, or why it does not run."""
    try:
        expected, logits = _transformers(directory, dtype)
    except Exception as fault:  # whatever its code makes of a text without an image
        return f"transformers itself does not run its tiny model: {_short(fault)}"

    def count(texts: Sequence[Sequence[int]]) -> int:
        same = _num_equal(texts, expected)
        # A few families' generate contradicts their own forward over the whole text.
        return same if same == ALL_EQUAL else _num_chosen(directory, texts, dtype)

    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=dtype)
    try:
        model = loading.load(directory, plan, geometry)
        whole, pieces = (
            count(
                driver.greedy(
                    model, driver.pool(plan, 60), backend(), PROMPTS, NUM_TOKENS, chunk=chunk
                )
            )
            for chunk in CHUNKS
        )
        error = _error(_logits(model), logits)
        distinct = len({token for text in expected for token in text})
        ran = Ran(model.choice.name, whole, pieces, error, distinct)
        return ran if quick else _served(ran, name, directory, dtype, count)
    except (ConfigError, EngineFault) as fault:
        return fault.why if isinstance(fault, ConfigError) else str(fault)


def _served(
    ran: Ran,
    name: str,
    directory: Path,
    dtype: ComputeDtype,
    count: Callable[[Sequence[Sequence[int]]], int],
) -> Ran:
    """Adds what the engine gives from its cache, and with preemptions."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    said = json.loads((directory / "config.json").read_text())["model_type"]  # gpt-sw3's is gpt2

    def run(llm: LLM, salt: str = "") -> tuple[int, int]:
        found = llm.generate(PROMPTS, params, salt=salt)
        llm.engine.audit()
        equal = count([result.token_ids for result in found])
        return equal, sum(result.num_cached_tokens for result in found)

    with (
        patch.object(read_shape, "compared", lambda: {name: None, said: None}),
        patch.object(kept_states, "LEAST_TOKENS", 1),  # these prompts are short
    ):
        llm = LLM(
            directory, device="cpu", dtype=dtype.value, kv_cache_dtype="float32", page_size=PAGE_SIZE,
            max_model_len=LONGEST, max_num_seqs=len(PROMPTS), max_num_batched_tokens=16,
            kv_cache_memory="64MiB",
        )  # fmt: skip
        first, _ = run(llm)
        again, hits = run(llm)
        with (
            patch.object(HeldPages, "extend_all", lambda *_: False),
            patch.object(HeldPages, "extend", _failing(HeldPages.extend)),
        ):
            preempted, _ = run(llm, salt="finds no page of the others")
    return replace(
        ran, cached=min(first, again), preempted=preempted, hits=hits,
        preemptions=llm.engine.stats.num_preemptions,
    )  # fmt: skip


def _failing(extend: Callable[..., bool]) -> Callable[..., bool]:
    """HeldPages.extend, which finds no page in three of eight calls: the youngest sequences lose their pages.

    A pool that is too small does not do it for every family: one superblock may hold all texts.
    """
    calls = 0

    def fails(self: HeldPages, sequence: Any, count: int) -> bool:
        nonlocal calls
        calls += 1
        return calls % 8 > 2 and extend(self, sequence, count)

    return fails


def _missing(fault: ImportError) -> str:
    """The package that an import lacks, from its name or from transformers' words."""
    words = re.search(r"requires the (\w+) library", str(fault))
    return words[1] if words else fault.name or _short(fault)


def _short(fault: Exception) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split())[:160]}"


def _refused(geometry: ModelGeometry | None, why: str) -> Compared:
    return Compared(geometry, {}, why)


def _num_equal(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    return sum(
        a == b for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True)
    )


def _num_chosen(directory: Path, texts: Sequence[Sequence[int]], dtype: ComputeDtype) -> int:
    """How many tokens of these texts transformers' forward without a cache would choose as well, or ties."""
    model, count = eager(directory, dtype), 0
    with quiet_transformers(), torch.no_grad():
        for prompt, text in zip(PROMPTS, texts, strict=True):
            ids = torch.tensor([[*prompt, *text]])
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
            logits = logits[len(prompt) - 1 : -1]
            least = logits.amax(-1) - TIE[dtype] * logits.abs().amax(-1)
            count += int((logits[range(len(text)), text] >= least).sum())
    return count


def eager(directory: Path, dtype: ComputeDtype = ComputeDtype.FLOAT32) -> Any:
    """transformers' own model with eager attention."""
    said = json.loads((directory / "config.json").read_text())
    with quiet_transformers():
        config = CONFIG_MAPPING[said["model_type"]].from_pretrained(directory)
        model = auto_class(config).from_pretrained(
            directory, attn_implementation="eager", dtype=getattr(torch, dtype.value)
        )
        if dtype is ComputeDtype.FLOAT64:
            model.set_experts_implementation("eager")  # the others have no float64
        return model


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _logits(model: LoadedModel) -> Tensor:
    """Logits of every token of the longest prompt, which runs as one piece."""
    prompt = list(PROMPTS[-1])
    made = driver.Driver(driver.pool(model.plan, 10), backend())
    ids, call, _ = made.call([(driver.Text(prompt), len(prompt))])
    return model.forward(ids, call, torch.arange(len(ids)))


def _transformers(
    directory: Path, dtype: ComputeDtype = ComputeDtype.FLOAT32
) -> tuple[list[list[int]], Tensor]:
    """Greedy texts of `PROMPTS`, one at a time, and logits of the longest prompt; eager attention."""
    model = eager(directory, dtype)
    with quiet_transformers(), torch.no_grad():
        model.generation_config.eos_token_id = None  # texts go on to their full length
        model.generation_config.pad_token_id = 0
        texts = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS
            )
            texts.append([int(token) for token in made[0, len(prompt) :]])
        ids = torch.tensor([PROMPTS[-1]])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    return texts, logits


def divide_filters(path: Path) -> None:
    """Stores filters of q, k and v as OLMo Hybrid is released; transformers saves three equal parts."""
    stored = load_file(path / "model.safetensors")
    for name in [name for name in stored if name.endswith("q_conv1d.weight")]:
        layer = name.removesuffix("q_conv1d.weight")
        joined = torch.cat([stored[f"{layer}{side}_conv1d.weight"] for side in "qkv"])
        widths = [len(stored[f"{layer}{side}_proj.weight"]) for side in "qkv"]
        for side, part in zip("qkv", joined.split(widths), strict=True):
            stored[f"{layer}{side}_conv1d.weight"] = part.clone()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
