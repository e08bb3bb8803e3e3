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
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from kvant.errors import BadCheckpoint, WayOut
from kvant.kv.checkpoint.json_file import COMPARE_CONFIG, COPY_AGAIN, INCOMPLETE
from kvant.kv.checkpoint.scales import read_scale_name
from kvant.kv.spec import KVPlan, ScaleState
from kvant.look import counted
from kvant.models.geometry.parameters import Weight, WeightKind
from kvant.models.geometry.renaming import NameRules
from kvant.models.quantization import Activations, Quantization, rounds
from kvant.models.stored import ONE_FORMAT, NotStored, Stored
from kvant.models.weights import WIDE_BYTES
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
        first, *others = self.roles.items()
        parts = [f"{counted(first[1], 'tensor')} of {first[0]}"]
        parts += [f"{count:,} of {role}" for role, count in others]
        return f"{self.format}: {', '.join(parts)}, {self.state.value}: {self.because}"


@dataclass(frozen=True, slots=True)
class ScalesRead:
    """How many tensors of scales a plan read, and how many larger ones it left to the start."""

    num_read: int
    num_left: int

    @property
    def text(self) -> str:
        left = f"; left to the start: {self.num_left:,} larger" if self.num_left else ""
        return f"scales: the values of {counted(self.num_read, 'tensor')} were read{left}"


@dataclass(frozen=True, slots=True)
class WeightAudit:
    """Every stored tensor of a model, in the order of names. scales: None if no values were read."""

    tensors: tuple[TensorUse, ...]
    scales: ScalesRead | None = None

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
                because = one.because + ("" if one.fault is None else one.fault.ways)
                found.setdefault((one.state, one.role, because), []).append(one.name)
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
    names and shapes of a probed model's weights. in_files: the same as transformers writes them to files, if
    it converts them while it loads them. linear, embeddings: paths of its modules of torch's classes. names:
    its class's rules for names in files, None if they are unknown.
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
    in_files: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    linear: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    names: NameRules | None = None


def audit_weights(tensors: Tensors, use: Use) -> WeightAudit:
    """Returns what every tensor is for, and whether the plan uses it. Pure.

    tensors: of all files. It does not raise for a bad checkpoint: the result's `refusal` is the error.
    """
    converted = use.in_files.keys() - use.parameters.keys()
    turns = any(use.parameters.get(name, shape) != shape for name, shape in use.in_files.items())
    loaded = _Loaded.of(tensors, use)
    use = _as_in_files(tensors, use, loaded)
    use = replace(use, parameters=_as_divided(tensors, use.parameters, converted))
    model = _Model.of(use, turns=turns)
    modules, found = _by_module(tensors, model)
    missing, is_whole = _find_missing(tensors, modules, use, model, loaded)
    found += [_missing(path, modules, use, model) for path in missing]
    model = replace(model, is_whole=is_whole)
    for layer, names in modules.items():
        found += _audit_module(layer, names, tensors, use, model)
    return WeightAudit(tuple(sorted(found, key=lambda one: one.name)))


def _by_module(tensors: Tensors, model: _Model) -> tuple[dict[str, list[str]], list[TensorUse]]:
    """Returns names by their module's path, and apart the tensors of layers that the model does not run."""
    places = {place for name in model.listed or () if (place := _place_of(name)) is not None}
    modules: dict[str, list[str]] = {}
    beyond: list[TensorUse] = []
    for name, (dtype, shape) in tensors.items():
        layer = _layer_of(name)
        place = _place_of(layer)
        is_known = place is not None and any(one[0] == place[0] for one in places)
        if _PREDICTS.search(f"{layer}.") or (is_known and place not in places):
            beyond.append(_beyond(name, layer, dtype, shape))
        else:
            modules.setdefault(layer, []).append(name)
    return modules, beyond


