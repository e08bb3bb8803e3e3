"""Reads which layers of a checkpoint have narrow weights that run undecoded, and in which dialect. No torch.

A dialect is how a checkpoint writes a narrow weight: names, shapes and dtypes of its tensors.
`kvant.weights.dialects` converts them to `NarrowWeight`, which runs, or is decoded where no product takes
it. Other quantised checkpoints are decoded by transformers while they are loaded, or refused.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint, NotServable, WayOut
from kvant.kv.checkpoint.json_file import COMPARE_CONFIG
from kvant.kv.dtype import ComputeDtype
from kvant.models.file_names import AS_MODULES, FileNames
from kvant.models.geometry.fields import Fields, shown, text_section
from kvant.models.geometry.mixtures import EXPERT_FIELDS
from kvant.models.geometry.weight_methods import COMPRESSED_TENSORS, PLAIN
from kvant.models.geometry.weight_names import (
    OF_TRANSFORMERS,
    by_precedence,
    exceptions,
    gptq_left_alone,
    names_chosen,
    names_left_alone,
)
from kvant.models.geometry.weight_recipe import (
    arguments,
    is_sparse,
    linear_groups,
    read_recipe,
)
from kvant.models.quantization import Activations
from kvant.weights.format import (
    BLOCK_TYPES,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT8_CHANNEL,
    MXFP4,
    NVFP4,
    WHOLE,
    Code,
    Dialect,
    Scale,
    Scheme,
    WeightFormat,
)

_LAYOUTS = (
    "dense", "sparse-bitmask", "sparse-24-bitmask", "int-quantized", "float-quantized",
    "naive-quantized", "pack-quantized", "marlin-24", "mixed-precision", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized",
)  # fmt: skip
"""compressed-tensors' layouts of stored weights."""

_SCALES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("fp8", "mxfp8"), ("weight_scale_inv", "scale", "qscale_weight")),
    **dict.fromkeys(("bitnet", "fbgemm_fp8", *COMPRESSED_TENSORS), ("weight_scale",)),
}
"""Names that transformers reads scales by, behind a layer's name, if codes are the tensor `weight`."""

_OF_GPT_OSS = "transformers reads mxfp4 as experts of gpt-oss alone"

_IN_BYTES = ("int-quantized", "naive-quantized")
"""Layouts in which each integer has a byte."""

_WORDS: Mapping[str, tuple[str, ...]] = {
    "type": ("int", "float"),
    "strategy": ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"),
}

_EXPERT = re.compile(r"(.*\.experts)\.\d+\.([^.]+)$")
"""The path of one expert's matrix: that of its layer's experts, a number, and the matrix."""

ONE_FORMAT = WayOut("take a checkpoint whose experts of a layer have one format")

_HALF = (ComputeDtype.BFLOAT16, ComputeDtype.FLOAT16)


