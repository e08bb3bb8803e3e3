"""`kvant plan --format json`: schema 1, documented in docs/plan-json.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvant.kv.format import Side
from kvant.kv.spec import Choice, LayerSpec
from kvant.models.sharding.divided import Division
from kvant.models.weight_audit import WeightAudit
from kvant.plan.plan import Plan, PlannedModel

SCHEMA = 1


def plan_json(plan: Plan, *, tensors: bool = False) -> dict[str, Any]:
    """Returns the whole plan as JSON values. The order of keys is part of the schema.

    tensors: also list every stored tensor of target and drafter.
    """
    memory = plan.memory
    return {
        "schema": SCHEMA,
        "model": plan.target.local.name,
        "fingerprint": plan.target.kv.fingerprint,
        "dtype": plan.target.kv.compute_dtype.value,
        "dtype_because": plan.target.kv.compute_because,
        "page_size": plan.target.kv.page_size,
        "batch_invariant": plan.request.batch_invariant,
        "weight_activations": None
        if plan.forward.activations is None
        else plan.forward.activations.value,
        "quantization": None
        if plan.request.quantization is None
        else plan.request.quantization.value,
        "tensor_parallel": None if plan.division is None else _division(plan, plan.division),
        "forward": {
            "name": plan.forward.name,
            "rejected": [{"forward": r.forward, "reason": r.reason} for r in plan.forward.refused],
        },
        "rotary": None if plan.rotary is None else asdict(plan.rotary),
        "geometry_source": plan.target.shape_source.value,
        "weights": None if plan.audit is None else _weights(plan.audit, tensors=tensors),
        "target": _model(plan.target),
        "draft": None if plan.draft is None else _draft(plan, plan.draft, tensors=tensors),
        "memory": {
            "total_bytes": memory.total_bytes,
            "weights_bytes": memory.weights_bytes,
            "weights_source": None
            if plan.target.weights.source is None
            else plan.target.weights.source.value,
            "reserve_bytes": memory.reserve_bytes,
            "workspaces": None if plan.workspaces is None else asdict(plan.workspaces),
            "workspace_bytes": memory.workspace_bytes,
            "draft_bytes": memory.draft_bytes,
            "kv_bytes": memory.kv_bytes,
            "capacity_tokens": memory.capacity_tokens,
            "expected_length": plan.expected_length,
            "num_sequences": plan.num_sequences,
            "groups": _groups(plan),
            "tiers": [asdict(tier) for tier in plan.tiers],
        },
        "warnings": list(plan.warnings),
    }


def _weights(audit: WeightAudit, *, tensors: bool) -> dict[str, Any]:
    """Returns what the stored tensors are for, as JSON values."""
    found: dict[str, Any] = {
        "groups": [
            {
                "format": group.format,
                "tensors": dict(group.roles),
                "state": group.state.value,
                "because": group.because,
                "first": group.first,
            }
            for group in audit.groups
        ]
    }
    if audit.scales is not None:
        found["scales"] = asdict(audit.scales)
    if tensors:
        found["tensors"] = [
            {
                "tensor": one.name,
                "format": one.format,
                "role": one.role,
                "dtype": one.dtype,
                "shape": None if one.shape is None else list(one.shape),
                "state": one.state.value,
                "because": one.because,
            }
            for one in audit.tensors
        ]
    return found


def _groups(plan: Plan) -> list[dict[str, Any]]:
    """Returns the groups of layers whose pages are released together, as JSON values."""
    return [
        {
            "layers": list(group.layers),
            "draft_layers": list(group.draft_layers),
            "window": group.window,
            "bytes_per_token": group.bytes_per_token,
            "most_bytes_per_sequence": group.most_bytes,
            **({"sink": group.sink, "wide_rows": True} if group.is_wide else {}),
        }
        for group in plan.groups
    ]


def _division(plan: Plan, division: Division) -> dict[str, Any]:
    return {
        "size": division.size,
        "whole_weights_bytes": division.whole_bytes,
        "bytes_per_token_of_rank": plan.rank_kv.bytes_per_token,
        "replicated": list(division.replicated),
    }


def _model(model: PlannedModel) -> dict[str, Any]:
    return {
        "layers": [_layer(layer) for layer in model.kv.layers],
        "bytes_per_token": model.kv.bytes_per_token,
        "bytes_per_token_16bit": model.kv.bytes_per_token_16bit,
        "bytes_per_sequence": model.kv.bytes_per_sequence,
    }


def _draft(plan: Plan, draft: PlannedModel, *, tensors: bool) -> dict[str, Any]:
    facts = plan.draft_facts
    assert facts is not None
    return {
        "model": draft.local.name,
        "fingerprint": draft.kv.fingerprint,
        "dtype": draft.kv.compute_dtype.value,
        "block_size": facts.block_size,
        "weights": None
        if plan.draft_audit is None
        else _weights(plan.draft_audit, tensors=tensors),
        **_model(draft),
    }


def _layer(layer: LayerSpec) -> dict[str, Any]:
    g = layer.geometry
    body: dict[str, Any] = {
        "layer": g.index,
        "name": g.name,
        "attention": g.attention.value,
        "causal": g.causal,
        "window": g.window,
        "kv_heads": g.num_kv_heads,
        "head_dim_k": g.head_dim_k,
        "head_dim_v": g.head_dim_v,
        "k": _choice(layer.k),
        "v": _choice(layer.v),
        "bytes_per_token": layer.bytes_per_token,
        "backend": layer.backend,
        "rejected": [{"backend": r.backend, "reason": r.reason} for r in layer.rejected],
    }
    if layer.states:
        body["states"] = [
            {
                "kind": state.geometry.kind.value,
                "shape": list(state.geometry.shape),
                "bytes_per_sequence": state.bytes_per_sequence,
                **(_choice(state.choice) or {}),
            }
            for state in layer.states
        ]
    if layer.wide is not None:
        body["wide"] = {
            "sink": layer.wide.sink,
            "recent": layer.wide.recent,
            **{
                side.value: None if choice is None else choice.dtype.format.name
                for side, choice in ((Side.K, layer.wide.k), (Side.V, layer.wide.v))
            },
            "because": layer.wide.because,
        }
    if g.shared_with is not None:
        body["shared_with"] = g.shared_with
    return body


def _choice(choice: Choice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    scale = choice.scale
    return {
        "format": choice.dtype.format.name,
        "source": choice.source.value,
        "because": choice.because,
        "considered": list(choice.considered),
        "scale": {
            "state": scale.state.value,
            "tensor": None if scale.tensor is None else scale.tensor.name,
            "because": scale.because,
        },
    }
