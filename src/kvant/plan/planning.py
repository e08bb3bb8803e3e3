"""From a model's name to its plan, before any weight is loaded and without torch.

`kvant plan` prints what `make_plan` returns; the engine loads what it returns. There is no second way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvant.attention.need import BackendInfo, DeviceFacts, DeviceKind, Need
from kvant.attention.reference.info import INFO as REFERENCE
from kvant.attention.select import allow, device_encodings, rounded_layers, select, slow_layers
from kvant.errors import BadCheckpoint, BadValue, ConfigError, WayOut
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.kv.checkpoint.read import read_checkpoint
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.geometry import LayerGeometry, ModelGeometry
from kvant.kv.memory import UTILIZATION, MemoryPlan, format_size, plan_memory
from kvant.kv.request import NOTHING_ASKED, KVRequest, Requests
from kvant.kv.resolve import Served, Surroundings, resolve
from kvant.kv.spec import KVPlan, Role
from kvant.models.directory import as_obstacle
from kvant.models.forward_info import ForwardChoice, ForwardFacts
from kvant.models.geometry import (
    DraftFacts,
    MovingRotary,
    fix_rotary,
    read_draft_geometry,
    read_geometry,
)
from kvant.models.geometry.compute_dtype import resolve_compute_dtype
from kvant.models.geometry.weight_methods import refuse_weights
from kvant.models.geometry.weight_recipe import are_decoded
from kvant.models.locate import LocalModel, ModelSource, locate
from kvant.models.quantization import Quantization, check_quantization
from kvant.models.select import select_forward
from kvant.models.weights import WeightBytes, quantized_weight_bytes, weight_bytes_of
from kvant.plan.graph_sizes import draft_counts
from kvant.plan.speculative_config import SpeculativeConfig
from kvant.plan.workspaces import StepSize, Workspaces, default_step, workspaces
from kvant.speculative.dflash.files import check_files, read_network

DEFAULT_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Everything that decides a plan. dtype None: `auto`. Sizes in bytes.

    memory_utilization: share of a GPU's memory. step: its largest step; None for the device's default.
    batch_invariant: only backends that can promise it are chosen, and the model computes so.
    quantization: of the target's weights, while they are loaded.
    """

    model: str
    device: DeviceFacts
    requests: Requests = NOTHING_ASKED
    revision: str | None = None
    dtype: ComputeDtype | None = None
    backend: BackendInfo | None = None
    page_size: int = DEFAULT_PAGE_SIZE
    max_model_len: int | None = None
    memory_bytes: int | None = None
    kv_cache_bytes: int | None = None
    memory_utilization: float = UTILIZATION
    step: StepSize | None = None
    speculative: SpeculativeConfig | None = None
    batch_invariant: bool = False
    quantization: Quantization | None = None

    @property
    def utilization(self) -> float:
        """Share of the device's memory that is planned with: what was asked is a GPU's."""
        return UTILIZATION if self.device.kind is DeviceKind.CPU else self.memory_utilization


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """One model of a plan: where it lies, its config.json, its shape, its weights and what it stores.

    refusal: why its weights cannot be read here, for a model that is planned and not loaded.
    """

    local: LocalModel
    config: Mapping[str, Any]
    geometry: ModelGeometry
    checkpoint: CheckpointKV
    weights: WeightBytes
    kv: KVPlan
    refusal: ConfigError | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Target, drafter and memory. The engine runs exactly this.

    forward: what runs the target's layers, and why faster forwards do not. rotary: how the target's
    rotary frequencies are fixed, where transformers moves them with the length; else None.
    workspaces: what a GPU holds beside weights and pages; None on a CPU, which takes it as it comes.
    """

    request: PlanRequest
    target: PlannedModel
    forward: ForwardChoice
    rotary: MovingRotary | None
    draft: PlannedModel | None
    draft_facts: DraftFacts | None
    memory: MemoryPlan
    workspaces: Workspaces | None

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts of one sequence in one step at most; 0 without speculation."""
        return _num_drafts(self.request.speculative, self.draft_facts)

    @property
    def draft_counts(self) -> list[int]:
        """Numbers of drafts for which steps are recorded, the largest first."""
        return _draft_counts(self.request.speculative, self.num_speculative_tokens)

    @property
    def rotary_length(self) -> int | None:
        """Tokens for which moving rotary frequencies are fixed; None for a model that has none."""
        return None if self.rotary is None else self.rotary.length

    @property
    def weights_bytes(self) -> int | None:
        """Of target and drafter; None where the target's are not known."""
        draft = 0 if self.draft is None else self.draft.weights.bytes or 0
        return None if self.target.weights.bytes is None else self.target.weights.bytes + draft

    @property
    def page_bytes(self) -> int:
        """A page in the pools of target and drafter, which share page ids."""
        return self.target.kv.page_bytes + (0 if self.draft is None else self.draft.kv.page_bytes)

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why it can be planned and not run, memory aside."""
        lines = [*self.target.local.obstacles]
        if self.target.refusal is not None:
            lines.append(as_obstacle(self.target.refusal))
        if self.target.geometry.not_runnable:
            lines.append(f"planned, but not runnable yet: {self.target.geometry.not_runnable}")
        if self.draft is not None:
            lines += [f"draft: {line}" for line in self.draft.local.obstacles]
        return tuple(lines)

    @property
    def can_run(self) -> bool:
        """Whether nothing that is known speaks against running it."""
        return not self.obstacles and not _memory_warnings(self)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Everything a reader must be told, the drafter's lines marked as such."""
        lines = [*self.obstacles, *self.target.local.notes, *self.target.kv.warnings]
        if self.rotary is not None:
            lines.append(self.rotary.because)
        if self.request.device.kind is DeviceKind.CPU and self.request.backend is None:
            lines += slow_layers(self.target.kv)
        lines += rounded_layers(self.target.kv)
        if self.draft is not None:
            notes = self.draft.local.notes, self.draft.kv.warnings
            lines += [f"draft: {line}" for said in notes for line in said]
        return (*lines, *_memory_warnings(self))


