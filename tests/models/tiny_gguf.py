"""Small GGUF files, written by the gguf package, whole or broken on purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import quantize

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
# Qwen3 states its head size, and transformers' reading of GGUF knows only its usual one.
QWEN3_HEAD_DIM = 128
CONTROL, NORMAL = 3, 1
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġt he", "a n", "Ġ a", "1 2")
QUANTIZED = gguf.GGMLQuantizationType.Q8_0

Values = dict[str, npt.NDArray[Any]]


def byte_letters() -> list[str]:
    """The 256 letters of byte-level vocabularies, in byte order (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def vocabulary() -> list[str]:
    return [*SPECIAL, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]


def metadata(arch: str = "llama", /, **changes: object) -> dict[str, object]:
    """What the file says; a change of None removes a key, dots are written `__`."""
    tokens = vocabulary()
    said: dict[str, object] = {
        "general.name": "Tiny",
        "general.license": "apache-2.0",
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": INNER,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if t in SPECIAL else NORMAL for t in tokens],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    if arch == "llama":
        said["llama.rope.dimension_count"] = HEAD_DIM
    if arch == "qwen3":
        said["qwen3.attention.key_length"] = QWEN3_HEAD_DIM
        said["qwen3.attention.value_length"] = QWEN3_HEAD_DIM
    said |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in said.items() if value is not None}


def tensors(arch: str = "llama") -> Values:
    """Random weights in GGUF's names and order of rows."""
    rng = np.random.default_rng(7)
    head_dim = QWEN3_HEAD_DIM if arch == "qwen3" else HEAD_DIM
    q_rows, kv_rows = HEADS * head_dim, KV_HEADS * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(vocabulary()), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        here = f"blk.{i}"
        shapes |= {
            f"{here}.attn_norm.weight": (HIDDEN,),
            f"{here}.ffn_norm.weight": (HIDDEN,),
            f"{here}.attn_q.weight": (q_rows, HIDDEN),
            f"{here}.attn_k.weight": (kv_rows, HIDDEN),
            f"{here}.attn_v.weight": (kv_rows, HIDDEN),
            f"{here}.attn_output.weight": (HIDDEN, q_rows),
            f"{here}.ffn_gate.weight": (INNER, HIDDEN),
            f"{here}.ffn_up.weight": (INNER, HIDDEN),
            f"{here}.ffn_down.weight": (HIDDEN, INNER),
        }
        if arch == "qwen2":
            shapes |= {f"{here}.attn_{n}.bias": (kv_rows,) for n in "kv"}
            shapes[f"{here}.attn_q.bias"] = (q_rows,)
        if arch == "qwen3":
            shapes |= {f"{here}.attn_{n}_norm.weight": (head_dim,) for n in "qk"}
    return {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}


def write_gguf(
    path: Path,
    said: Mapping[str, object] | None = None,
    values: Values | None = None,
    arch: str = "llama",
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write a file; matrices are quantised to Q8_0 where `types` does not say otherwise.

    values of uint8 are blocks of the type that `types` says.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (metadata(arch) if said is None else said).items():
        _adder(writer, value)(key, value)
    for name, array in (tensors(arch) if values is None else values).items():
        chosen = (types or {}).get(name, QUANTIZED if array.ndim == 2 else None)
        if chosen is None or chosen is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, array)
        elif array.dtype == np.uint8:
            writer.add_tensor(name, array, raw_dtype=chosen)
        else:
            writer.add_tensor(name, quantize(array, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _adder(writer: gguf.GGUFWriter, value: object) -> Callable[[str, Any], None]:
    if isinstance(value, bool):
        return writer.add_bool
    if isinstance(value, int):
        return writer.add_uint32
    if isinstance(value, float):
        return writer.add_float32
    if isinstance(value, str):
        return writer.add_string
    return writer.add_array
