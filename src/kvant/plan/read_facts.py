"""Reads the facts of a plan: the only part of planning that touches files, the hub and the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint, ConfigError, WayOut
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.kv.checkpoint.json_file import read_json_object
from kvant.kv.checkpoint.read import read_checkpoint
from kvant.kv.checkpoint.safetensors_header import read_headers
from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import ModelGeometry
from kvant.models.directory import CONFIG_NAME, other_weights
from kvant.models.forward_info import ForwardFacts
from kvant.models.geometry.mixtures import refuse_lacking_experts
from kvant.models.geometry.weight_methods import refuse_weights, with_declaration
from kvant.models.geometry.weight_recipe import are_decoded
from kvant.models.local import LocalModel, ModelSource, Progress
from kvant.models.locate import locate
from kvant.models.overrides import with_overrides
from kvant.models.read_shape import read_shape
from kvant.models.select import select_forward
from kvant.models.stored import (
    Stored,
    decoded_here,
    read_blocks,
    read_stored,
    refuse_left,
    refuse_unreadable,
)
from kvant.models.weights import read_stored_weights
from kvant.plan.device import device_memory
from kvant.plan.facts import Facts, ModelFacts
from kvant.plan.plan import PlanRequest
from kvant.speculative.dflash.files import read_tensors, refuse_pickled_mask


def read_facts(
    request: PlanRequest,
    *,
    memory: bool = False,
    weights: bool = False,
    known: Facts | None = None,
    progress: Progress | None = None,
) -> Facts:
    """Reads all facts that `make_plan` needs for `request`.

    For a CPU it does not import torch, except to probe a family that Kvant does not list.

    memory: measure this machine's memory. weights: also download or convert the weights, and report that
    to `progress`. known: facts of the same request, read without weights; models that have not changed
    since are not read again. Raises ConfigError for missing or broken files.
    """

    def model(
        name: str, revision: str | None, before: ModelFacts | None, *, is_target: bool
    ) -> ModelFacts:
        if weights and before is not None and before.refusal is not None:
            raise before.refusal  # no download for weights that cannot be read
        blocks = is_target and keeps_blocks(request)
        local = locate(name, revision=revision, weights=weights, blocks=blocks, progress=progress)
        if is_target and request.overrides is not None:
            local = with_overrides(local, request.overrides)
        if before is not None and before.local == local and before.weights.by_dtype is not None:
            return before
        try:
            found = _read_model(local, request.device, is_target=is_target)
        except BadCheckpoint as fault:
            if not is_target or request.overrides is None:
                raise
            replaced = ", ".join(request.overrides.values)
            way = WayOut(f"leave --hf-overrides out, which replaces {replaced}")
            raise BadCheckpoint(
                fault.what, why=fault.why, tried=fault.tried, ways_out=(way, *fault.ways_out)
            ) from None
        if weights and found.refusal is not None:
            raise found.refusal
        return found

    before = None if known is None else known.target
    target = model(request.model, request.revision, before, is_target=True)
    draft = None
    asked = request.speculative
    if asked is not None and asked.method.has_model:
        before = None if known is None else known.draft
        draft = model(asked.model, asked.revision, before, is_target=False)
    if known is not None:
        return Facts(target, draft, known.memory)
    return Facts(
        target,
        draft,
        device_memory(request.device, request.tensor_parallel_size) if memory else None,
    )


def _are_kept(config: Mapping[str, Any], geometry: ModelGeometry, device: DeviceFacts) -> bool:
    """Returns whether narrow weights run as stored. A CPU needs a forward that reads them for that."""
    if not isinstance(read_stored(config, device), Stored):
        return False
    if device.kind is not DeviceKind.CPU or read_blocks(config) is not None:
        return True
    facts = ForwardFacts(config, geometry, ComputeDtype.FLOAT32, device)
    return select_forward(facts).stored is not None


def keeps_blocks(request: PlanRequest) -> bool:
    """Returns whether matrices of a GGUF file are imported as they are stored; else they become float32."""
    rounds = request.quantization is not None and not request.on_cpu
    return request.tensor_parallel_size == 1 and not rounds


def _read_model(local: LocalModel, device: DeviceFacts, *, is_target: bool) -> ModelFacts:
    published = read_json_object(local.path / CONFIG_NAME)
    headers = read_headers(local.path)
    if local.source in (ModelSource.GGUF, ModelSource.DEMO):
        checkpoint = CheckpointKV(checked=True)  # these files never say anything about KV
    else:
        checkpoint = read_checkpoint(local.path, published, headers)
    config = with_declaration(published, local.path)
    weights = read_stored_weights(local.path, config, headers)
    ours = decoded_here(config) is not None
    decoded = ours or are_decoded(config, device)
    if not is_target:
        pickled, stored = refuse_pickled_mask(local.path), read_tensors(local.path, headers)
        return ModelFacts(local, config, checkpoint, weights, decoded, pickled, tensors=stored)
    shape = read_shape(config)  # raises for a drafter
    names = (name for header in headers or () for name in header.tensors)
    refusal: ConfigError | None = refuse_lacking_experts(config, names, local.path)
    refusal = refusal or other_weights(config, local.path) or refuse_unreadable(config)
    if refusal is None and not ours and not _are_kept(config, shape.geometry, device):
        refusal = refuse_weights(published, local.path, device) or refuse_left(config)
    tensors = None
    if headers is not None:
        tensors = {
            name: (entry.dtype, tuple(entry.shape))
            for header in headers
            for name, entry in header.tensors.items()
        }
    return ModelFacts(local, config, checkpoint, weights, decoded, refusal, shape, tensors)