def make_plan(request: PlanRequest, *, weights: bool = False) -> Plan:
    """Plan a model. weights: fetch or convert the weights too, because they will be loaded.

    Raises ConfigError for everything a user can mend.
    """
    local, config = _open(request.model, request.revision, weights=weights)
    geometry = read_geometry(config)
    limit = geometry.max_model_len
    if request.max_model_len is not None and limit is not None and request.max_model_len > limit:
        raise BadValue(
            f"--max-model-len {request.max_model_len} is beyond what {request.model} can address",
            why=f"its positions end at {limit}",
            ways_out=(WayOut("take what it can", ("--max-model-len", str(limit))),),
        )
    geometry, rotary = fix_rotary(config, geometry, request.max_model_len)
    refusal = refuse_weights(config, local.path, request.device)
    if refusal is not None and weights:
        raise refusal
    target = _resolve_model(request, request.requests.target, local, config, geometry, Role.TARGET)
    target = replace(target, refusal=refusal)
    forward = _select_forward(request, target)
    draft: PlannedModel | None = None
    facts: DraftFacts | None = None
    if request.speculative is not None and request.speculative.method.has_model:
        draft, facts = _plan_draft(request, request.speculative, target, weights)
    step = request.step or default_step(request.device)
    num_drafts = _num_drafts(request.speculative, facts)
    if num_drafts >= step.tokens:
        raise BadValue(
            f"--speculative-config: num_speculative_tokens {num_drafts} is more than a step holds",
            why=f"it runs a token and its drafts, and has room for {step.tokens}",
            ways_out=(
                WayOut("take larger steps", ("--max-num-batched-tokens", str(num_drafts + 1))),
                WayOut("draft fewer tokens" if step.tokens > 1 else "do without drafts"),
            ),
        )
    beside = None
    if request.device.kind is not DeviceKind.CPU:
        drafts = _draft_counts(request.speculative, num_drafts)
        beside = _workspaces(request, target, forward, step, drafts)
    memory = plan_memory(
        request.memory_bytes,
        target.weights.bytes,
        target.kv,
        draft=None if draft is None else draft.kv,
        draft_weights_bytes=(draft.weights.bytes or 0) if draft else 0,
        workspace_bytes=0 if beside is None else beside.total,
        utilization=request.utilization,
        kv_cache_bytes=request.kv_cache_bytes,
    )
    return Plan(request, target, forward, rotary, draft, facts, memory, beside)


