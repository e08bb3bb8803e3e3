"""The demo model for llama.cpp, in the weight formats to compare."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

from kvant.models.demo import demo_gguf
from kvant.models.import_cache import cache_root


class PeerWeights(Enum):
    """How llama.cpp stores weights: matrices in this type, vectors in float32. See `convert`."""

    F32 = (GGMLQuantizationType.F32, LlamaFileType.ALL_F32)
    Q8_0 = (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0)
    Q4_0 = (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0)


def demo_file(weights: PeerWeights) -> Path:
    """Returns one GGUF file with the demo model's numbers, as Kvant imports them; made once, then cached."""
    source = demo_gguf()
    directory = cache_root() / "peers"
    final = directory / f"{source.stem}-{weights.name}.gguf"
    if final.exists():
        return final
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = final.with_suffix(".partial")
    convert(source, partial, weights)
    return partial.rename(final)


def convert(source: Path, path: Path, weights: PeerWeights) -> None:
    """Writes `path`: tensors and facts of the GGUF file `source`, with matrices in another type.

    The embedding, which is also the head, has 8 bits with 4-bit layers, as in Kvant and in files
    of llama.cpp's own quantiser (which would take Q6_K).
    """
    reader = GGUFReader(source)
    writer = GGUFWriter(path, arch="llama")
    kind, file_type = weights.value
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        if field.name == "general.file_type":
            writer.add_file_type(file_type)
            continue
        outer, inner = field.types[0], field.types[-1]
        sub_type = inner if outer is GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), outer, sub_type=sub_type)
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        wanted = _type_of(tensor.name, numbers.ndim, kind)
        writer.add_tensor(tensor.name, quantize(numbers, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _type_of(name: str, ndim: int, kind: GGMLQuantizationType) -> GGMLQuantizationType:
    if ndim < 2:
        return GGMLQuantizationType.F32
    is_head = name in ("token_embd.weight", "output.weight")
    return GGMLQuantizationType.Q8_0 if is_head and kind is GGMLQuantizationType.Q4_0 else kind
