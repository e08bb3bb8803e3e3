"""The weight audit: for every stored tensor its format, what it is for, and whether it is used. No torch.

It reads names, dtypes and shapes from the headers of the files. Values are checked while they are loaded.

    state     meaning
    used      products use it; or it is decoded, or rounded, while it is loaded
    unused    present, and nothing reads it; the reason says why
    missing   a format needs it, and no file has it: an engine refuses the checkpoint
    wrong     its dtype or shape is not that of its format: an engine refuses the checkpoint
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.json_file import COMPARE_CONFIG, COPY_AGAIN
from kvant.kv.checkpoint.scales import read_scale_name
from kvant.kv.spec import KVPlan, ScaleState
from kvant.models.geometry.parameters import Weight, WeightKind
from kvant.models.quantization import Activations, Quantization, rounds
from kvant.models.stored import NotStored, Stored
from kvant.weights.format import Dialect, Scheme, block_type
from kvant.weights.parts import Part, Role, check_part, expert_parts, parts_of

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""safetensors' dtype and shape of each tensor, by its name."""


class TensorState(Enum):
    USED = "used"
    UNUSED = "unused"
    MISSING = "missing"
    WRONG = "wrong"


NUMBERS, OF_KV = "numbers", "scales of the KV cache"
"""What a tensor is for, beside `Role`: numbers that need no scale, or a scale that the KV plan explains."""