@dataclass(frozen=True, slots=True)
class Stored:
    """How a checkpoint stores its narrow weights.

    groups: (which layers' names match, None for all; their scheme). The first match decides. left_alone:
    matches names of layers without narrow weights. activations: the checkpoint's words about activations,
    "" for none. words: the summary, "" if the formats say it. rounding: how products follow the activations;
    None if they cannot. ignore_field: the field of quantization_config that lists layers without narrow
    weights. names: of layers and experts in the files.
    """

    groups: tuple[tuple[Callable[[str], bool] | None, Scheme], ...]
    left_alone: Callable[[str], bool]
    activations: str = ""
    words: str = ""
    rounding: Activations | None = None
    ignore_field: str = "ignore"
    names: FileNames = AS_MODULES

    def leave_alone(self, layer: str) -> WayOut:
        """Returns the way out for a layer with 16-bit weights that the declaration makes narrow."""
        entry = f'"{layer}"'
        if self.ignore_field == "dynamic":
            entry = json.dumps({f"-:{re.escape(layer)}$": {}})[1:-1]
        return WayOut(
            f"if it is meant to be wide, add {entry} to quantization_config.{self.ignore_field}"
        )

    @property
    def summary(self) -> str:
        """Describes the formats."""
        if self.words:
            return self.words
        formats = ", ".join(dict.fromkeys(scheme.summary for _, scheme in self.groups))
        return f"linear layers run as they are stored: {formats}"

    @property
    def without_input_scales(self) -> Stored:
        """A copy for which scales of activations are not read."""
        groups = tuple((names, replace(one, rounds_inputs=False)) for names, one in self.groups)
        return replace(self, groups=groups)

    @property
    def no_product(self) -> str:
        """Why no product multiplies by some of these weights, "" if products multiply by all."""
        return next((scheme.no_product for _, scheme in self.groups if scheme.no_product), "")

    @property
    def is_reordered(self) -> bool:
        """Whether layers have their inputs in another order (act-order)."""
        return any(scheme.reordered for _, scheme in self.groups)

    def scheme(self, name: str) -> Scheme | None:
        """Returns a linear layer's scheme by its path, such as model.layers.0.mlp.up_proj; else None.

        Declarations name layers as files do.
        """
        return _scheme_of(self, self.names.in_files(name))

    def refuse_expert(self, matrix: str) -> str | None:
        """Returns why an expert's matrix cannot be used beside its layer's other experts; None if it can.

        matrix: its path in files. Experts are used together: all are narrow or none, and the matrices of one
        product have one format. Paths of other modules are not refused.
        """
        found = _EXPERT.match(matrix)
        if found is None:
            return None
        experts, part = found.groups()
        gate, down = (f"{experts}.0.{one}" for one in (self.names.gate, self.names.down))
        own, of_gate = self.scheme(matrix), self.scheme(gate)
        if (own is None) != (of_gate is None):
            return f"{gate} is {'wide' if of_gate is None else 'narrow'}"
        first = down if part == self.names.down else gate
        return None if own == self.scheme(first) else f"{first} has another format"


@functools.lru_cache(maxsize=64)  # hundreds of experts are compared with the same two matrices
def _scheme_of(stored: Stored, path: str) -> Scheme | None:
    """Implements `Stored.scheme` for a path in files. Patterns of a declaration may be many."""
    if stored.left_alone(path):
        return None
    return next((s for chosen, s in stored.groups if chosen is None or chosen(path)), None)


@dataclass(frozen=True, slots=True)
class NotStored:
    """The reason why a checkpoint's narrow weights must be decoded.

    scales: names behind a layer's of the tensor that transformers reads as its scales; () if unknown.
    block: rows and columns that share a scale, as declared; () if unknown. holds_numbers: files must not hold
    codes.
    """

    reason: str
    scales: tuple[str, ...] = ()
    block: tuple[int, ...] = ()
    holds_numbers: bool = False


def read_stored(
    config: Mapping[str, Any], device: DeviceFacts, compute: ComputeDtype | None = None
) -> Stored | NotStored | None:
    """Returns how this checkpoint's narrow weights run undecoded; None if it has no narrow weights. Pure.

    compute: the compute dtype; None if it is not known yet, which means 16 bits on a GPU.
    """
    blocks = read_blocks(config)
    if blocks is not None:
        return _blocks_on(device, compute) or blocks
    if not declares_weights(config):
        return None
    if device.kind is DeviceKind.CPU:
        return _on_cpu(config, compute)
    if device.kind is not DeviceKind.CUDA:
        return NotStored("weights run as they are stored on NVIDIA GPUs and on CPUs")
    found = _with_products(_declared(config))
    if isinstance(found, NotStored) or compute is None or compute in _HALF:
        return found
    return NotStored(
        f"products with narrow weights compute in 16 bits, not in {compute.value}: "
        "--dtype bfloat16 keeps them"
    )


def _with_products(found: Stored | NotStored) -> Stored | NotStored:
    """Returns what products multiply by; for weights that are only decoded, the reason."""
    reason = found.no_product if isinstance(found, Stored) else ""
    return NotStored(reason) if reason else found


def declared_weights(config: Mapping[str, Any]) -> Stored | NotStored | None:
    """Returns how a checkpoint says that it stores narrow weights, on any device; None: not at all."""
    blocks = read_blocks(config)
    if blocks is not None or not declares_weights(config):
        return blocks
    return _declared(config)


def names_in_files(config: Mapping[str, Any]) -> FileNames:
    """Returns how a checkpoint with narrow weights names layers and experts."""
    found = declared_weights(config)
    return found.names if isinstance(found, Stored) else AS_MODULES


