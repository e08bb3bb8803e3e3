"""The request for a plan, and the plan itself: `kvant plan` prints it and the engine runs it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvant.attention.need import BackendInfo, DeviceFacts, DeviceKind
from kvant.attention.select import rounded_layers, slow_layers
from kvant.errors import ConfigError
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import ModelGeometry
from kvant.kv.groups import (
    LONGEST,
    ArenaLayout,
    lay_out,
    sequences_that_fit,
    superblocks_for,
)
from kvant.kv.memory import (
    SCRATCH_PAGES,
    UTILIZATION,
    MemoryPlan,
    format_size,
    plan_memory,
    size_argument,
)
from kvant.kv.offload.config import OffloadConfig
from kvant.kv.request import NOTHING_ASKED, Requests
from kvant.kv.spec import KVPlan, Role
from kvant.kv.transfer.config import TransferConfig
from kvant.models.directory import as_obstacle
from kvant.models.forward_info import ForwardChoice
from kvant.models.geometry import DraftFacts, MovingRotary
from kvant.models.geometry.deepseek import expanded_latents
from kvant.models.local import LocalModel
from kvant.models.overrides import ConfigOverrides
from kvant.models.quantization import Activations, Quantization
from kvant.models.shape import ShapeSource
from kvant.models.sharding.divided import Division
from kvant.models.sharding.shard import rank_plan
from kvant.models.stored import declared_weights, refuse_rounding
from kvant.models.weight_audit import WeightAudit
from kvant.models.weights import WeightBytes
from kvant.plan.limits import Limits
from kvant.plan.speculative_config import SpeculativeConfig
from kvant.plan.workspaces import Workspaces

DEFAULT_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The user's choices about a plan. Sizes are in bytes; None leaves the choice to the plan.

    overrides: values that replace those of the target's config.json. dtype: the compute dtype. backend: the
    only attention backend that is allowed. page_size: in tokens.
    max_model_len, max_num_seqs, max_num_batched_tokens, prefix_caching: see `Limits`.
    memory_bytes: memory of a device that need not be in this machine. kv_cache_bytes: of all pages.
    state_cache_bytes: of recurrent states kept for the prefix cache. memory_utilization: share of a GPU's
    memory to use. batch_invariant: use only backends that compute every row independently of the rows
    beside it. quantization: how to round the target's weights while loading. activations: how products with
    narrow weights round the activations. tensor_parallel_size: devices that share the model.
    expected_length: the length in tokens for which the plan counts the sequences that fit. offload: tiers of
    memory behind the prefix cache. transfer: engines to give pages to or to take pages from.
    """

    model: str
    device: DeviceFacts
    requests: Requests = NOTHING_ASKED
    revision: str | None = None
    overrides: ConfigOverrides | None = None
    dtype: ComputeDtype | None = None
    backend: BackendInfo | None = None
    page_size: int = DEFAULT_PAGE_SIZE
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefix_caching: bool = True
    memory_bytes: int | None = None
    kv_cache_bytes: int | None = None
    state_cache_bytes: int | None = None
    memory_utilization: float = UTILIZATION
    speculative: SpeculativeConfig | None = None
    batch_invariant: bool = False
    quantization: Quantization | None = None
    activations: Activations | None = None
    tensor_parallel_size: int = 1
    expected_length: int | None = None
    offload: OffloadConfig | None = None
    transfer: TransferConfig | None = None

    @property
    def on_cpu(self) -> bool:
        return self.device.kind is DeviceKind.CPU

    @property
    def utilization(self) -> float:
        """Share of the device's memory to plan with. A CPU ignores --gpu-memory-utilization."""
        return UTILIZATION if self.on_cpu else self.memory_utilization


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """One model of a plan.

    config: its config.json. refusal: why its weights cannot be read here. shape_source: where its
    geometry comes from. narrow: says how the checkpoint's narrow weights are used; None if it has none.
    parameters: names and shapes of its weights, if Kvant cannot list them from its config.
    """

    local: LocalModel
    config: Mapping[str, Any]
    geometry: ModelGeometry
    checkpoint: CheckpointKV
    weights: WeightBytes
    kv: KVPlan
    refusal: ConfigError | None = None
    shape_source: ShapeSource = ShapeSource.CONFIG
    narrow: str | None = None
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class KeptLayers:
    """A group of layers whose pages are released together.

    layers, draft_layers: layers of the target, and of a drafter with pages of its own. window: the newest
    tokens that they keep, None for all. bytes_per_token: on one rank. most_bytes: the most bytes of one
    decoding sequence, None if unbounded. sink: first tokens that are kept too. is_wide: these are wide rows,
    which store the layers' tokens a second time.
    """

    layers: tuple[int, ...]
    draft_layers: tuple[int, ...]
    window: int | None
    bytes_per_token: int
    most_bytes: int | None
    sink: int = 0
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class Tier:
    """Memory for pages that the device has no room for. tokens: its capacity if no pages are shared."""

    name: str
    num_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The frozen result of planning: target, forward, drafter, limits and memory.

    forward: the code that runs the target's layers, and why faster forwards do not. rotary: how the target's
    rotary frequencies are fixed, if transformers would change them with the length.
    total_bytes: the device's memory, None if unknown. kv_cache_bytes: bytes of both models' pages, as
    requested or chosen; None for a share of total_bytes. workspaces: memory of a GPU beside weights and
    pages; None for a CPU, which allocates it during steps. limits.max_model_len: until memory is known, the
    requested length or the longest that the model can address. draft_counts: numbers of drafts for which
    steps are recorded, descending. notes: lines about choices. refusal: why an engine cannot run this plan.
    division: how ranks share the model, None for one device. Bytes of weights, pages, workspaces and memory
    are those of one rank. audit, draft_audit: what every stored tensor of the target and of the drafter
    is for; None without files.
    """

    request: PlanRequest
    target: PlannedModel
    forward: ForwardChoice
    rotary: MovingRotary | None
    draft: PlannedModel | None
    draft_facts: DraftFacts | None
    draft_counts: tuple[int, ...]
    limits: Limits
    total_bytes: int | None
    kv_cache_bytes: int | None
    workspaces: Workspaces | None
    notes: tuple[str, ...] = ()
    refusal: ConfigError | None = None
    division: Division | None = None
    audit: WeightAudit | None = None
    draft_audit: WeightAudit | None = None

    @property
    def num_ranks(self) -> int:
        return self.request.tensor_parallel_size

    @property
    def rank_kv(self) -> KVPlan:
        """The part of the target's KV plan that each rank stores; `target.kv` describes the whole model."""
        return rank_plan(self.target.kv, self.num_ranks)

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts of one sequence in one step; 0 without speculation."""
        return self.draft_counts[0] if self.draft_counts else 0

    @property
    def draft_state_bytes(self) -> int:
        """Bytes of the recurrent states after drafts, until these are verified."""
        return self.limits.draft_states * self.target.kv.bytes_per_sequence

    @property
    def rotary_length(self) -> int | None:
        """The length for which rotary frequencies are fixed; None if they do not depend on the length."""
        return None if self.rotary is None else self.rotary.length

    @property
    def weights_bytes(self) -> int | None:
        """Bytes of the target's and the drafter's weights; None if the target's are unknown."""
        draft = 0 if self.draft is None else self.draft.weights.bytes or 0
        return None if self.target.weights.bytes is None else self.target.weights.bytes + draft

    @property
    def layout(self) -> ArenaLayout | None:
        """How each rank's arena is divided into groups of pages; None if every page holds all layers.

        In a model with recurrent layers every attention layer keeps every token, because a cached prefix may
        end only where a state was kept.
        """
        return self._layout_of(self.target.kv)

    def _layout_of(self, kv: KVPlan) -> ArenaLayout | None:
        draft, states = None if self.draft is None else self.draft.kv, kv.has_states
        layout = lay_out(
            rank_plan(kv, self.num_ranks),
            draft,
            windows=not states,
            longest=self.longest,
            states=states,
        )
        return None if layout.groups[0].window is None and len(layout.groups) == 1 else layout

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of target and drafter, which share page ids.

        With several groups of pages, the bytes of a superblock, the unit of the arena.
        """
        layout = self.layout
        if layout is not None:
            return layout.superblock_bytes
        return self.rank_kv.page_bytes + (0 if self.draft is None else self.draft.kv.page_bytes)

    def bytes_for(self, num_tokens: int) -> int:
        """Returns the bytes of pages of a single sequence of `num_tokens` tokens, including scratch pages."""
        size, layout = self.limits.page_size, self.layout
        if layout is None:
            return (-(-num_tokens // size) + SCRATCH_PAGES) * self.page_bytes
        piece = self.limits.max_num_batched_tokens
        held = [group.most_pages(num_tokens, piece, size) for group in layout.groups]
        count = superblocks_for(held, [group.per_superblock for group in layout.groups])
        return (count + SCRATCH_PAGES) * self.page_bytes

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence: as requested, else what the model can address; None if unknown."""
        return self.request.max_model_len or self.target.geometry.max_model_len

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Reasons, apart from memory, why the plan cannot run."""
        lines = [*self.target.local.obstacles]
        if self.target.refusal is not None:
            lines.append(as_obstacle(self.target.refusal))
        if self.target.geometry.not_runnable:
            lines.append(f"planned, but not runnable yet: {self.target.geometry.not_runnable}")
        if self.draft is not None:
            lines += [f"draft: {line}" for line in self.draft.local.obstacles]
            if self.draft.refusal is not None:
                lines.append(f"draft: {as_obstacle(self.draft.refusal)}")
        return tuple(lines)

    @property
    def can_run(self) -> bool:
        """True if no known obstacle prevents the plan from running."""
        audits = self.audit, self.draft_audit
        is_whole = all(audit is None or audit.refusal is None for audit in audits)
        return is_whole and not self.obstacles and not self._memory_warnings()

    def check_files(self) -> None:
        """Raises BadCheckpoint for the first tensor of target or drafter that is missing or wrong."""
        for audit in (self.audit, self.draft_audit):
            if audit is not None:
                audit.check()

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings for the user; lines about the drafter begin with "draft: "."""
        lines = [*self.obstacles, *self.target.local.notes, *self.target.kv.warnings]
        if self.audit is not None:
            lines += self.audit.faults
        if self.rotary is not None:
            lines.append(self.rotary.because)
        if self.request.on_cpu and self.request.backend is None:
            lines += slow_layers(self.target.kv)
        lines += rounded_layers(self.target.kv)
        expanded = expanded_latents(self.target.config, self.target.geometry.layers)
        if expanded is not None:
            lines.append(expanded)
        if self.draft is not None:
            faults = () if self.draft_audit is None else self.draft_audit.faults
            notes = self.draft.local.notes, self.draft.kv.warnings, faults
            lines += [f"draft: {line}" for lines_of in notes for line in lines_of]
        if self.request.prefix_caching and not self.limits.prefix_caching:
            lines.append(
                "prefix caching is off: the memory of --state-cache-memory holds no state of its "
                "recurrent layers, without which no text can be continued"
            )
        return (*lines, *self._memory_warnings())

    @property
    def memory(self) -> MemoryPlan:
        """How the device's memory is divided."""
        return self.memory_with(self.target.kv)

    def memory_with(self, kv: KVPlan) -> MemoryPlan:
        """Returns how memory would be divided if the target stored `kv`, the KV plan of the whole model."""
        return plan_memory(
            self.total_bytes,
            self.target.weights.bytes,
            rank_plan(kv, self.num_ranks),
            draft=None if self.draft is None else self.draft.kv,
            draft_weights_bytes=(self.draft.weights.bytes or 0) if self.draft else 0,
            workspace_bytes=self.draft_state_bytes
            + (0 if self.workspaces is None else self.workspaces.total),
            utilization=self.request.utilization,
            kv_cache_bytes=self.kv_cache_bytes,
            layout=self._layout_of(kv),
            piece=self.limits.max_num_batched_tokens,
        )

    @property
    def groups(self) -> tuple[KeptLayers, ...]:
        """Groups of layers whose pages are released together; one group if every page holds all layers."""
        kv, layout, size = self.rank_kv, self.layout, self.limits.page_size
        if layout is None:
            of_draft = () if self.draft is None else self.draft.kv.layers
            layers, drafts = (
                tuple(s.geometry.index for s in one if s.k is not None)
                for one in (kv.layers, of_draft)
            )
            if not layers and not drafts:
                return ()
            return (KeptLayers(layers, drafts, None, self.page_bytes // size, None),)
        return tuple(
            KeptLayers(
                tuple(owner.layer for owner in group.pieces if owner.role is Role.TARGET),
                tuple(owner.layer for owner in group.pieces if owner.role is Role.DRAFT),
                group.window,
                group.used_bytes // size,
                None
                if group.window is None
                else group.page_bytes * group.most_pages(LONGEST, 1, size),
                group.sink,
                all(owner.is_wide for owner in group.pieces),
            )
            for group in layout.of_tokens
        )

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers behind the device's pages, the fastest first."""
        asked = self.request.offload
        if asked is None:
            return ()
        parts = [self.rank_kv] if self.draft is None else [self.rank_kv, self.draft.kv]
        each = self.num_ranks * sum(part.bytes_per_token for part in parts)
        found = [("host", asked.host_bytes)]
        if asked.disk is not None:
            found.append((f"disk {asked.disk.path}", asked.disk.num_bytes))
        return tuple(Tier(name, size, size // max(1, each)) for name, size in found)

    @property
    def expected_length(self) -> int:
        """The length in tokens for which `num_sequences` counts how many sequences fit."""
        return self.request.expected_length or self.limits.max_model_len

    @property
    def num_sequences(self) -> int | None:
        """Sequences of `expected_length` tokens whose pages fit at once; None if memory is unknown."""
        memory = self.memory
        if memory.num_pages is None or memory.capacity_tokens is None:
            return None
        if self.layout is None:
            pages = -(-self.expected_length // self.limits.page_size)
            return max(0, memory.num_pages - SCRATCH_PAGES) // pages
        piece = self.limits.max_num_batched_tokens
        return sequences_that_fit(self.layout, memory.num_pages, self.expected_length, piece)

    def _memory_warnings(self) -> list[str]:
        memory, wanted = self.memory, self.request.max_model_len
        if memory.missing_bytes:
            missing = format_size(memory.missing_bytes)
            if self.kv_cache_bytes is not None:
                way = f"--kv-cache-memory {size_argument(self.bytes_for(wanted or 1))}"
            else:
                more = math.ceil(memory.missing_bytes / self.request.utilization) + 1
                needed = (memory.total_bytes or 0) + more
                config = self.target.config
                can_round = declared_weights(config) is None and refuse_rounding(config) is None
                others = " or a smaller model"
                if self.request.quantization is None and can_round:
                    others = ", a smaller model, or narrower weights (--quantization)"
                way = f"--memory {size_argument(needed)}{others}"
            return [f"does not fit: {missing} are missing for a first page of KV; way out: {way}"]
        if self.kv_cache_bytes is not None and (beyond := memory.beyond_bytes) > 0:
            return [
                "does not fit: weights, workspaces and this KV cache are "
                f"{format_size(beyond)} more than the device has; way out: a smaller "
                "--kv-cache-memory, or none, which takes what is left"
            ]
        capacity = memory.capacity_tokens
        if wanted is not None and capacity is not None and capacity < wanted:
            given = (memory.num_pages or 0) * self.page_bytes
            return [
                f"one sequence of --max-model-len {wanted} does not fit: room for {capacity} tokens, "
                f"{format_size(self.bytes_for(wanted) - given)} are missing; "
                f"way out: --max-model-len {capacity}"
            ]
        return []
