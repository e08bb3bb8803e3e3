"""Computes the bytes of a model's weights: from its files if they are here, else from its config.

The plan subtracts them from the memory before any weight is loaded; nothing here loads one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.safetensors_header import Header, find_weight_files
from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import Attention, ModelGeometry
from kvant.models.file_names import AS_MODULES, PRODUCTS, FileNames
from kvant.models.geometry.draft import draft_weights
from kvant.models.geometry.families import (
    decoder_weights,
    find_family,
    is_drafter,
    is_listed,
    text_fields,
)
from kvant.models.geometry.family import Family
from kvant.models.geometry.fields import Fields
from kvant.models.geometry.parameters import Weight, WeightKind, embedding, other, vector
from kvant.models.geometry.weight_methods import with_declaration
from kvant.models.geometry.weight_recipe import NoRecipe, Recipe, read_recipe
from kvant.models.quantization import Quantization, bytes_on_cpu, bytes_on_gpu

ELEMENT_BYTES = {
    ComputeDtype.FLOAT64: 8,
    ComputeDtype.FLOAT32: 4,
    ComputeDtype.FLOAT16: 2,
    ComputeDtype.BFLOAT16: 2,
}

WIDE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of the safetensors dtypes that are converted to the compute dtype by loading."""


class WeightSource(Enum):
    """The source of the number, in the words of `kvant plan`'s JSON."""

    HEADERS = "headers"  # of the safetensors files, or their index
    ESTIMATED = "estimated"  # a closed form over the config


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """The bytes of a model's weights. If they are unknown, bytes and source are None, and reason says why."""

    bytes: int | None
    source: WeightSource | None
    reason: str


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The size of a model's weights according to its files.

    by_dtype: bytes by safetensors dtype ("BF16"), from the headers; None without weight files.
    total: their sum, or the sum in an index without its files. config: config.json, with the
    quantisation recipe that ModelOpt keeps in a separate file. of_matrices: the dtypes of tensors with two
    dimensions or more.
    """

    by_dtype: Mapping[str, int] | None
    total: int | None
    config: Mapping[str, Any]
    of_matrices: frozenset[str] = frozenset()

    def matrices(self, geometry: ModelGeometry) -> ComputeDtype | None:
        """Returns the dtype of all matrices where it is bfloat16, by the headers or else the config."""
        if read_recipe(self.config) is not None or "gguf_types" in self.config:
            return None
        said = {"BF16"} if geometry.dtype is ComputeDtype.BFLOAT16 else set()
        found = self.of_matrices if self.by_dtype is not None else said
        return ComputeDtype.BFLOAT16 if found == {"BF16"} else None


def read_stored_weights(
    directory: Path, config: Mapping[str, Any], headers: Sequence[Header] | None
) -> StoredWeights:
    """Reads the sizes in `directory`. headers: of its weight files, None without any."""
    recipe = with_declaration(config, directory)
    if headers is None:
        return StoredWeights(None, find_weight_files(directory).total_bytes, recipe)
    sizes: Counter[str] = Counter()
    for header in headers:
        for entry in header.tensors.values():
            sizes[entry.dtype] += entry.num_bytes
    entries = [entry for header in headers for entry in header.tensors.values()]
    of_matrices = frozenset(entry.dtype for entry in entries if len(entry.shape) > 1)
    return StoredWeights(dict(sizes), sizes.total(), recipe, of_matrices)


def weight_bytes_of(
    stored: StoredWeights,
    config: Mapping[str, Any],
    geometry: ModelGeometry,
    *,
    compute: ComputeDtype | None = None,
    decoded: bool = False,
    num_weights: int | None = None,
    parameters: Sequence[tuple[str, tuple[int, ...]]] = (),
    matrices: ComputeDtype | None = None,
    names: FileNames = AS_MODULES,
) -> WeightBytes:
    """Returns the bytes of the weights after loading. Pure.

    compute: the compute dtype; None for the stored bytes. decoded: whether quantised matrices are
    decoded while they are loaded (`weight_recipe.are_decoded`); otherwise they keep their size.
    num_weights, parameters: elements, and names and shapes, of a model whose weights Kvant does not list.
    matrices: the dtype that matrices keep instead of the compute dtype; the few other numbers are counted in
    it too. names: that files have.
    """
    compute = compute if matrices is None else matrices
    if num_weights is not None and (decoded or _is_plain_and_absent(stored)):
        size = num_weights * ELEMENT_BYTES[compute or geometry.dtype]
        return WeightBytes(size, WeightSource.ESTIMATED, "counted in transformers' modules")
    if decoded:
        found = estimate_weight_bytes(config, geometry, compute=compute, decoded=True)
        if found.bytes is not None:
            return found
    if stored.by_dtype is not None:
        size = sum(_loaded(stored.by_dtype, config, compute).values())
        return WeightBytes(size, WeightSource.HEADERS, "from the headers of the safetensors files")
    total = stored.total
    if total is not None:
        if compute is not None and read_recipe(config) is None:
            total = total * ELEMENT_BYTES[compute] // ELEMENT_BYTES[geometry.dtype]
        return WeightBytes(total, WeightSource.HEADERS, "from the index of the safetensors files")
    return estimate_weight_bytes(
        stored.config, geometry, compute=compute, parameters=parameters, names=names
    )


def _is_plain_and_absent(stored: StoredWeights) -> bool:
    """Returns whether the weights are not quantised and their files are missing."""
    return stored.total is None and read_recipe(stored.config) is None


def estimate_weight_bytes(
    config: Mapping[str, Any],
    geometry: ModelGeometry,
    *,
    compute: ComputeDtype | None = None,
    decoded: bool = False,
    parameters: Sequence[tuple[str, tuple[int, ...]]] = (),
    names: FileNames = AS_MODULES,
) -> WeightBytes:
    """Returns the bytes from the config alone: the elements of every weight times the bytes of its dtype.

    Counts the weights that transformers' AutoModelForCausalLM loads: no extra prediction layers (MTP),
    and no towers that the class omits. Quantised weights are counted with their scales, or with their
    decoded size. parameters: names and shapes of a probed model's weights. names: that files have, by
    which recipes choose matrices.
    """
    recipe = None if decoded else read_recipe(config)
    if isinstance(recipe, NoRecipe):
        return WeightBytes(None, None, recipe.reason)
    weights = weights_in_files(config, geometry, parameters, names)
    if isinstance(weights, str):
        return WeightBytes(None, None, weights)
    found = _sum(weights, recipe, ELEMENT_BYTES[compute or geometry.dtype])
    reason = "counted from config.json"
    if decoded:
        reason += ": codes are decoded while they are loaded"
    return WeightBytes(found, WeightSource.ESTIMATED, reason)


def quantized_weight_bytes(
    config: Mapping[str, Any],
    geometry: ModelGeometry,
    quantization: Quantization,
    *,
    compute: ComputeDtype | None = None,
    ranks: int = 1,
    parameters: Sequence[tuple[str, tuple[int, ...]]] = (),
) -> WeightBytes:
    """Returns the bytes in memory of weights quantised while they are loaded, from the config.

    compute: the dtype of weights that are not quantised, on a GPU; None for a CPU. ranks: that share them.
    parameters: names and shapes of a probed model's weights.
    """
    layers = place_of_layers(geometry)
    probed = _of_parameters(parameters, layers, drops=compute is None)
    weights = tuple(probed) or models_weights(config, geometry)
    if isinstance(weights, str):
        return WeightBytes(None, None, weights)
    head = None
    if all(weight.name != "lm_head" for weight in weights):
        head = geometry.vocab_size, geometry.hidden_size
    if compute is None:
        found = bytes_on_cpu(quantization, weights, head)
    else:
        found = bytes_on_gpu(
            quantization, weights, head,
            layers=layers, element_bytes=ELEMENT_BYTES[compute], rounds_head=ranks == 1,
        )  # fmt: skip
    return WeightBytes(
        found, WeightSource.ESTIMATED, f"counted from config.json as {quantization.value}"
    )


def place_of_layers(geometry: ModelGeometry) -> str:
    """Returns the path of the decoder's layers in transformers' class, "" if their names do not say it."""
    names = (one.name for one in geometry.layers if one.attention is not Attention.NONE)
    above, found, _ = next(names, "").rpartition(".layers.")
    return f"{above}.layers" if found else ""


def weights_in_files(
    config: Mapping[str, Any],
    geometry: ModelGeometry,
    parameters: Sequence[tuple[str, tuple[int, ...]]],
    names: FileNames,
) -> tuple[Weight, ...] | str:
    """Returns every weight of the model by its name in files, or why they cannot be listed.

    parameters: names and shapes of a probed model's weights; () for a model that Kvant lists. names: of
    experts' matrices, and of layers beside them.
    """
    if parameters:
        return tuple(_probed_weights(parameters, geometry, names))
    listed = models_weights(config, geometry)
    if isinstance(listed, str):
        return listed
    return tuple(replace(weight, name=names.in_files(weight.name)) for weight in listed)


def _probed_weights(
    parameters: Iterable[tuple[str, tuple[int, ...]]], geometry: ModelGeometry, names: FileNames
) -> Iterator[Weight]:
    """Yields a probed model's weights as in `weights_in_files`, with experts' stacks as single matrices."""
    for weight in _of_parameters(parameters, place_of_layers(geometry), drops=False):
        module, _, product = weight.name.rpartition(".")
        if weight.kind is not WeightKind.EXPERT or product not in PRODUCTS:
            yield replace(weight, name=names.in_files(weight.name))
            continue
        matrices = names.of_product(product)
        for one in matrices:
            yield replace(
                weight, name=names.matrix(module, 0, one), rows=weight.rows // len(matrices)
            )


def _of_parameters(
    parameters: Iterable[tuple[str, tuple[int, ...]]], layers: str, *, drops: bool
) -> Iterator[Weight]:
    """Yields a probed model's weights: products are the matrices of its decoder's layers, and the head.

    drops: the forward frees matrices of towers, as the compiled one does.
    """
    for name, shape in parameters:
        path = name.removesuffix(".weight")
        is_inside = path.startswith(f"{layers}.") and min(shape, default=1) > 1
        if path == "lm_head":
            yield embedding(path, *shape)
        elif is_inside and len(shape) == 2 and path != name:
            yield Weight(path, WeightKind.LINEAR, *shape)
        elif is_inside and len(shape) == 3 and ".experts." in name:
            yield Weight(path, WeightKind.EXPERT, shape[1], shape[2], shape[0])
        elif drops and len(shape) == 2 and path != name and "embed" not in path:
            continue
        else:
            yield other(path, *shape)


def _sum(weights: Iterable[Weight], recipe: Recipe | None, element_bytes: int) -> int:
    found = 0
    for weight in weights:
        stored = None if recipe is None else recipe.stored_bytes(weight)
        found += weight.numel * element_bytes if stored is None else stored
    return found


def list_weights(config: Mapping[str, Any], geometry: ModelGeometry) -> tuple[Weight, ...]:
    """Returns every weight of a model of a listed family."""
    found = _listed(config, geometry)
    assert not isinstance(found, str), found
    return tuple(found)


def models_weights(config: Mapping[str, Any], geometry: ModelGeometry) -> tuple[Weight, ...] | str:
    """Returns every weight of the model, or why they cannot be listed.

    The KV cache's shape does not depend on some of the fields, so a plan can continue without them.
    """
    try:
        found = _listed(config, geometry)
        return found if isinstance(found, str) else tuple(found)
    except BadCheckpoint as fault:
        return fault.what


def _listed(config: Mapping[str, Any], geometry: ModelGeometry) -> Iterable[Weight] | str:
    if is_drafter(config):
        return draft_weights(config, geometry)
    if not is_listed(geometry.model_type):
        return f"Kvant does not list the weights of {geometry.model_type}"
    family = find_family(config)
    towers = () if family.towers is None else family.towers(Fields(config))
    if isinstance(towers, str):
        return towers
    return (*_decoder(config, family, geometry), *towers)


def _decoder(
    config: Mapping[str, Any], family: Family, geometry: ModelGeometry
) -> Iterator[Weight]:
    """Yields weights of layers, embedding, final norm, and of a head that is not tied to the embedding."""
    fields = text_fields(config, family)
    at = family.prefix.removesuffix(".layers")
    yield from decoder_weights(config, family, geometry.layers)
    yield embedding(f"{at}.embed_tokens", geometry.vocab_size, geometry.hidden_size)
    yield vector(f"{at}.norm", geometry.hidden_size)
    # Classes for the whole config read this field there, and classes for the text section in that section.
    whole = Fields(config) if at == "model.language_model" else fields
    if not whole.flag("tie_word_embeddings", family.tied):
        yield embedding("lm_head", geometry.vocab_size, geometry.hidden_size)


def _loaded(
    stored: Mapping[str, int], config: Mapping[str, Any], compute: ComputeDtype | None
) -> Mapping[str, int]:
    """Returns bytes by dtype after loading, which converts floats to the compute dtype.

    In a quantised checkpoint, 32-bit floats are scales, which are not converted.
    """
    if compute is None:
        return stored
    quantised = read_recipe(config) is not None
    return {
        dtype: size
        if dtype not in WIDE_BYTES or (quantised and dtype == "F32")
        else size * ELEMENT_BYTES[compute] // WIDE_BYTES[dtype]
        for dtype, size in stored.items()
    }