def declares_weights(config: Mapping[str, Any]) -> bool:
    """Returns whether a quantization_config covers weights. It may describe the KV cache alone."""
    return (
        isinstance(config.get("quantization_config"), Mapping) and read_recipe(config) is not None
    )


def decoded_here(config: Mapping[str, Any]) -> Stored | None:
    """Returns the narrow weights that Kvant decodes while they are loaded, if none run as they are stored.

    None if there are none, or if transformers decodes them: mxfp4, and what Kvant does not read.
    """
    found = declared_weights(config)
    if not isinstance(found, Stored):
        return None
    if any(scheme.dialect is Dialect.MXFP4_EXPERTS for _, scheme in found.groups):
        return None
    return found.without_input_scales


def declared_activations(config: Mapping[str, Any]) -> str:
    """Returns what a checkpoint with narrow weights declares about activations, "" for nothing."""
    found = declared_weights(config)
    return found.activations if isinstance(found, Stored) else ""


def _blocks_on(device: DeviceFacts, compute: ComputeDtype | None) -> NotStored | None:
    """Returns why products with GGUF's blocks do not run on this device, or None."""
    if device.kind is DeviceKind.CPU:
        if compute in (None, ComputeDtype.FLOAT32):
            return None
        return NotStored("products with GGUF's blocks compute in float32 on a CPU")
    if device.kind is not DeviceKind.CUDA:
        return NotStored("GGUF's blocks run as they are stored on NVIDIA GPUs and on CPUs")
    if compute is None or compute in _HALF:
        return None
    return NotStored(
        f"products with GGUF's blocks compute in 16 bits on a GPU, not in {compute.value}: "
        "--dtype bfloat16 keeps them"
    )


def _on_cpu(config: Mapping[str, Any], compute: ComputeDtype | None) -> Stored | NotStored:
    """Returns `read_stored` for a CPU, which multiplies 4-bit integers in groups and 8-bit ones by output."""
    if compute not in (None, ComputeDtype.FLOAT32):
        return NotStored("products with narrow weights compute in float32 on a CPU")
    found = _with_products(_declared(config))
    for _, scheme in found.groups if isinstance(found, Stored) else ():
        fmt = scheme.format
        if fmt != INT8_CHANNEL and not (fmt.code is Code.INT4 and fmt.scale is Scale.FLOAT16):
            return NotStored(f"weights of {fmt.name} run as they are stored on NVIDIA GPUs")
    if isinstance(found, Stored) and lists_experts(config):
        return NotStored("experts run as they are stored on NVIDIA GPUs")
    if isinstance(found, Stored) and text_section(config).get("linear_num_key_heads"):
        return NotStored("recurrent layers run as they are stored on NVIDIA GPUs")
    return found


def refuse_unreadable(config: Mapping[str, Any]) -> BadCheckpoint | None:
    """Returns the error of a quantization_config with a value that no reader takes; None for others."""
    if not isinstance(config.get("quantization_config"), Mapping):
        return None
    try:
        _read(config)
    except BadCheckpoint as fault:
        return fault
    except re.error as fault:
        return BadCheckpoint(
            "config.json: quantization_config names modules by a broken pattern",
            why=str(fault),
            ways_out=(COMPARE_CONFIG,),
        )
    return None


def refuse_left(config: Mapping[str, Any]) -> NotServable | None:
    """Returns why transformers cannot read narrow weights that are left to it; None if nothing is known.

    `refuse_unreadable` must accept the config.
    """
    fields = Fields(config).inside("quantization_config")
    method = None if fields is None else fields.text("quant_method")
    if fields is None or method is None:
        return None
    family = text_section(config).get("model_type")
    if method == "mxfp4" and family != "gpt_oss":
        return NotServable(
            f"config.json: weights of {shown(family)} are quantised by mxfp4",
            why=_OF_GPT_OSS,
            ways_out=(PLAIN,),
        )
    for group, weights, layout in linear_groups(fields) if method in COMPRESSED_TENSORS else ():
        kind = "integers" if weights.text("type") == "int" else "floats"
        why = ""
        if layout == "pack-quantized" and not weights.flag("symmetric", True):
            why = "transformers reads zero points of packed integers in another shape"
        elif lists_experts(config) and "nvfp4" in layout:
            why = "transformers joins experts without the factor that each has"
        elif lists_experts(config) and _is_fp8_in_parts(weights):
            why = "transformers reads scales of experts' whole outputs alone"
        elif weights.text("type") == "int" and layout in (*_IN_BYTES, "float-quantized"):
            if lists_experts(config):
                why = "transformers cannot join such experts"
            elif group.inside("input_activations") is None and not group.has("format"):
                why = "compressed-tensors takes integers without input_activations for packed ones"
        if why:
            return NotServable(
                f"config.json: weights are {kind} in the layout {shown(layout)}",
                why=why,
                ways_out=(PLAIN,),
            )
    return None


