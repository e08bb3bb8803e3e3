"""Engines for measurements: loaded weights over separate pages in any format."""

from __future__ import annotations

from dataclasses import replace

from kvant.attention.need import BackendInfo
from kvant.engine.engine import Engine
from kvant.engine.llm import LLM
from kvant.execution.recorder import CudaRecorder, Recorder
from kvant.execution.runner import ModelRunner, Runner
from kvant.kv.geometry import StateKind
from kvant.kv.names import FormatRequest, Request
from kvant.kv.pages import SCRATCH, CacheIdentity
from kvant.kv.request import Asked, AskedState, AskedWide, KVRequest
from kvant.kv.spec import KVPlan
from kvant.plan.limits import Limits
from kvant.plan.resolution import resolve_again

_STEP_TOKENS = 2048


def plan_storing(
    llm: LLM,
    stored: FormatRequest,
    backend: BackendInfo | None = None,
    wide: AskedWide | None = None,
    state: Request | None = None,
) -> KVPlan:
    """Returns the plan of `llm`'s model with K and V stored as asked.

    backend: None for the plan's backends. wide: rows that are stored a second time in the model dtype.
    state: format of recurrent states, None for the one that they have without options.
    """
    asked = Asked(stored, f"KV format {stored}")
    planned = llm.planned
    if backend is not None:
        planned = replace(planned, request=replace(planned.request, backend=backend))
    states: tuple[AskedState, ...] = ()
    if state is not None:
        states = (AskedState(StateKind.RECURRENT, state, f"state format {state}"),)
    return resolve_again(planned, KVRequest(explicit=(asked,), wide=wide, states=states))


def runner_of(llm: LLM) -> ModelRunner:
    """Returns the runner of a model that runs in this process."""
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    return runner


def recorder_like(runner: ModelRunner) -> Recorder | None:
    """Returns a recorder if the steps of `runner` are recorded, else None, as on a CPU."""
    return CudaRecorder(runner.device) if runner.is_recorded else None


def runner_storing(
    llm: LLM, plan: KVPlan, num_pages: int, *, num_seqs: int, max_model_len: int
) -> ModelRunner:
    """Returns a runner of the weights of `llm` over `num_pages` pages of `plan`.

    It replays recorded decode steps if the runner of `llm` does.
    """
    inner = runner_of(llm)
    runner = ModelRunner(inner.model, num_pages, plan, max_num_seqs=num_seqs)
    recorder = recorder_like(inner)
    if recorder is not None:
        runner.record(recorder, num_seqs, 0, max_model_len)
    return runner


def engine_over(
    llm: LLM,
    runner: Runner,
    plan: KVPlan,
    num_pages: int,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    prefix_caching: bool = False,
    answers: bool = False,
) -> Engine:
    """Builds an engine that steps `runner`, whose pool has `num_pages` pages of `plan`.

    answers: produce text and stop at ends of sequence, as the engine of `llm` does.
    """
    own = llm.engine
    return Engine(
        runner,
        Limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            page_size=plan.page_size,
            prefix_caching=prefix_caching,
        ),
        num_pages,
        identity=CacheIdentity(plan.model, None, plan.fingerprint),
        vocab_size=own.vocab_size,
        eos_token_ids=sorted(own.eos_token_ids) if answers else (),
        tokenizer=own.tokenizer if answers else None,
    )


def engine_storing(llm: LLM, plan: KVPlan, *, num_seqs: int, max_model_len: int) -> Engine:
    """Builds an engine over the weights of `llm`, with its own pool for `num_seqs` sequences of `plan`.

    max_model_len: tokens per sequence, rounded up to whole pages. The engine has no prefix cache.
    """
    pages = -(-max_model_len // plan.page_size)
    num_pages = SCRATCH + 1 + num_seqs * pages
    longest = pages * plan.page_size
    return engine_over(
        llm,
        runner_storing(llm, plan, num_pages, num_seqs=num_seqs, max_model_len=longest),
        plan,
        num_pages,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=_STEP_TOKENS,
        max_model_len=longest,
    )