def _select_forward(request: PlanRequest, target: PlannedModel) -> ForwardChoice:
    return select_forward(
        ForwardFacts(
            target.config, target.geometry, target.kv.compute_dtype, request.device,
            request.quantization, request.batch_invariant,
        )
    )  # fmt: skip


def _workspaces(
    request: PlanRequest,
    target: PlannedModel,
    forward: ForwardChoice,
    step: StepSize,
    num_drafts: Sequence[int],
) -> Workspaces:
    longest = request.max_model_len or target.geometry.max_model_len or step.tokens
    geometry, compute = target.geometry, target.kv.compute_dtype
    return workspaces(
        geometry, target.config, compute, step, longest, num_drafts,
        batch_invariant=request.batch_invariant, forward_bytes=forward.extra_bytes,
    )  # fmt: skip


def _draft_counts(asked: SpeculativeConfig | None, most: int) -> list[int]:
    return draft_counts(most, adaptive=asked is not None and asked.adaptive)


def _num_drafts(asked: SpeculativeConfig | None, facts: DraftFacts | None) -> int:
    if asked is None:
        return 0
    if asked.num_speculative_tokens is not None:
        return asked.num_speculative_tokens
    if facts is not None:
        return facts.block_size - 1
    default = asked.method.num_speculative_tokens
    assert default is not None, "a method without a drafter has a default"
    return default


def _plan_draft(
    request: PlanRequest,
    speculative: SpeculativeConfig,
    target: PlannedModel,
    weights: bool,
) -> tuple[PlannedModel, DraftFacts]:
    """The drafter takes the target's road: own request, own checkpoint, own geometry."""
    local, config = _open(speculative.model, speculative.revision, weights=weights)
    geometry, facts = read_draft_geometry(config, target.geometry)
    read_network(config)
    if weights:
        check_files(local.path, config, geometry, facts)
    most = facts.block_size - 1
    wanted = speculative.num_speculative_tokens
    if wanted is not None and wanted > most:
        raise BadValue(
            f"--speculative-config: num_speculative_tokens {wanted} is more than {speculative.model} drafts",
            why=f"its block of {facts.block_size} drafts at most {most} tokens",
            ways_out=(WayOut(f"leave num_speculative_tokens out, or give at most {most}"),),
        )
    asked = request.requests.for_draft()
    if speculative.kv_cache_dtype is not None:
        asked = replace(asked, explicit=(speculative.kv_cache_dtype, *asked.explicit))
    draft = _resolve_model(request, asked, local, config, geometry, Role.DRAFT)
    return draft, facts


def _resolve_model(
    request: PlanRequest,
    asked: KVRequest,
    local: LocalModel,
    config: Mapping[str, Any],
    geometry: ModelGeometry,
    role: Role,
) -> PlannedModel:
    checkpoint = _checkpoint(local, config)
    kv = _resolve_kv(request, asked, checkpoint, local.name, geometry, role)
    quantization = request.quantization if role is Role.TARGET else None
    if quantization is None:
        decoded = are_decoded(config, request.device)
        weights = weight_bytes_of(
            local.path, config, geometry, compute=kv.compute_dtype, decoded=decoded
        )
    else:
        check_quantization(quantization, request.device, kv.compute_dtype)
        weights = quantized_weight_bytes(config, geometry, quantization)
    return PlannedModel(local, config, geometry, checkpoint, weights, kv)


def _checkpoint(local: LocalModel, config: Mapping[str, Any]) -> CheckpointKV:
    """What a model's files say about its KV cache. A GGUF file says nothing, converted yet or not."""
    if local.source in (ModelSource.GGUF, ModelSource.DEMO):
        return CheckpointKV(checked=True)
    return read_checkpoint(local.path, config)


def resolve_again(plan: Plan, asked: KVRequest) -> KVPlan:
    """The target's plan under another request, from facts already read: for "what if" questions."""
    target = plan.target
    return _resolve_kv(
        plan.request, asked, target.checkpoint, target.local.name, target.geometry, Role.TARGET
    )