@dataclass(frozen=True, slots=True)
class _Model:
    """What files hold of a model, under their names. listed: its weights by path; None if Kvant lists none.

    dims: shapes by path without ".weight", of expert 0 for all experts. joined: shapes of experts that are
    stored together. turns: transformers reads them transposed too. probed: weights of a probed model's linear
    layers, embeddings and experts 0, by path. is_whole: the files have all weights, so nothing reads their
    other tensors.
    """

    listed: Mapping[str, Weight] | None
    dims: Mapping[str, tuple[int, ...]]
    joined: Mapping[str, tuple[int, ...]]
    probed: Mapping[str, Weight]
    turns: bool
    is_whole: bool = False

    @classmethod
    def of(cls, use: Use, *, turns: bool) -> _Model:
        dims = {weight.name: weight.dims for weight in use.weights or ()}
        joined: dict[str, tuple[int, ...]] = {}
        for weight in use.weights or ():
            if weight.kind is WeightKind.EXPERT:
                experts, _, product = weight.name.rpartition(".0.")
                path = f"{experts}.{_JOINED_AS.get(product, product)}"
                before = joined.get(path, (0, 0, 0))
                rows, columns = weight.rows, weight.columns
                joined[path] = (
                    (weight.copies, columns, before[2] + rows)
                    if weight.columns_first
                    else (weight.copies, before[1] + rows, columns)
                )
        for name, shape in use.parameters.items():
            if _JOINED_EXPERTS.search(name) is None:
                dims[name.removesuffix(".weight")] = shape
            else:
                joined[name] = shape
        listed = None if use.weights is None else {weight.name: weight for weight in use.weights}
        return cls(listed, dims, joined, _probed(use, joined), turns)

    def weight(self, path: str) -> Weight | None:
        """Returns the weight that Kvant lists for a module."""
        return None if self.listed is None else self.listed.get(_first_expert(path))

    def module(self, path: str) -> Weight | None:
        """Returns the weight of a module, if Kvant lists or has probed it."""
        return self.weight(path) or self.probed.get(_first_expert(path))

    def has(self, name: str) -> bool:
        """Returns whether a tensor belongs to a module of the model that has a weight."""
        path, layer = name.removesuffix(".weight"), _first_expert(_layer_of(name))
        joined = _JOINED.match(name)
        path = path if joined is None else f"{joined[1]}.{joined[2]}"
        return path in self.dims or layer in self.dims or path in self.joined

    def other_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns the shape that a tensor of numbers should have, if it has another one."""
        path = name.removesuffix(".weight")
        if path in self.joined:
            first, *others = wanted = self.joined[path]
            turned = (first, *reversed(others)) if self.turns else wanted
            return None if shape in (wanted, turned) else wanted
        wanted_here = self.dims.get(_first_expert(path))
        return None if shape == wanted_here else wanted_here


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What transformers loads from files. weights: all of the model, by path. read: the ones that files have.

    rules: for names; None if they are unknown. declared: formats of narrow weights; experts have tensors of
    their own then, and the format says which.
    """

    rules: NameRules | None
    weights: frozenset[str]
    read: frozenset[str]
    declared: Stored | NotStored | None

    @classmethod
    def of(cls, tensors: Tensors, use: Use) -> _Loaded:
        rules = use.names
        if rules is None:
            return cls(None, frozenset(), frozenset(), None)
        weights = set(use.parameters)
        for name in {_first_expert(name) for name in use.in_files}:  # buffers are in files too
            weights.update(rules.weights_of(name, use.parameters))
        for weight in use.weights or ():
            (path,) = {_joined_expert(one) for one in rules.weights_of(f"{weight.name}.weight", ())}
            weights |= {path, path.removesuffix(".weight")}
        names = {_first_expert(name) for name in tensors}
        names = {alias for name in names for alias in _aliases(name, use.declared)}
        found = frozenset(weights)
        return cls(rules, found, rules.read(names, found), use.declared)

    def has(self, name: str) -> bool:
        """Returns whether transformers reads a tensor as a weight of the model; True if that is unknown."""
        if self.rules is None or (self.declared is not None and ".experts." in name):
            return True
        aliases = _aliases(name, self.declared)
        return any(self.weights.intersection(self._weights_of(one)) for one in aliases)

    def lacks(self, path: str) -> bool:
        """Returns whether no tensor is read as the weight with this path in files."""
        if self.rules is None or (self.declared is not None and ".experts." in path):
            return False
        if path != _first_expert(path):  # read as the same weight as that of expert 0
            return False
        wanted = {one for name in (path, f"{path}.weight") for one in self._weights_of(name)}
        known = wanted & self.weights
        return bool(known) and not known & self.read

    def _weights_of(self, name: str) -> list[str]:
        assert self.rules is not None
        return [_joined_expert(one) for one in self.rules.weights_of(name, self.weights)]


