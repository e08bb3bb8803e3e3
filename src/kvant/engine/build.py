"""Builds an engine from a configuration. The plan makes all choices; this module assembles the parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvant.engine.offload import check_tiers, make_tiers
from kvant.engine.process import importing, wait_without_spinning
from kvant.engine.text import Tokenizing, open_tokenizer
from kvant.errors import DoesNotFit, NotServable, WayOut
from kvant.kv.pages import CacheIdentity
from kvant.kv.spec import KVPlan
from kvant.models.local import Progress
from kvant.models.pooling import Pooling, choose_pooling
from kvant.models.weight_audit import TensorState, WeightAudit
from kvant.plan.config import EngineConfig, EngineOptions
from kvant.plan.device import torch_device
from kvant.plan.plan import Plan
from kvant.plan.planning import make_plan
from kvant.plan.read_facts import read_facts

if TYPE_CHECKING:
    from kvant.engine.engine import Engine
    from kvant.execution.runner import ModelRunner
    from kvant.execution.speculation import Speculation
    from kvant.kv.checkpoint.facts import CheckpointKV
    from kvant.models.loaded import LoadedModel
    from kvant.speculative.base import Proposer


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that is ready to step, and how it was built.

    planned: the plan that `kvant plan` shows for it. tokenizing: None for a model without tokenizer files.
    notes: lines for the user about choices. warnings: lines about drawbacks, including the plan's warnings.
    pooling: how an embedding engine makes a vector; None for an engine that generates.
    """

    engine: Engine
    planned: Plan
    tokenizing: Tokenizing | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    pooling: Pooling | None = None

    @property
    def kv(self) -> KVPlan:
        return self.planned.target.kv

    @property
    def path(self) -> Path:
        return self.planned.target.local.path