@dataclass(frozen=True, slots=True)
class TensorUse:
    """One tensor. layer: its module's path. format: of the layer's weight, or the tensor's dtype.

    dtype, shape: as in the file's header; None if it is missing. fault: the error of a missing or wrong one.
    """

    name: str
    layer: str
    format: str
    role: str
    state: TensorState
    because: str
    dtype: str | None
    shape: tuple[int, ...] | None
    fault: BadCheckpoint | None = None


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors with the same format, state and reason. roles: how many of each. first: one of their names."""

    format: str
    roles: Mapping[str, int]
    state: TensorState
    because: str
    first: str

    @property
    def text(self) -> str:
        """The group in words."""
        counted = ", ".join(f"{count} {role}" for role, count in self.roles.items())
        return f"{self.format}: {counted}, {self.state.value}: {self.because}"


@dataclass(frozen=True, slots=True)
class WeightAudit:
    """Every stored tensor of a model, in the order of names."""

    tensors: tuple[TensorUse, ...]

    @property
    def groups(self) -> tuple[TensorGroup, ...]:
        """The tensors by format, state and reason, narrow ones first."""
        found: dict[tuple[str, TensorState, str], list[TensorUse]] = {}
        for one in self.tensors:
            found.setdefault((one.format, one.state, one.because), []).append(one)
        made = []
        for (fmt, state, because), members in found.items():
            roles: dict[str, int] = {}
            for one in members:
                roles[one.role] = roles.get(one.role, 0) + 1
            made.append(TensorGroup(fmt, roles, state, because, members[0].name))
        return tuple(sorted(made, key=lambda group: (NUMBERS in group.roles, group.format)))

    @property
    def unused(self) -> tuple[str, ...]:
        """One line for every reason why tensors are not used."""
        return self._lines((TensorState.UNUSED,))

    @property
    def faults(self) -> tuple[str, ...]:
        """One line for every kind of tensor that makes an engine refuse the checkpoint."""
        return self._lines((TensorState.MISSING, TensorState.WRONG))

    @property
    def refusal(self) -> BadCheckpoint | None:
        """The error of the first such tensor."""
        return next((one.fault for one in self.tensors if one.fault is not None), None)

    def check(self) -> None:
        """Raises BadCheckpoint for the first tensor that is missing or wrong."""
        if self.refusal is not None:
            raise self.refusal

    def _lines(self, states: tuple[TensorState, ...]) -> tuple[str, ...]:
        found: dict[tuple[TensorState, str, str], list[str]] = {}
        for one in self.tensors:
            known = one.state is TensorState.UNUSED and one.role in (Role.SHAPES.value, OF_KV)
            if one.state in states and not known:
                found.setdefault((one.state, one.role, one.because), []).append(one.name)
        return tuple(
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} ({role}) "
            f"{'are' if len(names) > 1 else 'is'} {state.value}: {because}"
            for (state, role, because), names in found.items()
        )


@dataclass(frozen=True, slots=True)
class Use:
    """What a plan does with the weights of a checkpoint.

    declared: their formats, on any device. stored: formats that run undecoded, None if none do.
    decoded: says that they are decoded, and why. rounded: how 16-bit matrices are rounded. activations: how
    products round theirs. weights: all of the model, None if Kvant cannot list them. kv: the KV plan.
    rounds_head: the head is rounded too, to int8. layers: path of the layers that are rounded. parameters:
    names and shapes of a probed model's weights.
    """

    declared: Stored | NotStored | None
    stored: Stored | None
    decoded: str
    rounded: Quantization | None
    activations: Activations | None
    weights: tuple[Weight, ...] | None
    kv: KVPlan
    rounds_head: bool = True
    layers: str = ""
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))


def audit_weights(tensors: Tensors, use: Use) -> WeightAudit:
    """Returns what every tensor is for, and whether the plan uses it. Pure."""
    listed = None if use.weights is None else {weight.name: weight for weight in use.weights}
    places = {place for name in listed or () if (place := _place_of(name)) is not None}
    modules: dict[str, list[str]] = {}
    for name in tensors:
        modules.setdefault(_layer_of(name), []).append(name)
    found: list[TensorUse] = []
    for layer, names in modules.items():
        weight = None if listed is None else listed.get(_first_expert(layer))
        place = _place_of(layer)
        is_known = place is not None and any(one[0] == place[0] for one in places)
        if _PREDICTS.search(f"{layer}.") or (is_known and place not in places):
            found += [_beyond(name, layer, *tensors[name]) for name in names]
            continue
        found += _layer(layer, names, weight, tensors, use, listed)
    found += _lacking(tensors, modules, use)
    return WeightAudit(tuple(sorted(found, key=lambda one: one.name)))


_JOINED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)_(blocks|scales)$")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_JOINED_EXPERTS = re.compile(r"\.experts\.[a-z]")
"""Matrices of all experts in one tensor, which some files have transposed."""

_INDEX = re.compile(r"\.\d+(?=\.)")
_PREDICTS = re.compile(r"(?:^|\.)mtp[._]")
"""Modules that predict further tokens, which no class of transformers loads."""

_CODES = ("F8_", "U8", "I8", "I32", "U32", "F4")
"""Dtypes that begin like this hold codes."""

_WIDE = ("F64", "F32", "F16", "BF16")
"""Dtypes of numbers that need no scale."""

_ROLES = {
    "weight_scale": Role.SCALES, "weight_scale_inv": Role.SCALES, "scales": Role.SCALES, "scale": Role.SCALES,
    "weight_scale_2": Role.FACTORS, "weight_global_scale": Role.FACTORS,
    "weight_zero_point": Role.ZERO_POINTS, "qzeros": Role.ZERO_POINTS,
    "input_scale": Role.INPUT_SCALES, "activation_scale": Role.INPUT_SCALES,
    "input_global_scale": Role.INPUT_SCALES, "input_zero_point": Role.INPUT_SCALES,
    "g_idx": Role.ORDER, "weight_g_idx": Role.ORDER, "weight_shape": Role.SHAPES,
    "weight_packed": Role.CODES, "qweight": Role.CODES,
}  # fmt: skip
"""What tensors with these names are for, in any dialect."""

_MULTIPLIERS = ("pre_quant_scale",)
"""Tensors without which a layer's numbers would be others."""


_NUMBERED = re.compile(r"(.*?\blayers)\.(\d+)\.")


def _place_of(name: str) -> tuple[str, str] | None:
    """Returns the list of layers that a module belongs to, and the layer's number."""
    found = _NUMBERED.match(f"{name}.")
    return None if found is None else (found[1], found[2])


def _beyond(name: str, layer: str, dtype: str, shape: tuple[int, ...]) -> TensorUse:
    role = _ROLES.get(name.rpartition(".")[2])
    because = "the model does not run this layer"
    shown = NUMBERS if role is None else role.value
    return TensorUse(name, layer, dtype, shown, TensorState.UNUSED, because, dtype, shape)


def _layer_of(name: str) -> str:
    joined = _JOINED.match(name)
    return joined[1] if joined else name.rpartition(".")[0]


def _first_expert(layer: str) -> str:
    return _EXPERT.sub(".experts.0.", layer)


