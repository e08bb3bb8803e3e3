"""Lets every rank make its own plan, and check by a hash that it equals rank 0's plan."""

from __future__ import annotations

import hashlib
import json

import torch
import transformers

from kvant import __version__
from kvant.plan.config import EngineConfig
from kvant.plan.plan import Plan
from kvant.plan.planning import make_plan
from kvant.plan.read_facts import read_facts


def plan_fingerprint(plan: Plan) -> str:
    """Returns a hash of everything in which ranks must agree: formats, pages, backends, files, versions.

    It excludes memory, because rank 0 chooses the number of pages for all ranks.
    """
    target, request = plan.target, plan.request
    facts = [
        [__version__, transformers.__version__, torch.__version__],
        target.kv.fingerprint,
        plan.rank_kv.fingerprint,
        [layer.backend for layer in target.kv.layers],
        plan.forward.name,
        plan.rotary_length,
        _cut(plan),
        None if plan.draft is None else plan.draft.kv.fingerprint,
        [target.local.revision, target.weights.bytes],
        [request.tensor_parallel_size, request.batch_invariant, list(plan.draft_counts)],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _cut(plan: Plan) -> list[list[int | None]]:
    """Returns how the arena is divided: window, page bytes and pages per superblock of each group."""
    groups = () if plan.layout is None else plan.layout.groups
    return [[group.window, group.page_bytes, group.per_superblock] for group in groups]


def own_plan(config: EngineConfig) -> Plan:
    """Returns the plan of a rank other than rank 0, without measuring memory."""
    return make_plan(config.plan, read_facts(config.plan, weights=not config.dummy_weights))
