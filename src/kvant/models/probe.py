"""Finds the shape of a model by running transformers' forward, for families that Kvant does not list.

The model is made on the meta device, without weights' values, and runs eight tokens. Kvant's attention
and mask functions record the arguments of every layer: heads, head sizes, window, cap of scores and
sinks. A model with other techniques is refused, with their names: unknown states, sparse or biased
attention, masks other than causal ones and windows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    PreTrainedConfig,
    PreTrainedModel,
    masking_utils,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightTransform,
    revert_weight_conversion,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvant.attention.hook import ATTENTION_NAME
from kvant.errors import BadCheckpoint, NotServable, WayOut
from kvant.kv.checkpoint.json_file import COMPARE_CONFIG
from kvant.kv.geometry import Attention, LayerGeometry, ModelGeometry, StateGeometry
from kvant.models.classes import attending, auto_class, settle_outputs
from kvant.models.fused.recipe import Activation, activation_of
from kvant.models.fused.recipes import recipe_of
from kvant.models.geometry.families import name_of
from kvant.models.geometry.fields import Fields, text_section
from kvant.models.geometry.read import (
    NONE_ATTENDS,
    read_dtype,
    read_max_model_len,
    read_state_dtype,
)
from kvant.models.geometry.renaming import NameRules, Renaming
from kvant.models.modules.keywords import handing_over
from kvant.models.quiet import quiet_transformers
from kvant.models.recurrent.hook import find_mixers
from kvant.models.recurrent.mixers import PAIRED

_NAME = "kvant_probe"
_TOKENS = 8
_MARKER = "the step"
_FARTHEST = 1 << 20
"""Tokens over which a mask is evaluated: more than any window."""

_MASK_DTYPES = (torch.float16, torch.float64, torch.bfloat16, torch.int8, torch.int16, torch.uint8)
"""One dtype for each mask of a forward, so that attention can tell which mask it received."""

_PLAIN_STATES = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
"""transformers' cache layers that have only keys and values, or nothing."""

_ALONE = frozenset({"mlp", "moe"})
"""Kinds of layers that do not mix tokens, by their names in configs."""

_MOST_SAID = 160
"""Most characters of an exception that an error message repeats."""

_WITHOUT_MEANING = frozenset(
    {"position_ids", "cache_position", "output_hidden_states", "use_cache", "logits_to_keep"}
)

_TECHNIQUES = {
    "indices": "indices of the keys that each query sees (sparse attention)",
    "position_bias": "a bias by position",
}
"""What keywords of attention stand for."""

_HEADS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "LMHead")
"""Endings of the names of classes that generate text."""


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of a probe. parameters: names and shapes of all weights, including towers.

    stored: the same of the tensors in files as transformers writes them, with kept buffers; () if there are
    no others. linear, embeddings: paths of modules of torch's classes. names: the class's rules for names in
    files; None if Kvant does not know their form.
    """

    geometry: ModelGeometry
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    stored: tuple[tuple[str, tuple[int, ...]], ...]
    linear: tuple[str, ...]
    embeddings: tuple[str, ...]
    names: NameRules | None

    @property
    def num_weights(self) -> int:
        """Elements of all weights."""
        return sum(math.prod(shape) for _, shape in self.parameters)


class _CannotRun(Exception):
    """Names in one phrase what a model needs and Kvant lacks."""


@dataclass(frozen=True, slots=True, eq=False)
class _Attended:
    """One call of a layer's attention. mask: index of its mask in `_Record.masks`, or None."""

    module: nn.Module
    q: torch.Size
    k: torch.Size
    v: torch.Size
    keys: Tensor
    window: int | None
    softcap: float
    sinks: bool
    mask: int | None


def probe(config: Mapping[str, Any]) -> Probed:
    """Returns the shape of the model of a config.json, from transformers' modules.

    Raises BadCheckpoint for a config that transformers does not read, NotServable for a model that
    needs techniques that Kvant lacks.
    """
    model_type = str(config.get("model_type"))
    with quiet_transformers():
        made = _config(config)
        text = made.get_text_config(decoder=True)
        name = name_of(config)
        try:
            module = _module(made)
            layers = _layers(module, text)
            stored = _stored(module)
        except _CannotRun as fault:
            raise NotServable(
                f"Kvant does not run {name} (model_type {model_type!r})",
                why=str(fault),
                ways_out=(WayOut("choose a model of another family: docs/models.md lists them"),),
            ) from None
    sections = Fields(config), Fields(text_section(config))
    limit = read_max_model_len(sections[1])
    if limit is None:
        said = getattr(text, "max_position_embeddings", None)
        limit = said if isinstance(said, int) and said > 0 else None
    geometry = ModelGeometry(
        architecture=name,
        model_type=model_type,
        layers=layers,
        dtype=read_dtype(*sections),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_model_len=limit,
        state_dtype=read_state_dtype(sections[1]),
    )
    weights = tuple((name, tuple(weight.shape)) for name, weight in module.named_parameters())
    linear, embeddings = (
        tuple(name for name, part in module.named_modules() if type(part) is kind)
        for kind in (nn.Linear, nn.Embedding)
    )
    others = () if stored == weights else stored
    return Probed(geometry, weights, others, linear, embeddings, name_rules(module))