def _layer(
    layer: str,
    names: list[str],
    weight: Weight | None,
    tensors: Tensors,
    use: Use,
    listed: Mapping[str, Weight] | None,
) -> Iterator[TensorUse]:
    """Yields the tensors of one module, missing ones included."""
    declared = use.declared if isinstance(use.declared, Stored) else None
    read = use.stored or declared
    scheme = None if read is None else read.scheme(layer)
    wanted: dict[str, Part] = {}
    if scheme is not None and scheme.dialect is Dialect.MXFP4_EXPERTS:
        wanted = _of_experts(layer, scheme, listed)
    elif scheme is not None and _is_narrow(layer, names, weight, scheme, tensors):
        shape = _shape(layer, weight, scheme, tensors)
        if shape is not None:
            parts = parts_of(scheme, *shape)
            wanted = {f"{layer}.{short}": part for short, part in parts.items()}
    if scheme is not None and wanted:
        yield from _wanted(layer, scheme, wanted, tensors, use)
    for name in names:
        if name not in wanted:
            own = (listed or {}).get(name, weight)  # biases are listed apart
            yield _other(name, layer, scheme if wanted else None, own, tensors, use)


def _lacking(tensors: Tensors, modules: Mapping[str, list[str]], use: Use) -> Iterator[TensorUse]:
    """Yields weights that no file has, though the files name the model's weights as Kvant does.

    Files may join weights or name them in another way. So a weight is reported if only some layers lack it,
    and not if all layers do. `kvant.models.geometry.mixtures` refuses missing experts.
    """
    alike: dict[str, list[str]] = {}
    for weight in use.weights or ():
        if _is_of_decoder(weight.name, use) and weight.kind is not WeightKind.EXPERT:
            alike.setdefault(_INDEX.sub(".N", weight.name), []).append(weight.name)
    for name in use.parameters:
        if not _JOINED_EXPERTS.search(name):
            path = name.removesuffix(".weight")
            alike.setdefault(_INDEX.sub(".N", path), []).append(path)

    def is_there(name: str) -> bool:
        # A narrow weight's own format says which of its tensors are missing.
        shorts = {one.rpartition(".")[2] for one in modules.get(name, ())}
        return name in tensors or "weight" in shorts or not shorts.isdisjoint(_ROLES)

    absent: list[str] = []
    above = use.layers.removesuffix(".layers")
    alone = {f"{above}.embed_tokens", f"{above}.norm", "lm_head"} & alike.keys()
    for names in alike.values():
        lacking = [name for name in names if not is_there(name)]
        if len(lacking) < len(names):
            absent += lacking
    if use.layers and any(name.startswith(f"{use.layers}.") for name in modules):
        absent += [name for name in alone if not is_there(name)]
    because = "the files are incomplete or of another model"
    for layer in absent:
        is_whole = layer.endswith((".bias", ".sinks")) or layer in use.parameters
        name = layer if is_whole else f"{layer}.weight"
        fault = BadCheckpoint(f"{name} is missing", why=because, ways_out=(COPY_AGAIN,))
        yield TensorUse(
            name, layer, "absent", NUMBERS, TensorState.MISSING, because, None, None, fault
        )


def _is_of_decoder(name: str, use: Use) -> bool:
    """Whether Kvant lists a weight with the name and the shape that files have; of towers it lists sums."""
    return name == "lm_head" or name.startswith(f"{use.layers.removesuffix('.layers')}.")


def _is_narrow(
    layer: str, names: list[str], weight: Weight | None, scheme: Scheme, tensors: Tensors
) -> bool:
    """Whether a scheme, which may be declared for all modules, is that of this module."""
    if scheme.dialect is Dialect.GGUF:
        return any(tensors[name][0] == "U8" for name in names)
    if weight is not None and weight.is_product:
        return True
    shorts = {name.rpartition(".")[2] for name in names}
    if shorts & {"weight_packed", "qweight"}:
        return True
    return "weight" in shorts and tensors[f"{layer}.weight"][0].startswith(_CODES)