def _aliases(name: str, declared: Stored | NotStored | None) -> Iterator[str]:
    """Yields a tensor's name, and that of the weight that it is a part of if it is narrow.

    A format that is left to transformers may have any names for parts.
    """
    yield name
    layer, _, short = name.rpartition(".")
    if (joined := _JOINED.match(name)) is not None:
        yield f"{joined[1]}.{joined[2]}"
    elif short in _ROLES or isinstance(declared, NotStored):
        yield f"{layer}.weight"


def _joined_expert(path: str) -> str:
    """Returns the path of all experts' matrix for that of expert 0; another path as it is."""
    found = _EXPERT_0.match(path.removesuffix(".weight"))
    return path if found is None else f"{found[1]}.{_JOINED_AS.get(found[2], found[2])}"


def _probed(use: Use, joined: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
    """Returns the weights of a probed model that a format may make narrow, by path."""
    found: dict[str, Weight] = {}
    if use.weights is not None:
        return found
    for kind, paths in ((WeightKind.LINEAR, use.linear), (WeightKind.EMBEDDING, use.embeddings)):
        for path in paths:
            shape = use.parameters.get(f"{path}.weight")
            if shape is not None:
                rows, columns = shape
                found[path] = Weight(path, kind, rows, columns)
    for name, shape in use.parameters.items():
        if _EXPERT_0.match(path := name.removesuffix(".weight")) and len(shape) == 2:
            rows, columns = shape
            found[path] = Weight(path, WeightKind.EXPERT, rows, columns)
    for name, (count, down, along) in joined.items():
        experts, _, product = name.rpartition(".")
        apart = [one for one, stack in _JOINED_AS.items() if stack == product] or [product]
        for one in apart:
            path = f"{experts}.0.{one}"
            found[path] = Weight(path, WeightKind.EXPERT, down // len(apart), along, count)
    return found


def _as_divided(
    tensors: Tensors, parameters: Mapping[str, tuple[int, ...]], converted: Set[str]
) -> dict[str, tuple[int, ...]]:
    """Returns the parameters with the shapes of a recurrence's filters in files.

    converted: names in files of tensors that transformers converts. It joins filters of queries, keys and
    values of any sizes, and writes equal parts. So only their sizes together say whether the files fit.
    """
    layers: dict[str, list[str]] = {}
    for name in converted & parameters.keys() & tensors.keys():
        if (found := _FILTER.match(name)) is not None:
            layers.setdefault(found[1], []).append(name)
    stored = dict(parameters)
    for names in layers.values():
        shapes = {name: tensors[name][1] for name in names}
        widths = {shape[1:] for shape in (*shapes.values(), *(stored[name] for name in names))}
        sums = {sum(form[name][0] for name in names) for form in (shapes, stored)}
        if len(widths) == len(sums) == 1:
            stored |= shapes
    return stored


def _as_in_files(tensors: Tensors, use: Use, loaded: _Loaded) -> Use:
    """Returns the use with weights under the names that the files have for them."""
    forms = (use.in_files or use.parameters, use.parameters)
    parameters = max(forms, key=lambda form: len(form.keys() & tensors.keys()))
    use = replace(use, parameters=parameters)
    layers = None if _are_names(parameters, tensors) else _find_layers(tensors, use, loaded)
    return use if layers is None else _moved(tensors, use, layers)


def _find_layers(tensors: Tensors, use: Use, loaded: _Loaded) -> str | None:
    """Returns the path of the decoder's layers in the files; None if none has most of their weights' names.

    Files of multimodal models have the decoder and the towers at other places than the class that loads them.
    A place that transformers does not read is none.
    """

    def suffix(name: str, place: str) -> str:
        return _kind(name.removeprefix(place).removesuffix(".weight"))

    names = [*(one.name for one in use.weights or ()), *use.parameters]
    own = {suffix(name, use.layers) for name in names if name.startswith(f"{use.layers}.")}
    suffixes: dict[str, set[str]] = {}
    for name in dict.fromkeys(map(_first_expert, tensors)):
        if (found := _NUMBERED.match(name)) is not None and loaded.has(name):
            suffixes.setdefault(found[1], set()).add(suffix(name, found[1]))
    shares = {place: len(names & own) for place, names in suffixes.items()}
    best = max(shares, key=lambda place: (shares[place], place == use.layers), default=use.layers)
    return best if 2 * shares.get(best, 0) > len(own) else None


def _moved(tensors: Tensors, use: Use, layers: str) -> Use:
    """Returns the use with the names of files that have the decoder's layers at the path `layers`."""
    before, after = use.layers.removesuffix("layers"), layers.removesuffix("layers")
    heads = (name.removesuffix(".weight") for name in tensors if name.endswith("lm_head.weight"))
    head = next(heads, "lm_head")
    roots = {".".join(name.split(".")[:2]) for name in tensors} | {
        name.partition(".")[0] for name in tensors
    }

    def renamed(name: str) -> str:
        if name.removesuffix(".weight") == "lm_head":
            return name.replace("lm_head", head)
        if name.startswith(before):
            return after + name.removeprefix(before)
        root, short = ".".join(name.split(".")[:2]), name.removeprefix("model.")
        return short if root not in roots and short.partition(".")[0] in roots else name

    weights = use.weights
    if weights is not None:
        weights = tuple(replace(weight, name=renamed(weight.name)) for weight in weights)
    parameters = {renamed(name): shape for name, shape in use.parameters.items()}
    return replace(use, weights=weights, parameters=parameters, layers=layers)


def _are_names(parameters: Collection[str], tensors: Tensors) -> bool:
    """Returns whether files name most of these parameters so."""
    return 2 * sum(name in tensors for name in parameters) > len(parameters)


_EMBEDDING = "embeddings with narrow weights are read from GGUF files alone"
_WIDE_EMBEDDING = WayOut("take a checkpoint whose embedding has 16 bits")
_APART = WayOut("take a checkpoint that stores each expert by itself")
_ONE_BY_ONE = (
    "the files store each expert by itself, and transformers reads this model's experts joined"
)
_JOINED_FILES = WayOut("take a checkpoint that stores the experts of a layer in one tensor")
_TIED = "config.json ties the head to the embedding, and the head's codes would not be used"
_EVEN = WayOut("take a checkpoint with blocks of 128 x 128, which Kvant decodes itself")
_UNTIE = WayOut('if the head has its own weight, set "tie_word_embeddings" to false in config.json')

_JOINED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)_(blocks|scales)$")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_JOINED_EXPERTS = re.compile(r"\.experts\.(?:gate_up_proj|down_proj)$")
"""Matrices of all experts in one tensor."""

_JOINED_PRODUCT = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(?![_.]?bias)(?:[._]|$)")
_JOINED_AS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
"""Names of the tensors that hold a product of all experts, by the name of one expert's."""

_EXPERT_0 = re.compile(r"(.*\.experts)\.0\.([^.]+)$")
_OF_MODULE = re.compile(r"norm|conv|_ln|patch_embedding")
"""In the last part of a path: the tensor is a module's weight, though no matrix that Kvant multiplies by."""

_FILTER = re.compile(r"(.*)\.[qkv]_conv1d\.weight$")
"""Filters of a recurrence's queries, keys and values."""

_INDEX = re.compile(r"\.\d+(?=\.|$)")
_PREDICTS = re.compile(r"(?:^|\.)mtp[._]")
"""Modules that predict further tokens, which no class of transformers loads."""

_CODE_DTYPES = ("F8_", "U8", "I8", "I32", "U32", "F4")
"""Dtypes that begin like this hold codes."""

_CODE_NAMES = ("weight", "weight_packed", "qweight")
"""Last parts of the names of a module's codes, in any dialect."""

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


def _audit_module(
    layer: str, names: list[str], tensors: Tensors, use: Use, model: _Model
) -> Iterator[TensorUse]:
    """Yields the tensors of one module, missing ones included."""
    weight = model.module(layer)
    declared = use.declared if isinstance(use.declared, Stored) else None
    read = use.stored or declared
    scheme = None if read is None else read.scheme(layer)
    wanted: dict[str, Part] = {}
    undivided: BadCheckpoint | None = None
    mixed = None if read is None else read.refuse_expert(layer)
    if mixed is not None:
        yield from _audit_refused(layer, names, scheme, tensors, mixed, ONE_FORMAT)
        return
    if scheme is not None and scheme.dialect is Dialect.MXFP4_EXPERTS:
        wanted = _parts_of_experts(layer, scheme, model.listed)
    elif scheme is not None and _is_narrow(layer, names, weight, scheme, tensors):
        unread = _refuse_embedding(layer, weight, scheme, model)
        if unread is not None:
            yield from _audit_refused(layer, names, scheme, tensors, *unread)
            return
        shape = _matrix_shape(layer, weight, scheme, tensors)
        if shape is not None:
            parts = parts_of(scheme, *shape)
            wanted = {f"{layer}.{short}": part for short, part in parts.items()}
            refusal = scheme.format.refuse(*shape)
            if refusal is not None:
                what = f"{layer} cannot be stored as declared"
                undivided = BadCheckpoint(what, why=refusal, ways_out=(COMPARE_CONFIG,))
    if scheme is not None and wanted:
        yield from _audit_parts(layer, scheme, wanted, tensors, use, undivided)
    for name in names:
        if name not in wanted:
            yield _audit_other(name, layer, scheme if wanted else None, tensors, use, model)


def _refuse_embedding(
    layer: str, weight: Weight | None, scheme: Scheme, model: _Model
) -> tuple[str, WayOut] | None:
    """Returns why a module's codes are not read, and a way out: those of embeddings, and of tied heads."""
    if scheme.dialect is Dialect.GGUF or not model.dims:
        return None
    if _is_head(layer):
        return None if layer in model.dims else (_TIED, _UNTIE)
    is_embedding = weight is not None and weight.kind is WeightKind.EMBEDDING
    return (_EMBEDDING, _WIDE_EMBEDDING) if is_embedding else None


def _audit_refused(
    layer: str,
    names: list[str],
    scheme: Scheme | None,
    tensors: Tensors,
    because: str,
    way: WayOut,
) -> Iterator[TensorUse]:
    """Yields the tensors of a module that are not read. scheme: None for a wide one."""
    state = TensorState.WRONG
    for name in names:
        dtype, shape = tensors[name]
        fmt = dtype if scheme is None else _in_words(scheme)
        short = name.rpartition(".")[2]
        role = NUMBERS if scheme is None else _ROLES.get(short, Role.CODES).value
        fault = BadCheckpoint(f"{name} cannot be used", why=because, ways_out=(way,))
        yield TensorUse(name, layer, fmt, role, state, because, dtype, shape, fault)


def _in_words(scheme: Scheme) -> str:
    return f"{scheme.summary} ({scheme.dialect.value})"


def _is_head(layer: str) -> bool:
    return layer.rpartition(".")[2] == "lm_head"


def _find_missing(
    tensors: Tensors, modules: Mapping[str, list[str]], use: Use, model: _Model, loaded: _Loaded
) -> tuple[list[str], bool]:
    """Returns paths of weights that no file has, and whether the files are known to have all.

    Files may join weights, or name them in another way, and transformers converts them. So a weight that all
    layers lack under its name is missing only if transformers reads no tensor as it.
    """
    stored = {f"{one[1]}.{one[2]}" for name in tensors if (one := _JOINED_PRODUCT.match(name))}
    experts = {_layer_of(name) for name in stored}

    def is_there(path: str) -> bool:
        if (expert := _EXPERT_0.match(path)) is not None:
            if f"{expert[1]}.{_JOINED_AS.get(expert[2], expert[2])}" in stored:
                return True
        elif path in model.joined and _layer_of(path) in experts:
            return path in stored
        # A narrow weight's own format says which of its tensors are missing.
        shorts = {one.rpartition(".")[2] for one in modules.get(path, ())}
        return path in tensors or "weight" in shorts or not shorts.isdisjoint(_ROLES)

    missing: list[str] = []
    is_whole = model.listed is not None
    for paths in _by_kind(use, model).values():
        absent = {path for path in paths if not is_there(path)}
        is_whole = is_whole and not absent
        of_some = absent if len(absent) < len(paths) else ()
        missing += [path for path in paths if path in of_some or loaded.lacks(path)]
    missing = [path for path in missing if 0 not in model.dims.get(path, ())]
    return missing, is_whole and not missing


def _by_kind(use: Use, model: _Model) -> dict[str, list[str]]:
    """Returns paths of the model's weights, in groups that differ in numbers of layers only. Key: `_kind`."""
    found: dict[str, list[str]] = {}
    for path in (*model.dims, *(use.parameters.keys() & model.joined)):
        found.setdefault(_kind(path), []).append(path)
    return found


def _missing(path: str, modules: Mapping[str, list[str]], use: Use, model: _Model) -> TensorUse:
    """Returns a weight that no file has, under the name that its tensor would have."""
    weight, last = model.weight(path), path.rpartition(".")[2]
    is_module = weight is not None and (
        weight.kind is not WeightKind.OTHER or _OF_MODULE.search(last) is not None
    )
    name = f"{path}.weight" if is_module or f"{path}.weight" in use.parameters else path
    why, way = INCOMPLETE, COPY_AGAIN
    if path in model.joined and any(one.startswith(f"{_layer_of(path)}.0.") for one in modules):
        why, way = _ONE_BY_ONE, _JOINED_FILES
    fault = BadCheckpoint(f"{name} is missing", why=why, ways_out=(way,))
    return TensorUse(name, path, "absent", NUMBERS, TensorState.MISSING, why, None, None, fault)


def _kind(path: str) -> str:
    """Returns a path with N for numbers of layers and experts."""
    return _INDEX.sub(".N", path)


def _is_narrow(
    layer: str, names: list[str], weight: Weight | None, scheme: Scheme, tensors: Tensors
) -> bool:
    """Whether a scheme, which may be declared for all modules, is that of this module."""
    if scheme.dialect is Dialect.GGUF:
        return any(tensors[name][0] == "U8" for name in names)
    if weight is not None and not weight.rows * weight.columns:
        return False
    if weight is not None and (weight.is_product or _is_head(layer)):
        return True
    shorts = {name.rpartition(".")[2] for name in names}
    if shorts & {"weight_packed", "qweight"}:
        return True
    return "weight" in shorts and tensors[f"{layer}.weight"][0].startswith(_CODE_DTYPES)


def _matrix_shape(
    layer: str, weight: Weight | None, scheme: Scheme, tensors: Tensors
) -> tuple[int, int] | None:
    """Returns rows and columns of the layer's weight: of the model, else as its codes have them."""
    if weight is not None:
        return weight.rows, weight.columns
    shapes = {
        short: tensors[f"{layer}.{short}"][1]
        for short in _CODE_NAMES
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
        return None if 32 % scheme.bits else (down, along * 32 // scheme.bits)
    return down, along * (2 if scheme.format.code.bits == 4 else 1)


def _parts_of_experts(
    layer: str, scheme: Scheme, listed: Mapping[str, Weight] | None
) -> dict[str, Part]:
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


def _audit_parts(
    layer: str,
    scheme: Scheme,
    wanted: Mapping[str, Part],
    tensors: Tensors,
    use: Use,
    undivided: BadCheckpoint | None,
) -> Iterator[TensorUse]:
    """Yields the tensors that a layer's format needs. undivided: why the format cannot store the layer."""
    fmt = _in_words(scheme)
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
        elif part.role is Role.ORDER and not scheme.reordered:
            because = "checked while it is loaded"
        try:
            check_part(name, part, dtype, shape)
        except BadCheckpoint as fault:
            found = fault
            if tensors.get(f"{layer}.weight", ("", ()))[0] in WIDE_BYTES:
                assert isinstance(use.declared, Stored)
                ways = (*fault.ways_out, use.declared.leave_alone(layer))
                found = BadCheckpoint(fault.what, why=fault.why, ways_out=ways)
            state = TensorState.MISSING if dtype is None else TensorState.WRONG
            because = fault.why or fault.what
        if part.role is Role.CODES and found is None and undivided is not None:
            found, state, because = undivided, TensorState.WRONG, undivided.why
        if dtype is not None or found is not None:
            yield TensorUse(name, layer, fmt, part.role.value, state, because, dtype, shape, found)


def _audit_other(
    name: str,
    layer: str,
    scheme: Scheme | None,
    tensors: Tensors,
    use: Use,
    model: _Model,
) -> TensorUse:
    """Returns a tensor that the layer's format does not need. scheme: of its layer, None for a wide one."""
    dtype, shape = tensors[name]
    short = name.rpartition(".")[2]
    role = _ROLES.get(short)
    fault: BadCheckpoint | None = None
    if short in _MULTIPLIERS and not isinstance(use.declared, NotStored):
        because = "inputs of its layer are multiplied by it, and Kvant's products do not do that"
        fault = BadCheckpoint(f"{name} is not supported", why=because)
        shown = Role.INPUT_SCALES.value
        return TensorUse(name, layer, dtype, shown, TensorState.WRONG, because, dtype, shape, fault)
    if read_scale_name(name) is not None:
        state, because = use_of_scale(name, use.kv)
        return TensorUse(name, layer, dtype, OF_KV, state, because, dtype, shape)
    if role is None or (role is not Role.CODES and _has_no_weight(layer, tensors)):
        return _numbers(name, layer, tensors, use, model)
    state = TensorState.UNUSED
    because = f"{scheme.dialect.value} has no such tensor" if scheme else ""
    if isinstance(use.declared, NotStored):
        state, because = TensorState.USED, f"left to transformers: {use.declared.reason}"
        if role is Role.CODES and use.declared.holds_numbers:
            state, fault = TensorState.WRONG, _holds_codes(name, use.declared)
    elif role is Role.INPUT_SCALES:
        because = _unrounded(use)
    elif scheme is None:
        because = _no_format(use)
        if role is Role.CODES and f"{layer}.weight" not in tensors:
            state = TensorState.WRONG
            fault = BadCheckpoint(f"{name} holds codes", why=because, ways_out=(COMPARE_CONFIG,))
    fmt = dtype if scheme is None else _in_words(scheme)
    return TensorUse(name, layer, fmt, role.value, state, because, dtype, shape, fault)


def _numbers(name: str, layer: str, tensors: Tensors, use: Use, model: _Model) -> TensorUse:
    """Returns a tensor that is loaded as numbers without a scale."""
    dtype, shape = tensors[name]
    if model.is_whole and not model.has(name):
        because, fault = "the model that runs has no such weight", None
        state = TensorState.UNUSED
    else:
        because, fault = _load_as_numbers(name, layer, tensors, use, model)
        state = TensorState.USED if fault is None else TensorState.WRONG
    return TensorUse(name, layer, dtype, NUMBERS, state, because, dtype, shape, fault)


def _load_as_numbers(
    name: str, layer: str, tensors: Tensors, use: Use, model: _Model
) -> tuple[str, BadCheckpoint | None]:
    """Returns what loading does with a tensor, or why it must not, with the error."""
    dtype, shape = tensors[name]
    if dtype not in WIDE_BYTES:
        what = f"{name} has the dtype {dtype}"
        if _JOINED_EXPERTS.search(name):
            why = "its codes would be taken for numbers: scales of joined experts are not read"
            return why, BadCheckpoint(what, why=why, ways_out=(_APART,))
        if isinstance(use.declared, NotStored):
            return _left_to_transformers(name, layer, tensors, use.declared)
        if name.endswith(".weight"):
            why = f"{_no_format(use)}, so its codes would be taken for numbers"
            return why, BadCheckpoint(what, why=why, ways_out=(COMPARE_CONFIG,))
    wanted = model.other_shape(name, shape)
    if wanted is not None:
        what, why = (
            f"{name} has the shape {_shown(shape)}",
            f"config.json makes it {_shown(wanted)}",
        )
        return why, BadCheckpoint(what, why=why, ways_out=(COMPARE_CONFIG,))
    if use.rounded is not None:
        return _rounded(layer, model.weight(layer), shape, use, use.rounded), None
    return "loaded as the compute dtype", None


def _left_to_transformers(
    name: str, layer: str, tensors: Tensors, declared: NotStored
) -> tuple[str, BadCheckpoint | None]:
    """Returns why transformers decodes a tensor of codes, or why it would do so wrongly, with the error."""
    because, shape = f"left to transformers: {declared.reason}", tensors[name][1]
    if not name.endswith(".weight"):
        return because, None
    scales = declared.scales
    if scales and not any(f"{layer}.{short}" in tensors for short in scales):
        what = f"the tensor {layer}.{scales[0]} is missing"
        fault = BadCheckpoint(what, why=f"{name} holds codes", ways_out=(COPY_AGAIN,))
        return f"the scales that transformers reads as {scales[0]} are missing", fault
    if declared.holds_numbers:
        return because, _holds_codes(name, declared)
    uneven = _uneven(shape, declared.block)
    if uneven:
        what = f"{name} has the shape {_shown(shape)}"
        return uneven, BadCheckpoint(what, why=uneven, ways_out=(_EVEN,))
    return because, None


def _holds_codes(name: str, declared: NotStored) -> BadCheckpoint:
    return BadCheckpoint(f"{name} holds codes", why=declared.reason, ways_out=(COMPARE_CONFIG,))


def _uneven(shape: tuple[int, ...], block: tuple[int, ...]) -> str:
    """Returns why transformers would decode a matrix with wrong scales; "" if it would not.

    transformers divides each side by its number of scales.
    """
    pairs = zip(shape, block, strict=False) if len(shape) == 2 else ()
    if not any(size > side and size % side for size, side in pairs):
        return ""
    return f"transformers would decode blocks of equal size, and {_shown(block)} does not divide it"


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
    return not any(f"{layer}.{short}" in tensors for short in _CODE_NAMES)


def _unrounded(use: Use) -> str:
    if use.activations is None:
        return "products take 16-bit activations"
    return f"activations are rounded as {use.activations.value}, which computes scales"


def use_of_scale(name: str, kv: KVPlan) -> tuple[TensorState, str]:
    """Returns whether the KV plan uses a scale of the cache, and its reason."""
    for layer in kv.layers:
        for choice in (layer.k, layer.v):
            tensor = None if choice is None else choice.scale.tensor
            if choice is not None and tensor is not None and tensor.name == name:
                if choice.scale.state is ScaleState.FOUND:
                    return TensorState.USED, f"needed by {choice.dtype}"
                return TensorState.UNUSED, choice.scale.because
    return TensorState.UNUSED, "the KV plan does not need it"