def _is_fp8_in_parts(weights: Fields) -> bool:
    """Returns whether 8-bit floats have scales for parts of an output."""
    is_fp8 = weights.text("type") == "float" and weights.integer("num_bits", most=16) == 8
    return is_fp8 and weights.text("strategy") in ("block", "group")


def _declared(config: Mapping[str, Any]) -> Stored | NotStored:
    """Reads the quantization_config of a checkpoint."""
    try:
        return _read(config)
    except (BadCheckpoint, re.error) as fault:
        what = fault.what if isinstance(fault, BadCheckpoint) else str(fault)
        return NotStored(f"the quantization_config cannot be read: {what}")


def _read(config: Mapping[str, Any]) -> Stored | NotStored:
    """Reads the quantization_config. Raises BadCheckpoint and re.error for values of a wrong kind."""
    fields = Fields(config).inside("quantization_config")
    assert fields is not None
    method = fields.text("quant_method") or ""
    is_compressed = method in COMPRESSED_TENSORS
    if is_compressed:
        _check_words(fields)
    found = _read_method(config, fields, method)
    if isinstance(found, NotStored):
        found = replace(found, scales=_SCALES.get(method, ()))
    if is_compressed and isinstance(found, NotStored):
        for _, weights, _ in linear_groups(fields):
            if _is_reordered(weights):
                raise BadCheckpoint(
                    weights.bad("actorder", "").what,
                    why=f"no product takes reordered inputs (act-order) here: {found.reason}",
                    ways_out=(WayOut("choose a checkpoint whose actorder is weight or null"),),
                )
    return found


def _read_method(config: Mapping[str, Any], fields: Fields, method: str) -> Stored | NotStored:
    found: Stored | NotStored
    place: str | None = ""
    if isinstance(config.get("text_config"), Mapping):
        place = _DECODERS.get(str(config.get("model_type")))
    reader = _READERS.get(method)
    if place is None:
        found = NotStored("models with several parts are decoded while they are loaded")
    elif lists_experts(config) or method == "mxfp4":
        found = _with_experts(Fields(text_section(config)), fields, method)
    elif reader is None:
        found = NotStored(f"Kvant has no products for {shown(method)}")
    else:
        found = reader(fields)
    if isinstance(found, Stored) and place:
        return replace(found, names=replace(found.names, layers=place))
    return found


def _check_words(fields: Fields) -> None:
    """Raises BadCheckpoint for words that compressed-tensors does not know."""
    if fields.is_null("format"):
        raise fields.bad("format", "it must be a text")
    _check_word(fields, "format", _LAYOUTS)
    for group, weights, _ in linear_groups(fields):
        _check_word(group, "format", _LAYOUTS)
        inputs = arguments(group, "input_activations")
        for section in (weights, *(() if inputs is None else (inputs,))):
            for name, known in _WORDS.items():
                _check_word(section, name, known)
            if section.given("group_size") == 0:
                raise section.bad("group_size", "a group has at least one input")
        if weights.is_null("type"):
            raise weights.bad("type", "it must be a text")
        strategy = weights.text("strategy")
        if strategy in ("group", "tensor_group") and weights.given("group_size") in (None, -1):
            raise weights.bad("group_size", "its scales belong to groups of inputs")
        if strategy == "block" and not weights.has("block_structure"):
            raise weights.bad("block_structure", "its scales belong to blocks")
        if type(weights.given("actorder")) is not bool:
            _check_word(weights, "actorder", ("weight", "static", "group", "dynamic"))