def name_rules(module: PreTrainedModel) -> NameRules | None:
    """Returns transformers' rules for the names of tensors in files; None if Kvant cannot follow them."""
    made = []
    for one in get_model_conversion_mapping(module):
        if type(one).rename_source_key is not WeightTransform.rename_source_key:
            return None
        begins: tuple[str, ...] = ()
        if one.scope_prefix is not None:
            base, scope = (
                f"{at}." if at else "" for at in (one.base_model_prefix, one.scope_prefix)
            )
            begins = (base + scope, scope)
        joins = isinstance(one, WeightConverter)
        made.append(
            Renaming(one.compiled_sources.pattern, tuple(one.target_patterns), begins, joins)
        )
    return NameRules(tuple(made), module.base_model_prefix)


def _stored(module: PreTrainedModel) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns names and shapes of a model's tensors in files: transformers converts some when it loads them.

    Published files have the form that it writes again. Tied weights are named once.
    """
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    kept = {name: one for name, one in module.state_dict().items() if name not in tied}
    kept.update(module.named_parameters())
    try:
        found = revert_weight_conversion(module, kept)
    except Exception as fault:  # each family converts in its own way
        raise _CannotRun(f"transformers cannot convert its weights: {_short(fault)}") from fault
    return tuple((name, tuple(tensor.shape)) for name, tensor in found.items())


def _config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns transformers' config, without the quantisation of weights."""
    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise BadCheckpoint(
            f"unknown model_type {model_type!r}",
            why="neither Kvant nor the installed transformers has a model of this type",
            ways_out=(
                WayOut("choose a model of a family that Kvant runs: docs/models.md lists them"),
                WayOut("install a transformers that has it: pip install --upgrade transformers"),
            ),
        )
    architecture = name_of(config)
    if architecture != model_type and not architecture.endswith(_HEADS):
        raise BadCheckpoint(
            f"unknown architecture {architecture!r} (model_type {model_type!r})",
            why="it is no model that generates text",
            ways_out=(WayOut("choose a model that does: docs/models.md lists families"),),
        )
    given = {k: v for k, v in config.items() if k not in ("quantization_config", "auto_map")}
    given = _with_floats(given)
    try:
        made = CONFIG_MAPPING[model_type].from_dict(given)
    except Exception as fault:  # each family checks its fields in its own way
        said = str(fault).strip().rpartition("\n")[2].strip()  # the cause, in the last line
        why = said if ": " in said else f"{type(fault).__name__}: {said}"
        raise BadCheckpoint(
            "config.json: transformers cannot read it", why=why, ways_out=(COMPARE_CONFIG,)
        ) from fault
    assert isinstance(made, PreTrainedConfig)
    settle_outputs(made)
    return made


def _with_floats(value: Any) -> Any:
    """Returns a JSON value, with objects by which transformers writes floats such as infinity as floats."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(part) for key, part in value.items()}
    return [_with_floats(part) for part in value] if isinstance(value, list) else value


def _module(config: PreTrainedConfig) -> PreTrainedModel:
    _register()
    for section in (config, config.get_text_config(decoder=True)):
        section._experts_implementation = _NAME
    try:
        with torch.device("meta"):
            made = auto_class(config).from_config(
                config, attn_implementation=attending(config, _NAME)
            )
    except KeyError as fault:
        if fault.args[:1] == (_NAME,):
            raise _CannotRun("its attention does not go through transformers' interface") from None
        raise _CannotRun(f"transformers cannot make it: {_short(fault)}") from fault
    except Exception as fault:  # a family's own code may raise anything
        raise _CannotRun(f"transformers cannot make it: {_short(fault)}") from fault
    assert isinstance(made, PreTrainedModel)
    for part in made.modules():
        if hasattr(part, "warn_if_padding_and_no_attention_mask"):
            # The original method reads token values, which the meta device lacks.
            part.warn_if_padding_and_no_attention_mask = _warns_of_nothing  # type: ignore[assignment]
    for name, part, mixer in find_mixers(made):
        activation = getattr(part, "activation", "silu")
        if activation_of(activation) is not Activation.SILU:
            raise _CannotRun(f"{type(part).__name__} computes {activation}, Kvant's mixer silu")
        part.forward = _Mixed(name, part, mixer.states)
    made.train(False)
    return made


def _short(fault: Exception) -> str:
    """Returns the text of transformers' exception in one short line."""
    text = " ".join(f"{type(fault).__name__}: {fault}".split())
    return text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]}.."


