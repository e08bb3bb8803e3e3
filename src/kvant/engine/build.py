"""The assembly: from a configuration to an engine that is ready to step. Nothing is decided here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvant.attention.need import LONG_STRIDE, DeviceKind
from kvant.engine.threads import wait_without_spinning
from kvant.engine.tokenizing import Tokenizing, open_tokenizer
from kvant.errors import DoesNotFit, NotServable, WayOut
from kvant.kv.pages import CacheIdentity
from kvant.kv.spec import KVPlan
from kvant.models.local import Progress
from kvant.models.locate import locate
from kvant.plan.budget import choose_kv_bytes, choose_max_model_len
from kvant.plan.config import EngineConfig
from kvant.plan.device import free_bytes, torch_device, total_bytes
from kvant.plan.limits import Limits
from kvant.plan.planning import Plan, PlanRequest, make_plan

if TYPE_CHECKING:
    from kvant.engine.engine import Engine
    from kvant.execution.runner import ModelRunner
    from kvant.execution.speculation import Speculation
    from kvant.kv.checkpoint.facts import CheckpointKV
    from kvant.models.loaded import LoadedModel
    from kvant.speculative.base import Proposer


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """engine: ready to step. planned: what `kvant plan` would show for it. tokenizing: None for a model
    without tokenizer files. notes: lines for the user about what was chosen. warnings: about what is not
    as one would wish, those of the plan among them.
    """

    engine: Engine
    planned: Plan
    tokenizing: Tokenizing | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def kv(self) -> KVPlan:
        return self.planned.target.kv

    @property
    def path(self) -> Path:
        return self.planned.target.local.path


def build_engine(config: EngineConfig, *, progress: Progress | None = None) -> BuiltEngine:
    """Plan, check the memory, fetch, load. Everything that can be refused is, before weights are read.

    progress: told about downloads and conversions.
    """
    planned, max_model_len, notes = plan_engine(config, progress=progress)
    # Only now torch and transformers are needed: refusals above answer without them.
    wait_without_spinning()
    from kvant.attention.verify.start import verify_plan
    from kvant.engine.engine import Engine
    from kvant.execution.runner import ModelRunner
    from kvant.execution.sampler import max_prompt_logprobs
    from kvant.kv.scale_audit import ScaleAudit
    from kvant.models.load import load_model

    target = planned.target
    device = torch_device(planned.request.device)
    for plan in (target, planned.draft):
        if plan is not None:
            verify_plan(
                plan.kv, planned.request.device, batch_invariant=planned.request.batch_invariant
            )
    tokenizing = open_tokenizer(target.local.path)
    model = load_model(
        target.local.path,
        target.kv,
        target.geometry,
        planned.forward,
        device=device,
        rotary_length=planned.rotary_length,
        dummy_weights=config.dummy_weights,
    )
    notes = (*notes, *_unused(model, target.checkpoint))
    ends = model.eos_token_ids or (() if tokenizing is None else tokenizing.eos_token_ids)
    assert planned.memory.num_pages is not None
    num_pages = planned.memory.num_pages
    # Random weights are made also where there are none to load.
    warnings = tuple(line for line in planned.warnings if line not in planned.obstacles)
    with _memory_for(planned):
        runner = ModelRunner(model, num_pages)
        proposer = load_proposer(planned, runner, max_model_len, dummy_weights=config.dummy_weights)
        try:
            runner.capture(
                config.max_num_seqs,
                config.max_num_batched_tokens,
                max_model_len,
                planned.draft_counts,
            )
        except NotServable as fault:
            warnings = (*warnings, f"{fault.what} ({fault.why})")
    engine = Engine(
        runner,
        Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            page_size=target.kv.page_size,
            prefix_caching=config.prefix_caching,
            pages_ahead=runner.looks_ahead,
            prompt_stride=1 if device.type == "cpu" else LONG_STRIDE,
            max_prompt_logprobs=max_prompt_logprobs(target.geometry.vocab_size),
        ),
        num_pages,
        identity=cache_identity(planned),
        vocab_size=target.geometry.vocab_size,
        eos_token_ids=ends,
        tokenizer=None if tokenizing is None else tokenizing.backend,
        seed=config.seed,
        speculation=make_speculation(planned, proposer, runner),
        scale_audit=ScaleAudit(runner.pools),
        compile_limits=config.compile_limits,
    )
    return BuiltEngine(engine, planned, tokenizing, notes, warnings)


@contextmanager
def _memory_for(planned: Plan) -> Iterator[None]:
    """DoesNotFit where what was planned is not there: others have taken memory since it was looked at."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as fault:
        less = str((planned.memory.kv_bytes or 0) // 2)
        raise DoesNotFit(
            f"{planned.target.local.name} does not fit on this device beside its pages and steps",
            why=str(fault).splitlines()[0],
            ways_out=(
                WayOut("give the pages less", ("--kv-cache-memory", less)),
                WayOut("take smaller steps: --max-num-batched-tokens, --max-num-seqs"),
            ),
        ) from fault


def plan_engine(
    config: EngineConfig, *, progress: Progress | None = None
) -> tuple[Plan, int, tuple[str, ...]]:
    """The plan an engine runs, its max_model_len, and notes for the user.

    First without weights, so that a refusal comes before a download, then with them.
    """
    first = make_plan(config.plan)
    if first.target.geometry.not_runnable is not None:
        raise NotServable(
            f"{config.plan.model} can be planned, but not run yet",
            why=first.target.geometry.not_runnable,
        )
    if first.target.refusal is not None and not config.dummy_weights:
        raise first.target.refusal
    request = _with_budget(config, first)
    choose_max_model_len(make_plan(request))
    weights = not config.dummy_weights
    locate(request.model, revision=request.revision, weights=weights, progress=progress)
    drafts = request.speculative
    if drafts is not None and drafts.method.has_model:
        locate(drafts.model, revision=drafts.revision, weights=weights, progress=progress)
    if (
        first.weights_bytes is None
    ):  # the config does not tell, but the files do, which are here now
        request = _with_budget(config, make_plan(config.plan, weights=weights))
    planned = make_plan(request, weights=weights)
    max_model_len, note = choose_max_model_len(planned)
    notes = [] if note is None else [note]
    if config.dummy_weights:
        notes.append("weights are random (--load-format dummy): answers mean nothing")
    return planned, max_model_len, tuple(notes)


def _with_budget(config: EngineConfig, plan: Plan) -> PlanRequest:
    """What was asked, with the bytes that pages get beside this plan's weights."""
    device = config.plan.device
    total = total_bytes(device)
    budget = choose_kv_bytes(plan, free_bytes(device), total, config.max_num_seqs)
    memory = config.plan.memory_bytes if device.kind is DeviceKind.CPU else total
    return replace(config.plan, kv_cache_bytes=budget, memory_bytes=memory)


def _unused(model: LoadedModel, checkpoint: CheckpointKV) -> tuple[str, ...]:
    """A note on tensors that are in the files and not in the model; the plan speaks of scales of KV."""
    of_kv = {scale.name for scale in checkpoint.scales.values()}
    of_kv |= {line.partition(":")[0] for line in checkpoint.ignored}
    found = [name for name in model.unused_tensors if name not in of_kv]
    if not found:
        return ()
    shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return (f"tensors of the checkpoint that this model does not use: {shown}",)


def cache_identity(planned: Plan) -> CacheIdentity:
    """Of pages that hold what this model's weights, in this arithmetic, make of their tokens.

    A drafter's pages lie under the same ids, and are found with them.
    """
    target, draft = planned.target, planned.draft
    parts = [target.kv.fingerprint, target.kv.compute_dtype.value]
    if planned.request.quantization is not None:
        parts.append(planned.request.quantization.value)
    asked = planned.request.backend
    if asked is not None and asked.rounds_long:
        parts.append(asked.name)
    if draft is not None:
        parts.append(f"{draft.local.path.resolve()}:{draft.kv.fingerprint}")
    return CacheIdentity(str(target.local.path.resolve()), target.local.revision, "+".join(parts))


def load_proposer(
    planned: Plan, runner: ModelRunner, max_model_len: int, *, dummy_weights: bool = False
) -> Proposer | None:
    """The proposer that was asked for, loaded beside its target, which it will learn from."""
    from kvant.speculative.base import PlannedDraft, Setting

    asked, draft = planned.request.speculative, planned.draft
    if asked is None:
        return None
    given = None
    if draft is not None:
        assert planned.draft_facts is not None
        given = PlannedDraft(
            draft.local.path, draft.config, draft.geometry, planned.draft_facts, draft.kv
        )
    count = planned.num_speculative_tokens
    module = importlib.import_module(asked.method.module)
    proposer: Proposer = module.build(
        Setting(
            runner.model, runner.pool, count, max_model_len, given, asked.options, dummy_weights
        )
    )
    runner.teach(proposer)
    return proposer


def make_speculation(
    planned: Plan, proposer: Proposer | None, runner: ModelRunner
) -> Speculation | None:
    """The engine's half of it; None without a proposer."""
    from kvant.execution.speculation import Speculation
    from kvant.speculative.base import DeviceProposer

    asked = planned.request.speculative
    if asked is None or proposer is None:
        return None
    on_device = runner.looks_ahead and isinstance(proposer, DeviceProposer)
    return Speculation(
        proposer,
        planned.num_speculative_tokens,
        planned.target.geometry.vocab_size,
        adaptive=asked.adaptive,
        ways=runner.recorded if on_device else None,
    )
