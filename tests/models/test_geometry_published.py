"""What the configs of published models mean for the KV cache."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from kvant.errors import BadCheckpoint
from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import Attention, ModelGeometry, StateKind
from kvant.models.geometry import read_geometry
from tests.models.configs import CONFIGS, PUBLISHED, changed, published


def read(name: str) -> ModelGeometry:
    return read_geometry(published(name))


def numbers_per_token(geometry: ModelGeometry) -> int:
    """Elements of K and V that one token adds to the cache; a latent's value is a part of its K."""
    return sum(
        layer.num_kv_heads
        * (layer.head_dim_k + (0 if layer.attention is Attention.MLA else layer.head_dim_v))
        for layer in geometry.layers
        if layer.has_kv
    )


# Layers, those with KV, elements per token, and the windows in use. The elements are (KV heads x
# (K + V) x layers), worked out by hand from the models' technical reports.
FACTS = {
    "llama-3.1-8b": (32, 32, 8 * 256 * 32, {None}),
    "llama-3.1-70b": (80, 80, 8 * 256 * 80, {None}),
    "smollm2-135m": (30, 30, 3 * 128 * 30, {None}),
    "qwen2.5-7b": (28, 28, 4 * 256 * 28, {None}),
    "qwen3-8b": (36, 36, 8 * 256 * 36, {None}),
    "qwen3-32b": (64, 64, 8 * 256 * 64, {None}),
    "qwen3-30b-a3b": (48, 48, 4 * 256 * 48, {None}),
    "mistral-7b-v0.1": (32, 32, 8 * 256 * 32, {4096}),
    "mistral-7b-v0.3": (32, 32, 8 * 256 * 32, {None}),
    "mixtral-8x7b": (32, 32, 8 * 256 * 32, {None}),
    "phi-3-mini-4k": (32, 32, 32 * 192 * 32, {2047}),
    "olmo-2-7b": (32, 32, 32 * 256 * 32, {None}),
    "gpt-oss-20b": (24, 24, 8 * 128 * 24, {128, None}),
    "gemma-2-9b": (42, 42, 8 * 512 * 42, {4096, None}),
    "gemma-3-1b": (26, 26, 1 * 512 * 26, {512, None}),
    "gemma-3-4b": (34, 34, 4 * 512 * 34, {1024, None}),
    "gemma-3-12b": (48, 48, 8 * 512 * 48, {1024, None}),
    "gemma-3n-e4b": (35, 20, 2 * 512 * 20, {512, None}),
    "gemma-3n-e4b-text": (35, 20, 2 * 512 * 20, {512, None}),
    "gemma-4-e2b": (35, 15, 1 * 512 * 12 + 1 * 1024 * 3, {512, None}),
    "gemma-4-31b": (60, 60, 16 * 512 * 50 + 4 * 1024 * 10, {1024, None}),
    "gemma-4-26b-a4b": (30, 30, 8 * 512 * 25 + 2 * 1024 * 5, {1024, None}),
    "deepseek-v2-lite": (27, 27, 576 * 27, {None}),
    "deepseek-v3": (61, 61, 576 * 61, {None}),
    "mimo-v2-flash": (48, 48, 4 * 320 * 9 + 8 * 320 * 39, {129, None}),
    "qwen3-next-80b-a3b": (48, 12, 2 * 512 * 12, {None}),
    "qwen3.5-27b": (64, 16, 4 * 512 * 16, {None}),
    "qwen3.5-9b": (32, 8, 4 * 512 * 8, {None}),
}


def test_every_published_config_is_judged() -> None:
    assert set(FACTS) == set(PUBLISHED)


@pytest.mark.parametrize("name", FACTS)
def test_layers_elements_and_windows_of_published_models(name: str) -> None:
    geometry = read(name)
    layers, with_kv, elements, windows = FACTS[name]
    assert len(geometry.layers) == layers
    assert [layer.index for layer in geometry.layers] == list(range(layers))
    assert sum(layer.has_kv for layer in geometry.layers) == with_kv
    assert numbers_per_token(geometry) == elements
    assert {layer.window for layer in geometry.layers} == windows


def test_gemma_3_attends_fully_in_every_sixth_layer() -> None:
    full = [layer.index for layer in read("gemma-3-4b").layers if layer.window is None]
    assert full == [5, 11, 17, 23, 29]


def test_gemma_2_caps_scores_and_begins_with_a_window() -> None:
    layers = read("gemma-2-9b").layers
    assert {layer.softcap for layer in layers} == {50.0}
    assert [layer.window for layer in layers[:3]] == [4096, None, 4096]


def test_gpt_oss_has_sinks_in_every_layer() -> None:
    assert all(layer.sinks for layer in read("gpt-oss-20b").layers)


@pytest.mark.parametrize(
    ("name", "sliding", "full"), [("gemma-3n-e4b", 18, 19), ("gemma-4-e2b", 13, 14)]
)
def test_shared_layers_read_the_last_layer_of_their_type_that_writes(
    name: str, sliding: int, full: int
) -> None:
    layers = read(name).layers
    shared = [layer for layer in layers if layer.shared_with is not None]
    assert [layer.index for layer in shared] == list(range(len(layers) - len(shared), len(layers)))
    for layer in shared:
        assert layer.attention is Attention.SHARED
        assert not layer.has_kv
        assert layer.shared_with == (full if layer.window is None else sliding)
        source = layers[layer.shared_with]
        assert (layer.num_kv_heads, layer.head_dim_k) == (source.num_kv_heads, source.head_dim_k)