def _resolve_kv(
    request: PlanRequest,
    asked: KVRequest,
    checkpoint: CheckpointKV,
    model: str,
    geometry: ModelGeometry,
    role: Role,
) -> KVPlan:
    compute, because = resolve_compute_dtype(request.dtype, geometry, request.device)
    only = request.backend if role is Role.TARGET else None

    def need(layer: LayerGeometry, k: KVDtype, v: KVDtype | None) -> Need:
        return Need(
            layer, k, v, compute, request.page_size, request.device, request.batch_invariant
        )

    def serve(layer: LayerGeometry, k: KVDtype, v: KVDtype | None) -> Served:
        if geometry.not_runnable is not None:
            return allow(need(layer, k, v), not_runnable=geometry.not_runnable)
        return select(need(layer, k, v), only=only)

    def works(changed: PlanRequest) -> bool:
        try:
            _resolve_kv(changed, asked, checkpoint, model, geometry, role)
        except ConfigError:
            return False
        return True

    def otherwise(layer: LayerGeometry, k: KVDtype, v: KVDtype | None) -> tuple[WayOut, ...]:
        ways = _other_ways(need(layer, k, v), only, role)
        wide = compute in (ComputeDtype.FLOAT32, ComputeDtype.FLOAT64)
        # A whole resolution: what is stored may follow the model's dtype.
        if only is not None and wide and works(replace(request, dtype=ComputeDtype.BFLOAT16)):
            text = "compute in 16 bits, which this backend does"
            ways = (*ways, WayOut(text, ("--dtype", ComputeDtype.BFLOAT16.value)))
        return ways

    around = Surroundings(
        role=role,
        model=model,
        compute_dtype=compute,
        compute_because=because,
        page_size=request.page_size,
        device_encodings=device_encodings(request.device),
        serve=serve,
        otherwise=otherwise,
    )
    return resolve(asked, checkpoint, geometry, around)


def _other_ways(need: Need, only: BackendInfo | None, role: Role) -> tuple[WayOut, ...]:
    """Pages or a backend with which a layer that nobody serves would be served as it is asked."""
    ways = []
    usual = replace(need, page_size=DEFAULT_PAGE_SIZE)
    if usual != need and select(usual, only=only).is_served:
        ways.append(WayOut("take pages of the usual size", ("--page-size", str(usual.page_size))))
    if only is not None and select(need).is_served:
        ways.append(WayOut("let Kvant choose the backend", ("--attention-backend", "auto")))
    elif role is Role.TARGET and select(need, only=REFERENCE).is_served:
        slow = ("--attention-backend", REFERENCE.name)
        ways.append(WayOut("take the slow backend that can", slow))
    return tuple(ways)


def _open(name: str, revision: str | None, *, weights: bool) -> tuple[LocalModel, dict[str, Any]]:
    local = locate(name, revision=revision, weights=weights)
    return local, read_config(local.path)


def read_config(directory: Path) -> dict[str, Any]:
    """A model directory's config.json; BadCheckpoint where it is missing or no JSON object."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadCheckpoint(
            f"{directory} has no config.json", why="every model in transformers' format has one"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as fault:
        raise BadCheckpoint(f"{path} cannot be read", why=str(fault)) from None
    if not isinstance(config, dict):
        raise BadCheckpoint(f"{path} is no JSON object", why=f"it is a {type(config).__name__}")
    return config


def _memory_warnings(plan: Plan) -> list[str]:
    memory, wanted = plan.memory, plan.request.max_model_len
    if memory.missing_bytes:
        return [
            f"does not fit: {format_size(memory.missing_bytes)} are missing for a first page of KV"
        ]
    if plan.request.kv_cache_bytes is not None and (beyond := memory.beyond_bytes) > 0:
        return [
            "does not fit: weights, workspaces and this KV cache are "
            f"{format_size(beyond)} more than the device has"
        ]
    if (
        wanted is not None
        and memory.capacity_tokens is not None
        and memory.capacity_tokens < wanted
    ):
        lacking = (wanted - memory.capacity_tokens) * plan.page_bytes // plan.request.page_size
        return [
            f"one sequence of --max-model-len {wanted} does not fit: room for "
            f"{memory.capacity_tokens} tokens, {format_size(lacking)} are missing"
        ]
    return []