def build_engine(
    config: EngineConfig, *, progress: Progress | None = None, owns_process: bool = False
) -> BuiltEngine:
    """Plans, downloads and loads. Raises ConfigError, before weights are read wherever that is possible.

    progress: called with downloads, conversions and the phases of the start. owns_process: this process is
    for this engine only, so collections of garbage need not search what is imported.
    """
    begin = _phases(progress)
    begin("planning")
    planned = plan_engine(config, progress=progress)
    target, limits = planned.target, planned.limits
    width = target.geometry.hidden_size
    pooling = choose_pooling(config.task, target.local.path, target.config, width)
    if pooling is not None:
        _refuse_to_embed(planned)
    if not config.dummy_weights:
        planned.check_files()
    if planned.request.offload is not None:
        launcher = config.settings.build(EngineOptions).rank_launcher
        check_tiers(planned, planned.request.offload, is_launched=launcher == "torchrun")
    begin("importing torch and transformers")
    # Refusals above answer without torch and transformers, which are imported only now.
    wait_without_spinning()
    # Importing transformers and compiling kernels each take seconds, mostly without the interpreter lock.
    with importing(owns_process=owns_process), ThreadPoolExecutor(1) as imports:
        imported = imports.submit(import_module, "kvant.models.load")
        device = torch_device(planned.request.device)
        begin("verifying kernels")
        _verify(planned)
        imported.result()
        from kvant.engine.engine import Engine
        from kvant.execution.proposing import load_proposer
        from kvant.execution.runner import ModelRunner
        from kvant.kv.scale_audit import ScaleAudit
        from kvant.models.load import load_model
        from kvant.sampling.sampler import max_prompt_logprobs

    assert planned.memory.num_pages is not None
    num_pages = planned.memory.num_pages
    team = None
    if planned.num_ranks > 1:
        from kvant.parallel.team import Team

        team = Team(config, planned, num_pages)  # the other ranks load their weights meanwhile
    begin("loading weights")
    tokenizing = open_tokenizer(target.local.path)
    model = load_model(
        target.local.path,
        target.kv,
        target.geometry,
        planned.forward,
        device=device,
        rotary_length=planned.rotary_length,
        dummy_weights=config.dummy_weights,
        group=None if team is None else team.group,
        on_progress=_share_of("loading weights", planned.memory.weights_bytes, progress),
    )
    notes = (*planned.notes, *_unused(model, target.checkpoint, planned.audit))
    if config.dummy_weights:
        notes = (*notes, "weights are random (--load-format dummy): answers mean nothing")
    ends = model.eos_token_ids or (() if tokenizing is None else tokenizing.eos_token_ids)
    # Obstacles to loading weights do not matter for random weights.
    warnings = tuple(line for line in planned.warnings if line not in planned.obstacles)
    begin("compiling kernels and recording steps")
    with _memory_for(planned):
        runner = (
            ModelRunner(
                model,
                num_pages,
                max_num_seqs=limits.max_num_seqs,
                layout=planned.layout,
                draft_states=limits.draft_states,
                embeds=pooling is not None,
            )
            if team is None
            else team.meet(model)
        )
        proposer = load_proposer(planned, runner, dummy_weights=config.dummy_weights)
        try:
            runner.capture(
                limits.max_num_seqs,
                limits.max_num_batched_tokens,
                limits.max_model_len,
                planned.draft_counts,
                lambda task, done, total: begin(task, done, total, "steps"),
            )
        except NotServable as fault:
            warnings = (*warnings, f"{fault.what} ({fault.why})")
    offload, file_identity = make_tiers(planned, runner, dummy_weights=config.dummy_weights)
    engine = Engine(
        runner,
        replace(
            limits,
            max_prompt_logprobs=max_prompt_logprobs(target.geometry.vocab_size),
        ),
        num_pages,
        layout=planned.layout,
        identity=file_identity or cache_identity(planned),
        vocab_size=target.geometry.vocab_size,
        eos_token_ids=ends,
        tokenizer=None if tokenizing is None else tokenizing.backend,
        seed=config.seed,
        speculation=make_speculation(planned, proposer, runner),
        scale_audit=ScaleAudit(runner.pools),
        compile_limits=config.compile_limits,
        offload=offload,
        embeds=pooling is not None,
    )
    return BuiltEngine(engine, planned, tokenizing, notes, warnings, pooling)


def _refuse_to_embed(planned: Plan) -> None:
    """Raises NotServable if an embedding engine is asked for a drafter or for several devices."""
    if planned.request.speculative is not None:
        raise NotServable(
            "an engine that embeds has no drafter",
            why="it generates no tokens that could be drafted",
            ways_out=(
                WayOut("leave --speculative-config out"),
                WayOut("generate text", ("--task", "generate")),
            ),
        )
    if planned.num_ranks > 1:
        raise NotServable(
            "an engine that embeds runs on one device",
            why="hidden states of divided models are not offered",
            ways_out=(WayOut("use one device", ("--tensor-parallel-size", "1")),),
        )


def _verify(planned: Plan) -> None:
    """Raises NotServable if a kernel that the plan uses is wrong on this device."""
    from kvant.attention.verify.start import verify_plan

    request = planned.request
    for plan in (planned.target, planned.draft):
        if plan is not None:
            verify_plan(plan.kv, request.device, batch_invariant=request.batch_invariant)


def _phases(progress: Progress | None) -> Callable[..., None]:
    """Returns a function that calls `progress`, if there is one. By default the phase has no known length."""

    def begin(task: str, done: int = 0, total: int = 0, unit: str = "bytes") -> None:
        if progress is not None:
            progress(task, done, total, unit)

    return begin


def _share_of(
    task: str, num_bytes: int | None, progress: Progress | None
) -> Callable[[float], None] | None:
    """Returns a function that reports a share (0 to 1) of a task to `progress`, as bytes of `num_bytes`."""
    if progress is None or not num_bytes:
        return None
    return lambda share: progress(task, int(share * num_bytes), num_bytes)