def _shape(
    layer: str, weight: Weight | None, scheme: Scheme, tensors: Tensors
) -> tuple[int, int] | None:
    """Returns rows and columns of the layer's weight: of the model, else as its codes have them."""
    if weight is not None:
        return weight.rows, weight.columns
    shapes = {
        short: tensors[f"{layer}.{short}"][1]
        for short in ("weight", "weight_packed", "qweight")
        if f"{layer}.{short}" in tensors
    }
    shape = next(iter(shapes.values()), ())
    if len(shape) != 2:
        return None
    down, along = shape
    if scheme.dialect is Dialect.GGUF:
        kind = block_type(scheme.format)
        return down, along // kind.num_bytes * kind.inputs
    if scheme.dialect is Dialect.AWQ:
        return along * 8, down
    if scheme.dialect in (Dialect.GPTQ, Dialect.GPTQ_V2):
        return along, down * 8
    if scheme.dialect is Dialect.PACK_QUANTIZED:
        return down, along * 32 // scheme.format.code.bits
    return down, along * (2 if scheme.format.code.bits == 4 else 1)


def _of_experts(layer: str, scheme: Scheme, listed: Mapping[str, Weight] | None) -> dict[str, Part]:
    """Returns the tensors of experts that are stored together, if Kvant knows the model's weights."""
    of = {
        part: weight
        for part in ("gate_proj", "up_proj", "down_proj")
        if (weight := (listed or {}).get(f"{layer}.0.{part}")) is not None
    }
    if len(of) != 3:
        return {}
    count, down = of["down_proj"].copies, of["down_proj"]
    rows = of["gate_proj"].rows + of["up_proj"].rows
    shapes = {
        "gate_up_proj": (rows, of["gate_proj"].columns),
        "down_proj": (down.rows, down.columns),
    }
    return {
        f"{layer}.{product}_{short}": part
        for product, shape in shapes.items()
        for short, part in expert_parts(scheme, count, *shape).items()
    }


def _wanted(
    layer: str, scheme: Scheme, wanted: Mapping[str, Part], tensors: Tensors, use: Use
) -> Iterator[TensorUse]:
    """Yields the tensors that a layer's format needs."""
    fmt = f"{scheme.format.summary} ({scheme.dialect.value})"
    done = "runs as it is stored" if use.stored is not None else use.decoded
    for name, part in wanted.items():
        dtype, shape = tensors.get(name, (None, None))
        state, because, found = TensorState.USED, done, None
        if part.role is Role.INPUT_SCALES and use.activations is not Activations.FP8_STATIC:
            state, because = TensorState.UNUSED, _unrounded(use)
        elif part.role is Role.SHAPES:
            state, because = TensorState.UNUSED, "the model's shape is known"
        elif part.role is Role.ZERO_POINTS and part.optional:
            state, because = TensorState.UNUSED, "the checkpoint declares none"
        elif part.role is Role.ORDER:
            because = "checked while it is loaded"
        try:
            check_part(name, part, dtype, shape)
        except BadCheckpoint as fault:
            found = fault
            state = TensorState.MISSING if dtype is None else TensorState.WRONG
            because = fault.why or fault.what
        if dtype is not None or found is not None:
            yield TensorUse(name, layer, fmt, part.role.value, state, because, dtype, shape, found)


def _other(
    name: str,
    layer: str,
    scheme: Scheme | None,
    weight: Weight | None,
    tensors: Tensors,
    use: Use,
) -> TensorUse:
    """Returns a tensor that the layer's format does not need. scheme: of its layer, None for a wide one."""
    dtype, shape = tensors[name]
    short = name.rpartition(".")[2]
    role = _ROLES.get(short)
    if short in _MULTIPLIERS and not isinstance(use.declared, NotStored):
        because = "inputs of its layer are multiplied by it, and Kvant's products do not do that"
        fault = BadCheckpoint(f"{name} is not supported", why=because)
        shown = Role.INPUT_SCALES.value
        return TensorUse(name, layer, dtype, shown, TensorState.WRONG, because, dtype, shape, fault)
    if read_scale_name(name) is not None:
        state, because = _of_kv(name, use.kv)
        return TensorUse(name, layer, dtype, OF_KV, state, because, dtype, shape)
    if role is None or (role is not Role.CODES and _has_no_weight(layer, tensors)):
        return _numbers(name, layer, weight, dtype, shape, use)
    state, because = (
        TensorState.UNUSED,
        f"{scheme.dialect.value} has no such tensor" if scheme else "",
    )
    if isinstance(use.declared, NotStored):
        state, because = TensorState.USED, f"left to transformers: {use.declared.reason}"
    elif role is Role.INPUT_SCALES:
        because = _unrounded(use)
    elif scheme is None:
        because = _no_format(use)
    fmt = dtype if scheme is None else f"{scheme.format.summary} ({scheme.dialect.value})"
    return TensorUse(name, layer, fmt, role.value, state, because, dtype, shape)