def test_gemma_4_has_two_head_sizes() -> None:
    layers = read("gemma-4-31b").layers
    assert (layers[0].num_kv_heads, layers[0].head_dim_k, layers[0].head_dim_v) == (16, 256, 256)
    assert (layers[5].num_kv_heads, layers[5].head_dim_k, layers[5].head_dim_v) == (4, 512, 512)


def test_mimo_stores_wider_keys_than_values() -> None:
    full, sliding = read("mimo-v2-flash").layers[:2]
    assert (full.num_kv_heads, full.head_dim_k, full.head_dim_v, full.sinks) == (4, 192, 128, False)
    assert (sliding.num_kv_heads, sliding.head_dim_k, sliding.sinks) == (8, 192, True)


def test_recurrent_layers_keep_no_kv_and_their_index() -> None:
    layers = read("qwen3-next-80b-a3b").layers
    assert [layer.index for layer in layers if layer.has_kv] == list(range(3, 48, 4))
    assert layers[0].attention is Attention.NONE
    assert layers[0].name == "model.layers.0.linear_attn"


STATES = {
    "qwen3-next-80b-a3b": 36 * 4 * (32 * 128 * 128) + 36 * 2 * 3 * 8192,
    "qwen3.5-27b": 48 * 4 * (48 * 128 * 128) + 48 * 2 * 3 * 10240,
    "qwen3.5-9b": 24 * 4 * (32 * 128 * 128) + 24 * 2 * 3 * 8192,
}
"""Bytes of states per sequence: float32 matrices, and three bfloat16 inputs of each channel."""


@pytest.mark.parametrize("name", STATES)
def test_states_of_published_models(name: str) -> None:
    geometry = read(name)
    sizes = {StateKind.RECURRENT: 4, StateKind.CONV: 2}
    found = sum(
        sizes[state.kind] * math.prod(state.shape)
        for layer in geometry.layers
        for state in layer.states
    )
    assert found == STATES[name]


RUNNABLE = {
    "qwen3-next-80b-a3b", "qwen3.5-27b", "qwen3.5-9b",
    "llama-3.1-8b", "llama-3.1-70b", "smollm2-135m", "qwen2.5-7b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b",
    "mistral-7b-v0.1", "mistral-7b-v0.3", "mixtral-8x7b", "gemma-2-9b", "gemma-3-1b",
    "gemma-3-4b", "gemma-3-12b", "gemma-3n-e4b-text", "gemma-4-26b-a4b", "gemma-4-31b", "gemma-4-e2b",
    "gpt-oss-20b", "phi-3-mini-4k", "olmo-2-7b", "deepseek-v2-lite", "deepseek-v3",
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_cannot_run_yet_says_why(name: str) -> None:
    reason = read(name).not_runnable
    assert (reason is None) == (name in RUNNABLE)
    assert reason is None or len(reason) > 20


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-3.1-8b", ComputeDtype.BFLOAT16),  # torch_dtype
        ("gemma-4-31b", ComputeDtype.BFLOAT16),  # dtype
        ("qwen3.5-27b", ComputeDtype.BFLOAT16),  # inside text_config
        ("olmo-2-7b", ComputeDtype.FLOAT32),
    ],
)
def test_dtype_is_read_wherever_a_config_keeps_it(name: str, dtype: ComputeDtype) -> None:
    assert read(name).dtype is dtype


def test_dtype_is_float32_where_a_config_names_none() -> None:
    config = published("llama-3.1-8b", torch_dtype=...)
    assert read_geometry(config).dtype is ComputeDtype.FLOAT32


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("qwen3-8b", 40960),
        ("llama-3.1-8b", 131072),  # after scaling from 8192
        ("deepseek-v3", 163840),  # YaRN, 40 times 4096
        ("gpt-oss-20b", 131072),
        ("gemma-3-4b", 131072),  # left to transformers' class
    ],
)
def test_longest_context_is_the_scaled_one(name: str, length: int) -> None:
    assert read(name).max_model_len == length


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_added_by_hand_lengthens_the_context(key: str) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = changed(published("qwen2.5-7b"), **{key: rope})
    assert read_geometry(config).max_model_len == 131072


def test_a_config_without_a_limit_has_none() -> None:
    config = published("llama-3.1-8b", max_position_embeddings=..., rope_scaling=...)
    assert read_geometry(config).max_model_len is None


def test_architecture_is_the_configs_else_its_model_type() -> None:
    config = published("qwen3-8b")
    assert read_geometry(config).architecture == "Qwen3ForCausalLM"
    assert read_geometry(changed(config, architectures=...)).architecture == "qwen3"


def test_a_config_without_a_model_type_is_refused_as_transformers_refuses_it() -> None:
    config = published("qwen3-8b", model_type=...)
    with pytest.raises(BadCheckpoint, match="model_type is missing") as refused:
        read_geometry(config)
    assert '"model_type": "qwen3"' in str(refused.value)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_geometry_and_weights_of_70b_take_a_second_and_no_torch() -> None:
    path = CONFIGS / "llama-3.1-70b.json"
    script = f"""
import json, sys, time
from pathlib import Path
from kvant.models.geometry import read_geometry
from kvant.models.geometry.compute_dtype import host_cpu_has_bf16
from kvant.models.weights import estimate_weight_bytes
config = json.loads(Path({str(path)!r}).read_text())
geometry = read_geometry(config)
assert estimate_weight_bytes(config, geometry).bytes == 141107412992
host_cpu_has_bf16()
assert time.process_time() < 1, time.process_time()
status = Path("/proc/self/status").read_text()
assert int(status.split("VmHWM:")[1].split()[0]) < 100 * 1024  # KiB
loaded = {{"torch", "transformers", "numpy"}} & set(sys.modules)
assert not loaded, loaded
"""
    source = Path(__file__).parents[2] / "src"
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(source)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