@contextmanager
def _memory_for(planned: Plan) -> Iterator[None]:
    """Reports out-of-memory as DoesNotFit, since other processes may take memory after it was measured."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as fault:
        less = str((planned.memory.kv_bytes or 0) // 2)
        raise DoesNotFit(
            f"{planned.target.local.name} does not fit on this device together with its pages and steps",
            why=str(fault).splitlines()[0],
            ways_out=(
                WayOut("give the pages less", ("--kv-cache-memory", less)),
                WayOut("take smaller steps: --max-num-batched-tokens, --max-num-seqs"),
            ),
        ) from fault


def plan_engine(config: EngineConfig, *, progress: Progress | None = None) -> Plan:
    """Returns the plan that an engine runs. Raises ConfigError for a plan that cannot run here.

    The first plan is made without weights, so that a refusal comes before a download. It is made again only
    if the downloaded or converted weights add facts.
    """
    request = config.plan
    facts = read_facts(request, memory=True)
    plan = _runnable(make_plan(request, facts))
    if not config.dummy_weights:
        complete = read_facts(request, weights=True, known=facts, progress=progress)
        if complete != facts:
            plan = _runnable(make_plan(request, complete))
    if plan.memory.num_pages is None:
        raise DoesNotFit(
            f"the weights of {request.model} have an unknown size",
            why=plan.target.weights.reason,
            ways_out=(WayOut("set the memory of the pages: --kv-cache-memory"),),
        )
    return plan


def _runnable(plan: Plan) -> Plan:
    if plan.refusal is not None:
        raise plan.refusal
    return plan


def _unused(
    model: LoadedModel, checkpoint: CheckpointKV, audit: WeightAudit | None
) -> tuple[str, ...]:
    """Returns notes on tensors that the model does not use. The plan reports scales of the KV cache.

    audit: knows some reasons; None without files.
    """
    known = {scale.name for scale in checkpoint.scales.values()}
    known |= {line.partition(":")[0] for line in checkpoint.ignored}
    reasons: tuple[str, ...] = ()
    if audit is not None:
        known |= {one.name for one in audit.tensors if one.state is TensorState.UNUSED}
        reasons = audit.unused
    found = [name for name in model.unused_tensors if name not in known]
    if not found:
        return reasons
    shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return (*reasons, f"tensors of the checkpoint that this model does not use: {shown}")


def cache_identity(planned: Plan) -> CacheIdentity:
    """Returns the identity of cached pages. Engines with equal identities store equal bytes for a token.

    A page id also names the drafter's page, so the drafter is part of the identity.
    """
    target, draft = planned.target, planned.draft
    parts = [target.kv.fingerprint, target.kv.compute_dtype.value]
    if planned.request.quantization is not None:
        parts.append(planned.request.quantization.value)
    if planned.request.activations is not None:
        parts.append(f"{planned.request.activations.value} activations")
    asked = planned.request.backend
    if asked is not None and asked.rounds_long:
        parts.append(asked.name)
    if planned.num_ranks > 1:
        parts.append(f"{planned.num_ranks} ranks")
    if draft is not None:
        parts.append(f"{draft.local.path.resolve()}:{draft.kv.fingerprint}")
    return CacheIdentity(str(target.local.path.resolve()), target.local.revision, "+".join(parts))


def make_speculation(
    planned: Plan, proposer: Proposer | None, runner: ModelRunner
) -> Speculation | None:
    """Returns the engine's side of speculative decoding; None without a proposer."""
    from kvant.execution.speculation import Speculation
    from kvant.speculative.base import DeviceProposer

    asked = planned.request.speculative
    if asked is None or proposer is None:
        return None
    on_device = runner.is_recorded and isinstance(proposer, DeviceProposer)
    return Speculation(
        proposer,
        planned.num_speculative_tokens,
        planned.target.geometry.vocab_size,
        adaptive=asked.adaptive,
        ways=runner.num_drafts if on_device else None,
        propose=runner.propose,
    )