def _warns_of_nothing(*_: object) -> None:
    pass


def _layers(module: PreTrainedModel, text: PreTrainedConfig) -> tuple[LayerGeometry, ...]:
    """Runs the module and returns one geometry for each decoder layer, in order."""
    with _recording() as record, torch.no_grad():
        output = _run(module)
    count = text.num_hidden_layers
    _refuse_states(output, record)
    names = {id(part): name for name, part in module.named_modules()}
    by_layer: dict[int, _Attended] = {}
    for one in record.calls:
        index = getattr(one.module, "layer_idx", None)
        if not isinstance(index, int) or not 0 <= index < count:
            raise _CannotRun(f"{type(one.module).__name__} attends without the index of a layer")
        if index in by_layer:
            raise _CannotRun(f"layer {index} attends more than once")
        by_layer[index] = one
    alone = {index for index in range(count) if _mixes_nothing(text, index)}
    missing = [
        index
        for index in range(count)
        if index not in by_layer and index not in record.states and index not in alone
    ]
    if missing:
        raise _CannotRun(_why_missing(missing, count, len(record.calls)))
    if not by_layer:
        raise _CannotRun(NONE_ATTENDS)
    for index, (_, states) in record.states.items():
        if not any(math.prod(state.shape) for state in states):
            raise _CannotRun(f"layer {index} has a convolution over one token and keeps nothing")
    patterns = [_window_of(mask, text) for mask in record.masks]
    recipe = recipe_of(text.model_type)
    latent = recipe is not None and recipe.attention.latent
    found: list[LayerGeometry] = []
    for index in range(count):
        name, states = record.states.get(index, (f"layers.{index}", ()))
        if index not in by_layer:
            found.append(LayerGeometry(index, name, Attention.NONE, states=states))
            continue
        one = by_layer[index]
        owner = next((o for o in by_layer if o < index and by_layer[o].keys is one.keys), None)
        layer = _layer(index, one, names[id(one.module)], patterns, owner)
        if latent and layer.attention is Attention.FULL:
            layer = _as_latent(layer, one.module)
        found.append(replace(layer, states=states))
    return tuple(found)


def _layer(
    index: int, one: _Attended, name: str, patterns: Sequence[int | None], owner: int | None
) -> LayerGeometry:
    window = one.window if one.mask is None else patterns[one.mask]
    if one.window is not None and one.window < 1:
        raise BadCheckpoint(
            f"config.json: layer {index} has a window of {one.window} tokens",
            why="a token sees at least itself",
            ways_out=(COMPARE_CONFIG,),
        )
    if window != one.window:
        raise _CannotRun(
            f"layer {index} has the window {window} in its mask alone, which Kvant does not build"
        )
    if not one.k[1] or one.q[1] % one.k[1] or one.k[1] != one.v[1]:
        raise _CannotRun(f"layer {index} has {one.q[1]} heads of queries for {one.k[1]} of keys")
    kind = Attention.FULL if window is None else Attention.SLIDING
    return LayerGeometry(
        index=index,
        name=name,
        attention=kind if owner is None else Attention.SHARED,
        num_q_heads=one.q[1],
        num_kv_heads=one.k[1],
        head_dim_k=one.k[3],
        head_dim_v=one.v[3],
        window=window,
        shared_with=owner,
        sinks=one.sinks,
        softcap=one.softcap,
    )


def _as_latent(layer: LayerGeometry, attention: Any) -> LayerGeometry:
    """Returns the geometry with stored latents, for a layer whose module expands them before attention."""
    rank = int(attention.kv_lora_rank)
    return replace(
        layer,
        attention=Attention.MLA,
        num_kv_heads=1,
        head_dim_k=rank + int(attention.qk_rope_head_dim),
        head_dim_v=rank,
    )


