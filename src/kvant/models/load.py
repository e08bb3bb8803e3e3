"""Loads weights through transformers; only this file does.

Decides nothing. The plan has each layer's format and the compute dtype. This loads the weights and
makes every layer use Kvant's attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from kvant.attention.hook import ATTENTION_NAME, register
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint, DoesNotFit, EngineFault, NotServable, WayOut
from kvant.kv.checkpoint.json_file import (
    COMPARE_CONFIG,
    COPY_AGAIN,
    INCOMPLETE,
    read_json_object,
)
from kvant.kv.checkpoint.safetensors_header import read_headers
from kvant.kv.checkpoint.scales import read_scale_values
from kvant.kv.dtype import ComputeDtype
from kvant.kv.format import Side
from kvant.kv.geometry import ModelGeometry
from kvant.kv.spec import KVPlan
from kvant.models.classes import attending, auto_class, settle_outputs
from kvant.models.directory import CONFIG_NAME, GENERATION_NAME, ends_of_text
from kvant.models.finite import check_finite
from kvant.models.forward_info import ForwardChoice
from kvant.models.geometry.weight_methods import with_declaration
from kvant.models.key_rounding import read_rounding
from kvant.models.loaded import LoadedModel
from kvant.models.narrow import NarrowConfig, make_narrow, round_activations
from kvant.models.quantization import Activations, Quantization
from kvant.models.quantized import (
    check_decoded,
    check_nothing_quantises_kv,
    check_weights,
    decode_weights,
    is_compressed,
    leave_weights_only,
)
from kvant.models.quiet import OnProgress, quiet_compressed_tensors, quiet_transformers
from kvant.models.recurrent.hook import hook_mixers
from kvant.models.rotary import fix_frequencies
from kvant.models.sharding.cuts import Cuts
from kvant.models.sharding.divide import Divided, Group, cut_scales
from kvant.models.sharding.shard import rank_plan
from kvant.models.stored import Stored, decoded_here

TORCH_COMPUTE = {
    ComputeDtype.FLOAT32: torch.float32,
    ComputeDtype.FLOAT16: torch.float16,
    ComputeDtype.BFLOAT16: torch.bfloat16,
    ComputeDtype.FLOAT64: torch.float64,
}


def load_model(
    path: Path,
    plan: KVPlan,
    geometry: ModelGeometry,
    forward: ForwardChoice,
    *,
    device: torch.device,
    rotary_length: int | None = None,
    dummy_weights: bool = False,
    group: Group | None = None,
    on_progress: OnProgress | None = None,
) -> LoadedModel:
    """Loads the model in the directory `path`, to compute in the plan's dtype.

    Reads safetensors only and runs no code of the checkpoint. plan, geometry: of the whole model, also with
    ranks. forward: the plan's choice. rotary_length: tokens for which moving rotary frequencies are fixed,
    None for their original length. dummy_weights: make up weights instead of reading them, for timings.
    group: the ranks that share the model; this rank reads only its part. on_progress: gets the share of the
    tensors that are loaded, 0 to 1.
    Raises NotServable for a model that Kvant cannot run, BadCheckpoint for weights that are missing or have
    other shapes, DoesNotFit if the device has no room for them.
    """
    if geometry.not_runnable is not None:
        raise NotServable(f"{path} can be planned but not run", why=geometry.not_runnable)
    read_outside = partial(_read_outside, path, device, group)
    scales = read_outside(plan)
    divided: Divided | None = None
    if group is not None:
        cuts = Cuts(geometry, group.shard)
        divided = Divided(cuts, group, forward.stored)
        plan = rank_plan(plan, group.shard.size)
    register()
    with quiet_transformers(on_progress), _room_for(path, device):
        module, unused = _load_module(
            path,
            TORCH_COMPUTE[plan.compute_dtype],
            forward,
            device,
            divided,
            dummy_weights=dummy_weights,
        )
    fix_frequencies(module, rotary_length)
    check_nothing_quantises_kv(module)
    text = module.config.get_text_config(decoder=True)
    if text._attn_implementation != ATTENTION_NAME:
        raise EngineFault(f"{type(module).__name__} replaced Kvant's attention while it was loaded")
    module.requires_grad_(False)
    if forward.activations is not None and forward.activations.is_fp8:
        round_activations(module, fast_sums=forward.activations is Activations.FP8_FAST)
    hook_mixers(module)
    with _room_for(path, device):
        loaded = LoadedModel(module, plan, scales, device, unused, forward, group, read_outside)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # frees the parts of joined products, a third of the weights
    return loaded


def _load_module(
    path: Path,
    compute: torch.dtype,
    forward: ForwardChoice,
    device: torch.device,
    divided: Divided | None,
    *,
    dummy_weights: bool,
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Returns transformers' module with its weights, and the names of unused tensors."""
    config = _read_config(path)
    if compute is torch.float64:
        config._experts_implementation = "eager"  # grouped products do not support float64
    stored = forward.stored
    rounded = None if forward.rounds_itself else forward.quantization
    narrow: NarrowConfig | None = None
    if stored is not None or rounded is not None:
        cut = {} if divided is None else divided.cut
        narrow = NarrowConfig(path, asked=rounded, stored=stored, cut=cut)
    elif divided is None:
        decoded = decoded_here(with_declaration(read_json_object(path / CONFIG_NAME), path))
        if decoded is not None:
            narrow = NarrowConfig(path, stored=decoded, widened=compute)
    is_left = stored is None and (narrow is None or rounded is not None)  # to transformers
    if is_left and not dummy_weights:
        check_weights(config, path, _facts(device))
    leave_weights_only(config, keep=is_left)
    kept = None if forward.matrices is None else TORCH_COMPUTE[forward.matrices]
    rounds_itself = forward.rounds_itself and forward.quantization is not None
    if rounds_itself and not dummy_weights:
        kept = _dtype_of_matrices(path)  # they stay in the files until they are rounded
    unused: tuple[str, ...] = ()
    with quiet_compressed_tensors(is_compressed(config)):
        if dummy_weights:
            module = _make_weights(
                config, compute, device, divided, asked=rounded, stored=stored, kept=kept
            )
        else:
            with _matrices_in(kept):
                module, unused = _read_weights(path, config, compute, device, narrow, divided)
        if narrow is None and kept is None:
            decode_weights(module, compute)
        check_decoded(path, module)
        if divided is not None:
            divided.finish(module)
    if rounds_itself:
        table: Any = module.get_input_embeddings()
        table.weight.data = table.weight.data.to(compute)
    return module, unused