def _is_reordered(weights: Fields) -> bool:
    """Returns whether compressed-tensors' `weights` entry declares that inputs are in another order."""
    return weights.given("actorder") in (True, "group", "dynamic")


def _check_word(fields: Fields, name: str, known: Sequence[str]) -> None:
    word = fields.text(name)
    if word is not None and word not in known:
        raise fields.bad(name, f"compressed-tensors knows {', '.join(known)}")


def _with_experts(model: Fields, fields: Fields, method: str) -> Stored | NotStored:
    """Reads a model with experts. It needs known names of tensors, and one format for a layer's experts."""
    family = model.text("model_type") or ""
    if method == "mxfp4":
        if family != "gpt_oss":
            return NotStored(_OF_GPT_OSS)
        scheme = Scheme(Dialect.MXFP4_EXPERTS, MXFP4)
        left = names_chosen(fields.words("modules_to_not_convert") or ())
        words = f"experts run as they are stored: {MXFP4.summary}"
        return Stored(((names_chosen(("experts",)), scheme),), left, words=words)
    names = _EXPERTS_APART.get(family)
    if names is None:
        return NotStored(f"experts of {shown(family)} are decoded while they are loaded")
    reader = _READERS.get(method)
    if reader is None:
        return NotStored(f"Kvant has no products for {shown(method)}")
    found = reader(fields)
    if isinstance(found, NotStored):
        return found
    groups = tuple(
        (chosen, replace(scheme, no_product=scheme.no_product or _refuse_experts(model, scheme)))
        for chosen, scheme in found.groups
    )
    return replace(found, groups=groups, names=names)


def _refuse_experts(model: Fields, scheme: Scheme) -> str:
    """Returns why no product of experts multiplies by weights of a scheme, "" if one does."""
    fmt = scheme.format
    if model.text("hidden_act") not in (None, "silu", "swish"):
        return f"products of experts compute SiLU, not {model.text('hidden_act')}"
    if scheme.reordered:
        return "products of experts take their inputs in order"
    if fmt.global_scale:
        return f"products of experts do not multiply by {fmt.name}"
    width = model.integer("moe_intermediate_size", "intermediate_size")
    if fmt.rows > 1 and (width % fmt.rows or model.integer("hidden_size") % fmt.rows):
        return f"experts of width {width} do not end with blocks of {fmt.rows}"
    return ""


_MIXTRAL = FileNames("w1", "w3", "w2", "block_sparse_moe")
_EXPERTS_APART: Mapping[str, FileNames] = {
    **dict.fromkeys(
        (
            "deepseek_v2",
            "deepseek_v3",
            "dots1",
            "ernie4_5_moe",
            "exaone_moe",
            "flex_olmo",
            "glm4_moe",
            "glm4_moe_lite",
            "hunyuan_v1_moe",
            "mellum",
            "olmoe",
            "qwen2_moe",
            "qwen3_5_moe_text",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_vl_moe_text",
            "solar_open",
        ),
        AS_MODULES,
    ),
    "hy_v3": FileNames(shared="shared_mlp"),
    **dict.fromkeys(("minimax_m2", "mixtral"), _MIXTRAL),
}
"""Families whose checkpoints store each expert by itself, and how."""

_DECODERS: Mapping[str, str] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "model.language_model.layers"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), ""),
}
"""Families of models with several parts whose narrow weights are read, and `FileNames.layers`."""

_ROUNDED = _EXPERTS_APART.keys() - {"qwen3_vl_moe_text"} | {"gpt_oss"}
"""Families whose experts are rounded. Files of Qwen3-VL have them transposed."""


_TRANSPOSED = frozenset({"gpt2", "gpt-sw3"})
"""Families whose matrices are no linear layers: transformers' Conv1D has them transposed."""


def refuse_rounding(config: Mapping[str, Any]) -> str | None:
    """Returns why a model's layers or experts cannot be rounded while they are loaded; None if they can."""
    family = text_section(config).get("model_type")
    if family in _TRANSPOSED:
        return f"the matrices of {shown(family)} are transposed, and are not rounded"
    if not lists_experts(config) or family in _ROUNDED:
        return None
    return f"experts of {shown(family)} are not rounded"