def _run(module: PreTrainedModel) -> Any:
    """Runs the forward on a few tokens, with the same arguments as `kvant.models.modules.forward`."""
    takes = inspect.signature(module.forward).parameters
    if "position_ids" not in takes:
        raise _CannotRun("its forward takes no positions, by which sequences in one batch differ")
    if all(p.kind is not p.VAR_KEYWORD for p in takes.values()):
        raise _CannotRun("its forward hands no keywords through to attention")
    tokens = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    try:
        with _Numberless(), _one_sequence(), handing_over(module, _MARKER):  # type: ignore[no-untyped-call]
            return module(
                input_ids=tokens, position_ids=tokens, use_cache=True, **{ATTENTION_NAME: _MARKER}
            )
    except _CannotRun:
        raise
    except Exception as fault:  # a forward that needs values, which the meta device lacks
        raise _CannotRun(
            f"its forward cannot be probed without numbers: {_short(fault)}"
        ) from fault


@contextmanager
def _one_sequence() -> Iterator[None]:
    """Lets masks treat the tokens as one sequence, since positions on the meta device cannot tell."""
    found = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _finds_none
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = found


def _finds_none(position_ids: Tensor) -> None:
    pass


def _mixes_nothing(text: PreTrainedConfig, index: int) -> bool:
    """Returns whether a layer treats each token independently."""
    for field in ("layers_block_type", "layer_types"):
        kinds = getattr(text, field, None)
        if isinstance(kinds, (list, tuple)) and index < len(kinds) and kinds[index] in _ALONE:
            return True
    return False


def _refuse_states(output: Any, record: _Record) -> None:
    """Raises `_CannotRun` if the cache has other states than keys, values and those of known mixers."""
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        return
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise _CannotRun("it keeps a state that is no cache of keys and values")
    kinds = {
        type(layer).__name__
        for index, layer in enumerate(layers)
        if index not in record.states or "Linear" not in type(layer).__name__
    }
    others = sorted(kinds - set(_PLAIN_STATES))
    if others:
        raise _CannotRun(f"it keeps {', '.join(dict.fromkeys(map(_kind_of_state, others)))}")


def _kind_of_state(name: str) -> str:
    if "Indexed" in name:
        return "an index of keys for sparse attention (DSA)"
    if "Linear" in name:
        return "recurrent or convolution states"
    return f"a state of its own ({name})"


def _why_missing(missing: Sequence[int], count: int, num_calls: int) -> str:
    if not num_calls:
        return "its attention does not go through transformers' interface"
    shown = ", ".join(map(str, missing[:6])) + (", .." if len(missing) > 6 else "")
    return f"layers {shown} of {count} mix tokens in another way than attention"


def _window_of(mask: Callable[..., Any], text: PreTrainedConfig) -> int | None:
    """Returns how many tokens a late query sees under a mask, including its own; None for all up to it."""
    keys = torch.arange(_FARTHEST)
    last = torch.tensor(_FARTHEST - 1)
    try:
        seen = torch.as_tensor(mask(0, 0, last, keys)).expand(_FARTHEST)
        beyond = torch.as_tensor(mask(0, 0, last - 1, last))
    except Exception as fault:
        if getattr(text, "attention_chunk_size", None) is not None:
            raise _CannotRun(
                "some of its layers attend in chunks, by a mask of their own"
            ) from fault
        raise _CannotRun(f"its mask depends on the batch ({type(fault).__name__})") from fault
    if bool(beyond.any()):
        raise _CannotRun("its queries see later tokens: it is no causal decoder")
    count = int(seen.sum())
    if not bool(seen[_FARTHEST - count :].all()) or _is_chunked(mask, count):
        raise _CannotRun("it attends in chunks, or by a mask that is neither causal nor a window")
    return None if count == _FARTHEST else count