def _dtype_of_matrices(path: Path) -> torch.dtype | None:
    """Returns the 16-bit dtype in which the files store all matrices, else None."""
    entries = (one for header in read_headers(path) or () for one in header.tensors.values())
    found = {entry.dtype for entry in entries if len(entry.shape) > 1}
    known = {"BF16": torch.bfloat16, "F16": torch.float16}
    return known.get(found.pop()) if len(found) == 1 else None


def _read_outside(
    path: Path, device: torch.device, group: Group | None, plan: KVPlan
) -> dict[tuple[int, Side], torch.Tensor]:
    """Reads what the whole model's plan uses from the checkpoint for its KV cache: `LoadedModel.scales`."""
    read: Mapping[tuple[int, Side], Sequence[float]] = read_scale_values(path, plan)
    if group is not None:
        read = cut_scales(read, plan, group.shard)
    found = {
        key: torch.tensor(values, dtype=torch.float32, device=device)
        for key, values in read.items()
    }
    for index, matrices in read_rounding(path, plan).items():
        first, last = 0, len(matrices)
        if group is not None:
            first, last = group.shard.kv_heads(len(matrices))
        found[index, Side.K] = torch.from_numpy(matrices[first:last]).to(device)
    return found


def _facts(device: torch.device) -> DeviceFacts:
    return DeviceFacts(DeviceKind.CPU if device.type == "cpu" else DeviceKind.CUDA)