def read_blocks(config: Mapping[str, Any]) -> Stored | None:
    """Returns which matrices of a GGUF import are blocks (`gguf_types` in config.json); None if none are."""
    types = config.get("gguf_types")
    if not isinstance(types, Mapping):
        return None
    names: dict[str, set[str]] = {}
    for name, kind in types.items():
        names.setdefault(str(kind), set()).add(str(name))
    kept = {kind: found for kind, found in names.items() if kind in BLOCK_TYPES}
    groups = tuple(
        (found.__contains__, Scheme(Dialect.GGUF, BLOCK_TYPES[kind].format))
        for kind, found in kept.items()
    )
    counts = ", ".join(f"{kind} ({len(found)})" for kind, found in kept.items())
    wide = [f"{kind} ({len(found)})" for kind, found in names.items() if kind not in kept]
    words = f"matrices that run as they are stored: {counts or 'none'}"
    if wide:
        words += f"; imported as float32: {', '.join(wide)}"
    return Stored(groups, lambda _: False, words=words)


def lists_experts(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json declares layers with experts."""
    sections = config, text_section(config)
    return any(section.get(field) for section in sections for field in EXPERT_FIELDS)


def gate_up_numel(config: Mapping[str, Any]) -> int:
    """Returns the number of elements of a layer's experts' gates and ups; 0 if no prompt decodes them.

    Clamped experts, those of gpt-oss, are decoded in tiles alone.
    """
    text = text_section(config)
    if text.get("model_type") not in _EXPERTS_APART:
        return 0
    sizes = EXPERT_FIELDS, ("moe_intermediate_size", "intermediate_size"), ("hidden_size",)
    count, width, hidden = (next((text[f] for f in one if text.get(f)), 0) for one in sizes)
    return 2 * count * width * hidden


def _fp8(fields: Fields) -> Stored | NotStored:
    """Reads FP8 of DeepSeek, Qwen and AutoFP8: scales by block or matrix; activations by token or layer."""
    block = fields.integers("weight_block_size", least=1)
    said = fields.text("activation_scheme")
    rounding = Activations.FP8 if said == "dynamic" else None
    if block is not None and len(block) != 2:
        raise fields.bad("weight_block_size", "a block has a height and a width")
    if block is None:
        # AutoFP8 names its tensors as compressed-tensors does, and tells itself by this field.
        dialect = Dialect.FLOAT_QUANTIZED if fields.has("ignored_layers") else Dialect.FP8
        scheme = Scheme(dialect, FP8_TENSOR, rounds_inputs=said == "static")
        rounding = Activations.FP8_STATIC if scheme.rounds_inputs else rounding
    elif tuple(block) == (128, 128):
        scheme = Scheme(Dialect.FP8, FP8_BLOCK)
    else:
        return NotStored(f"blocks of {shown(block)} are not 128 x 128", block=tuple(block))
    activations = f"8-bit floats, {said}" if said else ""
    return _whole(scheme, fields, OF_TRANSFORMERS, activations, rounding)


def _awq(fields: Fields) -> Stored | NotStored:
    if (fields.text("version") or "gemm").lower() != "gemm":
        return NotStored(f"AWQ's layout {shown(fields.text('version'))} is not gemm")
    scheme = _integers(fields, Dialect.AWQ, ("bits", "w_bit"), ("group_size", "q_group_size"),
                       zero_points=fields.flag("zero_point", True))  # fmt: skip
    if isinstance(scheme, NotStored):
        return scheme
    return _whole(scheme, fields, ("modules_to_not_convert",))


def _gptq(fields: Fields) -> Stored | NotStored:
    groups: list[tuple[Callable[[str], bool] | None, Scheme]] = []
    for chosen, own in (*exceptions(fields), (None, fields)):
        if own is None:
            continue
        scheme = _gptq_scheme(own)
        if isinstance(scheme, NotStored):
            return scheme
        groups.append((chosen, scheme))
    return Stored(tuple(groups), gptq_left_alone(fields), ignore_field="dynamic")


def _gptq_scheme(fields: Fields) -> Scheme | NotStored:
    reordered = fields.flag("desc_act", False) and not fields.flag("static_groups", False)
    dialect = Dialect.GPTQ
    if (fields.text("checkpoint_format") or "gptq") == "gptq_v2":
        dialect = Dialect.GPTQ_V2
    scheme = _integers(fields, dialect, ("bits",), ("group_size",), zero_points=True)
    return scheme if isinstance(scheme, NotStored) else replace(scheme, reordered=reordered)


def _integers(
    fields: Fields,
    dialect: Dialect,
    bits: Sequence[str],
    group: Sequence[str],
    *,
    zero_points: bool,
) -> Scheme | NotStored:
    width = fields.integer(*bits, most=16)
    if width != 4:
        return NotStored(f"{dialect.value} weights of {width} bits are not 4 bits wide")
    size = fields.optional_integer(*group, least=-1)
    return _int4(dialect, 128 if size is None else size, zero_points=zero_points)


def _int4(dialect: Dialect, size: int | None, *, zero_points: bool) -> Scheme | NotStored:
    """Returns a scheme of groups of `size`."""
    if size is not None and size < 0:
        return NotStored("4-bit weights with a scale per output have no groups")
    return _grouped(dialect, "int4", Code.INT4, size, zero_points)


def _grouped(
    dialect: Dialect, name: str, code: Code, size: int | None, zero_points: bool = False
) -> Scheme | NotStored:
    if size not in (32, 64, 128):
        return NotStored(f"groups of {size} inputs are not 32, 64 or 128")
    return Scheme(dialect, WeightFormat(name, code, 1, size, Scale.FLOAT16, zero_points))


def _modelopt(fields: Fields) -> Stored | NotStored:
    algorithm = fields.text("quant_algo")
    lists = ("ignore", "exclude_modules")
    if algorithm == "FP8":
        scheme = Scheme(Dialect.MODELOPT_FP8, FP8_TENSOR, rounds_inputs=True)
        return _whole(scheme, fields, lists, "8-bit floats, static", Activations.FP8_STATIC)
    if algorithm == "NVFP4":
        scheme = Scheme(Dialect.MODELOPT_NVFP4, NVFP4)
        return _whole(scheme, fields, lists, "4-bit floats, dynamic")
    return NotStored(f"Kvant has no products for ModelOpt's {shown(algorithm)}")


def _compressed_tensors(fields: Fields) -> Stored | NotStored:
    if is_sparse(fields):
        return NotStored("the weights are sparse")
    groups: list[tuple[tuple[str, ...], Scheme]] = []
    declared: list[str] = []
    rounded: set[Activations | None] = set()
    for group, weights, layout in linear_groups(fields):
        if layout in ("", "dense"):
            said = f"the format {shown(layout)}" if layout else "no format"
            return NotStored(
                f"quantization_config has {said}, so files hold numbers", holds_numbers=True
            )
        scheme = _scheme(weights, layout)
        if isinstance(scheme, NotStored):
            return scheme
        if _is_reordered(weights):
            if scheme.dialect is not Dialect.PACK_QUANTIZED or scheme.format.columns == WHOLE:
                raise weights.bad(
                    "actorder", "only packed integers in groups have an order of inputs"
                )
            scheme = replace(scheme, reordered=True)
        inputs = arguments(group, "input_activations")
        rounding = None if inputs is None else _fp8_inputs(inputs, scheme)
        rounded.add(rounding)
        if rounding is Activations.FP8_STATIC:
            scheme = replace(scheme, rounds_inputs=True)
        groups.append((group.words("targets") or (), scheme))
        if inputs is not None:
            kind = "floats" if inputs.text("type") == "float" else "integers"
            # "local" ones are rounded by block, with a static scale of the matrix.
            is_local = inputs.given("dynamic") == "local"
            when = "dynamic" if is_local or inputs.flag("dynamic", False) else "static"
            declared.append(f"{inputs.integer('num_bits', most=16)}-bit {kind}, {when}")
    left = names_chosen(fields.words("ignore") or ())
    rounding = next(iter(rounded)) if len(rounded) == 1 else None
    words = ", ".join(sorted(set(declared)))
    return Stored(by_precedence(groups), left, words, rounding=rounding)


def _fp8_inputs(inputs: Fields, scheme: Scheme) -> Activations | None:
    """Returns the declared rounding of activations if products with this weight can do it, else None."""
    if inputs.text("type") != "float" or inputs.integer("num_bits", most=16) != 8:
        return None
    by_block, strategy = scheme.format == FP8_BLOCK, inputs.text("strategy")
    if not inputs.flag("dynamic", False):
        is_plain = scheme.format in (FP8_TENSOR, FP8_CHANNEL) and inputs.flag("symmetric", True)
        return Activations.FP8_STATIC if is_plain and strategy == "tensor" else None
    size = inputs.optional_integer("group_size", least=-1)
    fits = not by_block or size in (None, FP8_BLOCK.columns)
    return Activations.FP8 if fits and strategy == ("group" if by_block else "token") else None


def _scheme(weights: Fields, layout: str) -> Scheme | NotStored:
    bits, kind, strategy = (
        weights.integer("num_bits", most=16), weights.text("type"), weights.text("strategy"),
    )  # fmt: skip
    group = weights.optional_integer("group_size", least=-1)
    if kind == "float" and bits == 8 and layout in ("float-quantized", "naive-quantized"):
        if strategy == "block":
            block = tuple(weights.integers("block_structure", least=1) or ())
            if block != (128, 128):
                return NotStored(f"blocks of {shown(block)} are not 128 x 128")
            return Scheme(Dialect.FLOAT_QUANTIZED, FP8_BLOCK)
        formats = {"tensor": FP8_TENSOR, "channel": FP8_CHANNEL}
        if strategy in formats:
            return Scheme(Dialect.FLOAT_QUANTIZED, formats[strategy])
    if kind == "float" and bits == 4 and "nvfp4" in layout:
        return Scheme(Dialect.NVFP4_PACK, NVFP4)
    if kind == "float" and bits == 4 and "mxfp4" in layout:
        return Scheme(Dialect.MXFP4_PACK, MXFP4)
    symmetric = weights.flag("symmetric", True)
    if kind == "int" and bits == 8 and symmetric and strategy == "channel":
        if layout == "int-quantized":
            return Scheme(Dialect.INT_QUANTIZED, INT8_CHANNEL)
        if layout == "pack-quantized":
            return Scheme(Dialect.PACK_QUANTIZED, INT8_CHANNEL)
    found: Scheme | NotStored = NotStored(
        f"Kvant has no products for {bits}-bit {kind} weights by {strategy} in {shown(layout)}"
    )
    is_packed = layout == "pack-quantized"
    if kind != "int" or not 2 <= bits <= 8 or not (is_packed or layout in _IN_BYTES):
        return found
    if is_packed and strategy == "group" and bits == 4:
        found = _int4(Dialect.PACK_QUANTIZED, group, zero_points=not symmetric)
    elif is_packed and strategy == "group" and bits == 8 and symmetric:
        found = _grouped(Dialect.PACK_QUANTIZED, "int8", Code.INT8, group)
    blocks = {"channel": (1, WHOLE), "group": (1, group)}
    if not is_packed:
        blocks["tensor"] = WHOLE, WHOLE
    rows, columns = blocks.get(strategy or "", (1, None))
    if isinstance(found, Scheme) or columns is None or columns < 0:
        return found
    # Integers that no product takes are decoded as codes of 8 bits.
    fmt = WeightFormat(f"int{bits}", Code.INT8, rows, columns, Scale.FLOAT16, not symmetric)
    dialect, packed = (Dialect.PACK_QUANTIZED, bits) if is_packed else (Dialect.INT_QUANTIZED, 0)
    return Scheme(dialect, fmt, packed_bits=packed, no_product=found.reason)


def _whole(
    scheme: Scheme,
    fields: Fields,
    lists: Sequence[str],
    said: str = "",
    rounding: Activations | None = None,
) -> Stored:
    """Reads which layers have no narrow weights: the head, and those in the fields of `lists`."""
    name = next((one for one in lists if fields.has(one)), lists[0])
    left = names_left_alone(fields, lists)
    return Stored(((None, scheme),), left, said, rounding=rounding, ignore_field=name)


_READERS: Mapping[str, Callable[[Fields], Stored | NotStored]] = {
    "fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    **dict.fromkeys(COMPRESSED_TENSORS, _compressed_tensors),
}
"""Readers of a quantization_config, by `quant_method`."""