def _numbers(
    name: str, layer: str, weight: Weight | None, dtype: str, shape: tuple[int, ...], use: Use
) -> TensorUse:
    """Returns a tensor of numbers that need no scale."""
    because, state, fault = "loaded as the compute dtype", TensorState.USED, None
    if isinstance(use.declared, NotStored) and dtype not in _WIDE:
        because = f"left to transformers: {use.declared.reason}"
    elif name.endswith(".weight") and dtype not in _WIDE:
        because, state = (
            f"{_no_format(use)}, so its codes would be taken for numbers",
            TensorState.WRONG,
        )
        fault = BadCheckpoint(f"{name} has the dtype {dtype}", why=because)
    elif (wanted := _other_shape(name, weight, shape, use)) is not None:
        because, state = f"config.json makes it {_shown(wanted)}", TensorState.WRONG
        fault = BadCheckpoint(
            f"{name} has the shape {_shown(shape)}",
            why=because,
            ways_out=(COMPARE_CONFIG,),
        )
    elif use.rounded is not None:
        because = _rounded(layer, weight, shape, use, use.rounded)
    return TensorUse(name, layer, dtype, NUMBERS, state, because, dtype, shape, fault)


def _other_shape(
    name: str, weight: Weight | None, shape: tuple[int, ...], use: Use
) -> tuple[int, ...] | None:
    """Returns the shape that a tensor should have, if it has another one."""
    if name in use.parameters and not _JOINED_EXPERTS.search(name):
        own = use.parameters[name]
        return None if shape == own else own
    if weight is None or not (name == weight.name or name.endswith(".weight")):
        return None
    wanted: tuple[int, ...] = (weight.rows, weight.columns)
    if weight.kind is WeightKind.OTHER:
        if weight.rows > 1 or not _is_of_decoder(name, use):
            return None  # of convolutions, files have more dimensions
        wanted = (weight.columns,)
    return None if shape == wanted else wanted


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "()"


def _rounded(
    layer: str, weight: Weight | None, shape: tuple[int, ...], use: Use, asked: Quantization
) -> str:
    """Returns what happens to a tensor of numbers while a model is loaded that is rounded."""
    if len(shape) > 1 and layer == "lm_head":
        done = Quantization.INT8 if use.rounds_head else None
    elif len(shape) > 1 and weight is None:
        # Kvant does not know the model's names, or the file has matrices that Kvant lists apart.
        return f"rounded to {asked.value} if it belongs to a linear layer or experts of the decoder"
    elif len(shape) > 1 and weight is not None and rounds(weight, use.layers):
        done = asked
    else:
        done = None
    if done is None:
        return "loaded as the compute dtype"
    return f"rounded to {done.value} while it is loaded"


def _no_format(use: Use) -> str:
    if use.declared is None:
        return "no quantization_config declares narrow weights"
    return "the quantization_config leaves this layer alone"


def _has_no_weight(layer: str, tensors: Tensors) -> bool:
    """Whether nothing in this module can be scaled: `scale` is then a number of the model."""
    names = ("weight", "weight_packed", "qweight")
    return not any(f"{layer}.{short}" in tensors for short in names)


def _unrounded(use: Use) -> str:
    if use.activations is None:
        return "products take 16-bit activations"
    return f"activations are rounded as {use.activations.value}, which computes scales"


def _of_kv(name: str, kv: KVPlan) -> tuple[TensorState, str]:
    """Whether the KV plan uses a scale, and its reason."""
    for layer in kv.layers:
        for choice in (layer.k, layer.v):
            tensor = None if choice is None else choice.scale.tensor
            if choice is not None and tensor is not None and tensor.name == name:
                used = choice.scale.state is ScaleState.FOUND
                return TensorState.USED if used else TensorState.UNUSED, choice.scale.because
    return TensorState.UNUSED, "the KV plan does not need it"