@contextmanager
def _room_for(path: Path, device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as fault:
        raise DoesNotFit(f"{path} does not fit on {device}", why=str(fault)) from fault


def _read_config(path: Path) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except Exception as fault:  # each family checks its fields in its own way
        raise BadCheckpoint(
            f"{path}: transformers cannot read config.json",
            why=f"{type(fault).__name__}: {fault}",
            ways_out=(COMPARE_CONFIG,),
        ) from fault
    assert isinstance(config, PreTrainedConfig)
    settle_outputs(config)
    return config


def _read_weights(
    path: Path,
    config: PreTrainedConfig,
    compute: torch.dtype,
    device: torch.device,
    narrow: NarrowConfig | None,
    divided: Divided | None,
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Returns the module, and the names of unused tensors. narrow: how some weights are made narrow."""
    options: dict[str, Any] = {
        "config": config,
        "dtype": compute,
        "attn_implementation": attending(config, ATTENTION_NAME),
        "device_map": None if device.type == "cpu" else {"": device},
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # `_check_complete` names them
    }
    if narrow is not None:
        options["quantization_config"] = narrow
    if (path / GENERATION_NAME).is_file():
        # Kvant reads its other values (`recommended_params`), of which transformers may refuse some.
        ends: Any = {"eos_token_id": ends_of_text(path)}
        options["generation_config"] = GenerationConfig.from_dict(ends)
    try:
        if divided is not None:
            loaded: Any = divided.read(path, auto_class(config), options)
        else:
            loaded = auto_class(config).from_pretrained(
                str(path),
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                **options,
            )
    except torch.OutOfMemoryError:
        raise
    except ImportError as fault:
        raise NotServable(
            f"{path} needs a package that is not installed",
            why=str(fault),
            ways_out=(WayOut("install the package named above with pip"),),
        ) from fault
    except OSError as fault:
        raise BadCheckpoint(
            f"{path} has no safetensors weights that can be read",
            why=str(fault),
            ways_out=(WayOut("convert .bin weights with transformers' save_pretrained"),),
        ) from fault
    except Exception as fault:  # a family's own code may raise anything
        if narrow is not None and narrow.fault is not None:
            raise narrow.fault from None
        raise NotServable(
            f"transformers cannot load {path}", why=f"{type(fault).__name__}: {fault}"
        ) from fault
    module, info = loaded
    assert isinstance(module, PreTrainedModel)
    _check_complete(path, module, info)
    if narrow is not None:
        narrow.finish(module)
    check_finite(path, module)
    unexpected: Iterable[str] = info["unexpected_keys"]
    if narrow is not None:
        unexpected = (name for name in unexpected if not name.startswith(narrow.read_apart))
    return module, tuple(sorted(unexpected))


def _make_weights(
    config: PreTrainedConfig,
    compute: torch.dtype,
    device: torch.device,
    divided: Divided | None,
    *,
    asked: Quantization | None = None,
    stored: Stored | None = None,
    kept: torch.dtype | None = None,
) -> PreTrainedModel:
    """Returns the module with small random weights, which are made on the device itself.

    A divided module gets its part of the whole module's weights. asked, stored: which matrices are
    narrow; only one at a time is wide. kept: the dtype of matrices, None for the model's.
    """
    # A CPU's memory is not allocated until it is written to, so the whole module has room there.
    made_on = device if divided is None else torch.device("cpu")
    is_narrow = asked is not None or stored is not None
    with (
        torch.device(made_on),
        no_init_weights(),
        _matrices_without_memory(is_narrow),
        _matrices_in(kept),
    ):
        made: Any = auto_class(config).from_config(
            config,
            dtype=compute,
            attn_implementation=attending(config, ATTENTION_NAME),
            trust_remote_code=False,
        )
    assert isinstance(made, PreTrainedModel)
    module = made
    generator = torch.Generator(device).manual_seed(0)
    if divided is not None:
        names = [name for name, _ in module.named_parameters()]
        divided.resize(module)
        for parameter in module.parameters():
            if parameter.ndim > 1:  # not copied from the host: its numbers are made below
                parameter.data = torch.empty_like(parameter.data, device=device)
        torch.nn.Module.to(module, device)
        divided.make_numbers(module, names, generator)
    if is_narrow:

        def numbers(parameter: torch.Tensor) -> torch.Tensor:
            wide = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            return wide.normal_(0.0, 0.02, generator=generator)

        make_narrow(module, asked, stored, numbers, head=divided is None)
        _give_memory(module, device)
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point() or name.endswith(("_scale", "_factor")):
            continue  # narrow weights have their values already
        if parameter.ndim > 1 and divided is None:
            parameter.data.normal_(0.0, 0.02, generator=generator)
        elif name.endswith((".bias", ".sinks")):  # made without a value
            parameter.data.zero_()
    module.train(False)
    return module


def _give_memory(module: torch.nn.Module, device: torch.device) -> None:
    """Allocates parameters that are on the meta device on `device`; shared ones stay shared."""
    made: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                kept = made.setdefault(id(parameter), torch.nn.Parameter(empty, False))
                part.register_parameter(name, kept)


@contextmanager
def _matrices_without_memory(wanted: bool) -> Iterator[None]:
    """In this context, matrices of new modules are put on the meta device, without memory."""

    def without(module: Any, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.ndim < 2 or parameter.is_meta:
            return parameter
        empty = torch.empty_like(parameter, device="meta")
        return torch.nn.Parameter(empty, parameter.requires_grad)

    hook = register_module_parameter_registration_hook(without) if wanted else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


@contextmanager
def _matrices_in(dtype: torch.dtype | None) -> Iterator[None]:
    """While modules are made, matrices of products, embeddings and experts get this dtype; None: the model's.

    transformers gives a weight that arrives the dtype that it finds in the module.
    """

    def narrowed(module: Any, name: str, parameter: Any) -> Any:
        others = isinstance(module, torch.nn.modules.conv._ConvNd)
        if parameter is None or parameter.ndim < 2 or others or parameter.dtype is dtype:
            return parameter
        return torch.nn.Parameter(parameter.data.to(dtype), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(narrowed) if dtype is not None else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


def _check_complete(path: Path, module: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Raises BadCheckpoint for weights that transformers would fill with random numbers.

    Those are weights that the files lack, and weights that have another shape there. Weights without a
    number, such as those of 0 shared experts, need not be there.
    """
    unlike = sorted(info["mismatched_keys"])
    if unlike:
        name, stored, wanted = unlike[0]
        others = f", and {len(unlike) - 1} more are of another shape" if len(unlike) > 1 else ""
        raise BadCheckpoint(
            f"{path}: {name} has the shape {list(stored)}{others}",
            why=f"config.json makes it {list(wanted)}",
            ways_out=(COMPARE_CONFIG,),
        )
    empty = {name for name, one in module.named_parameters() if not one.numel()}
    missing = sorted(set(info["missing_keys"]) - empty)
    if missing or info["error_msgs"]:
        shown = ", ".join(missing[:5]) + (", .." if len(missing) > 5 else "")
        raise BadCheckpoint(
            f"{path} lacks {len(missing)} of the model's weights: {shown}",
            why="; ".join(info["error_msgs"]) or INCOMPLETE,
            ways_out=(COPY_AGAIN,),
        )
