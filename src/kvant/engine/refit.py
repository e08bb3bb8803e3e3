"""Replaces the weights of a running engine, as reinforcement learning does after every round.

New values are copied over the old ones in place, because CUDA graphs and other holders keep the tensors'
addresses. Cached pages were computed with the old weights and are dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvant.errors import NotServable, RequestError, WayOut
from kvant.plan.plan import Plan
from kvant.plan.planning import make_plan
from kvant.plan.read_facts import read_facts

if TYPE_CHECKING:
    from kvant.engine.build import BuiltEngine

_IRRELEVANT = ("_name_or_path", "transformers_version")


def refit(built: BuiltEngine, model: str) -> BuiltEngine:
    """Loads the weights of `model` into the engine. Returns the engine with its new plan.

    model: a directory, .gguf file or hub id with the same config.json, formats and tensors as the running
    one. Raises RequestError while requests run, NotServable for weights of another shape or format, and
    BadCheckpoint for files that cannot be read. After an error the engine is unchanged.
    """
    import torch

    from kvant.engine.build import cache_identity
    from kvant.execution.runner import ModelRunner
    from kvant.models.forward_info import ForwardChoice
    from kvant.models.load import load_model
    from kvant.models.modules.info import INFO as MODULES

    engine, planned = built.engine, built.planned
    if engine.has_work:
        raise RequestError("weights cannot change while requests run: let them end, or cancel them")
    request = replace(planned.request, model=model, revision=None)
    facts = read_facts(request)
    reason = _why_not(planned, make_plan(request, facts))  # refuse before a download
    if reason is not None:
        raise NotServable(
            f"{model} cannot take the place of {planned.target.kv.model} in a running engine",
            why=reason,
            ways_out=(WayOut("start an engine with it"),),
        )
    found = replace(
        make_plan(request, read_facts(request, weights=True, known=facts)),
        limits=planned.limits,
        total_bytes=planned.total_bytes,
        kv_cache_bytes=planned.kv_cache_bytes,
    )
    found.check_files()
    target = found.target
    # If the forward keeps weights in its own form, load them in that form too.
    own = found.forward if found.forward.rounds_itself else None
    loaded = load_model(
        target.local.path,
        target.kv,
        target.geometry,
        # This one keeps the parameters' layout; it never runs.
        own or ForwardChoice(MODULES, stored=found.forward.stored),
        device=torch.device("cpu"),  # a GPU has no room for a second model beside the pages
        rotary_length=found.rotary_length,
    )
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.refit(loaded)
    engine.refit(cache_identity(found))
    return replace(built, planned=found)


def _why_not(running: Plan, found: Plan) -> str | None:
    if running.num_ranks > 1:
        return "weights that several ranks share do not change in a running engine"
    if running.request.offload is not None and running.request.offload.disk is not None:
        return "files of --kv-offload hold pages of the weights that the engine began with"
    if running.request.quantization is not None:
        return "weights that were rounded while they were loaded are held in another form"
    if _relevant(running.target.config) != _relevant(found.target.config):
        return "its config.json is another one"
    if running.target.kv.fingerprint != found.target.kv.fingerprint:
        return "its layers would store keys and values in another way"
    return None


def _relevant(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _IRRELEVANT}
