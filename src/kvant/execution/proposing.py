"""Loads the requested proposer beside its target."""

from __future__ import annotations

import importlib

from kvant.execution.runner import ModelRunner
from kvant.plan.plan import Plan
from kvant.speculative.base import PlannedDraft, Proposer, Setting


def load_proposer(
    planned: Plan, runner: ModelRunner, *, dummy_weights: bool = False
) -> Proposer | None:
    """Loads the requested proposer and connects it to the runner. Returns None without speculation."""
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
            runner.model,
            runner.pool,
            count,
            planned.limits.max_model_len,
            given,
            asked.options,
            dummy_weights,
        )
    )
    runner.teach(proposer)
    return proposer