def _is_chunked(mask: Callable[..., Any], window: int) -> bool:
    """Returns whether queries at different places see different numbers of tokens."""
    if window == _FARTHEST:
        return False
    counts = []
    for back in (1, 2, window // 2 + 1):
        query = torch.tensor(_FARTHEST - 1 - back)
        counts.append(int(torch.as_tensor(mask(0, 0, query, torch.arange(_FARTHEST))).sum()))
    return any(count != window for count in counts)


class _Record:
    def __init__(self) -> None:
        self.calls: list[_Attended] = []
        self.masks: list[Callable[..., Any]] = []
        self.states: dict[int, tuple[str, tuple[StateGeometry, ...]]] = {}


class _Mixed:
    """Replaces the forward of a mixer with states: records their geometry and returns zeros."""

    def __init__(self, name: str, module: nn.Module, states: tuple[StateGeometry, ...]) -> None:
        self._name, self._module, self._states = name, module, states

    def __call__(self, hidden_states: Tensor, *_: Any, kvant: object = None, **__: Any) -> Any:
        who, index = type(self._module).__name__, getattr(self._module, "layer_idx", None)
        if kvant != _MARKER:
            raise _CannotRun(f"{who} gets no keywords of the forward, so no step")
        states = _record[-1].states
        if not isinstance(index, int) or index in states:
            raise _CannotRun(f"{who} keeps a state without a layer of its own")
        states[index] = self._name, self._states
        out = torch.zeros_like(hidden_states)
        return (out, None) if who in PAIRED else out


_record: list[_Record] = []
"""The record of the running probe. Only one runs at a time, because of `quiet_transformers`."""


@contextmanager
def _recording() -> Iterator[_Record]:
    _record.append(_Record())
    try:
        yield _record[-1]
    finally:
        _record.pop()


def _register() -> None:
    AttentionInterface.register(_NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, _mask)
    ALL_EXPERTS_FUNCTIONS.register(_NAME, _experts)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kvant: object = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Records a call of attention and returns an empty output. Has `attend_through_pages`'s keywords."""
    name = type(module).__name__
    asked = [k for k, v in others.items() if v is not None and v is not False]
    asked = [keyword for keyword in asked if keyword not in _WITHOUT_MEANING]
    if asked:
        named = (_TECHNIQUES.get(keyword, keyword) for keyword in asked)
        raise _CannotRun(f"{name} asks attention for {', '.join(named)}")
    if kvant != _MARKER:
        raise _CannotRun(f"{name} gets no keywords of the forward, so no step")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise _CannotRun(f"{name} is not causal")
    if scaling is None and getattr(module, "scaling", 1.0) is None:
        raise _CannotRun(f"{name} has null in the place of the number that scales its scores")
    if query.shape[2] != key.shape[2]:
        raise _CannotRun(f"{name} attends to other tokens than those of its own layer")
    mask = None
    if attention_mask is not None:
        if attention_mask.dtype not in _MASK_DTYPES:
            raise _CannotRun(f"{name} computes its mask or bias itself")
        mask = _MASK_DTYPES.index(attention_mask.dtype)
    record = _record[-1]
    record.calls.append(
        _Attended(
            module, query.shape, key.shape, value.shape, key, sliding_window, softcap or 0.0,
            s_aux is not None, mask,
        )
    )  # fmt: skip
    return query.new_zeros(*query.transpose(1, 2).shape[:3], value.shape[3]), None


def _mask(
    batch_size: int, q_length: int, kv_length: int, *, mask_function: Callable[..., Any], **_: Any
) -> Tensor:
    """Records the mask function. Returns a mask without values, whose dtype identifies the function."""
    masks = _record[-1].masks
    if len(masks) == len(_MASK_DTYPES):
        raise _CannotRun(f"its forward makes more than {len(_MASK_DTYPES)} masks")
    masks.append(mask_function)
    dtype = _MASK_DTYPES[len(masks) - 1]
    return torch.empty(batch_size, 1, q_length, kv_length, dtype=dtype, device="meta")


class _Numberless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes reads of values on the meta device return zeros, and `nonzero` and masks choose no elements.

    Forwards read values to find images among the tokens, or experts that got a token.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, options = func.overloadpacket.__name__, dict(kwargs or {})
        on_meta = bool(args) and isinstance(args[0], Tensor) and args[0].device.type == "meta"
        if on_meta and name == "_local_scalar_dense":
            return False if args[0].dtype is torch.bool else 0
        if on_meta and name == "nonzero":
            return torch.empty(0, args[0].ndim, dtype=torch.int64, device="meta")
        if on_meta and name == "split_with_sizes" and not any(args[1]) and not any(args[2:]):
            # Tokens by expert, whose numbers are read from the router: the first has all.
            args = (args[0], [len(args[0]), *args[1][1:]], *args[2:])
        if on_meta and name == "index":
            args = (args[0], [part for one in args[1] for part in _without_masks(one)])
        device = options.get("device")
        if on_meta and name == "_to_copy" and device is not None and device.type != "meta":
            dtype = options.get("dtype") or args[0].dtype
            return torch.zeros(args[0].shape, dtype=dtype, device=device)
        return func(*args, **options)


def _without_masks(index: Tensor | None) -> list[Tensor | None]:
    """Returns an index without masks, of which no element is true."""
    if index is None or index.dtype is not torch.bool:
        return [index]
    return [torch.empty(0, dtype=torch.int64, device="meta")] * index.ndim


def _experts(module: nn.Module, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Returns zeros in the shape of the experts' output, since the choice of experts depends on values."""
    return torch.zeros_like(hidden_states)
