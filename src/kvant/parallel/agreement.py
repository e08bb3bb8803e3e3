"""The plan that every rank makes for itself, and the hash by which they know that it is the same one."""

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
    """A hash of everything in which ranks must agree: formats, pages, backends, forward, files, versions.

    Memory is not part of it, as rank 0 decides how many pages there are.
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
    """Where pages of each group lie."""
    groups = () if plan.layout is None else plan.layout.groups
    return [[group.window, group.page_bytes, group.per_superblock] for group in groups]


def own_plan(config: EngineConfig) -> Plan:
    """The plan of a rank that is not rank 0; memory is not measured."""
    return make_plan(config.plan, read_facts(config.plan, weights=not config.dummy_weights))
