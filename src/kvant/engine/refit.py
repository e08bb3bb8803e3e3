"""Another checkpoint's weights in an engine that stays, as reinforcement learning brings them round by round.

Numbers are copied to where the old ones lie: recorded steps go on reading there, and so does whoever holds a
scale, on the device and on the host. What was cached is of the old weights and is forgotten.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvant.errors import NotServable, RequestError, WayOut
from kvant.plan.planning import Plan, make_plan

if TYPE_CHECKING:
    from kvant.engine.build import BuiltEngine

_SAYS_NOTHING = ("_name_or_path", "transformers_version")


def refit(built: BuiltEngine, model: str) -> BuiltEngine:
    """The same engine, with the plan it has now.

    model: a directory, .gguf file or hub id with the config.json, formats and tensors of the running one.
    RequestError while requests run; NotServable where the weights do not fit here, BadCheckpoint where
    they cannot be read: nothing has changed then.
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
    reason = _why_not(planned, make_plan(request))  # a refusal comes before a download
    if reason is not None:
        raise NotServable(
            f"{model} cannot take the place of {planned.target.kv.model} in a running engine",
            why=reason,
            ways_out=(WayOut("start an engine with it"),),
        )
    found = make_plan(request, weights=True)
    target = found.target
    loaded = load_model(
        target.local.path,
        target.kv,
        target.geometry,
        ForwardChoice(MODULES),  # whose parameters lie as they are; it never runs
        device=torch.device("cpu"),  # beside the pages a GPU has no room for a second model
        rotary_length=found.rotary_length,
    )
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.refit(loaded)
    engine.refit(cache_identity(found))
    return replace(built, planned=found)


def _why_not(running: Plan, found: Plan) -> str | None:
    if running.request.quantization is not None:
        return "weights that were rounded while they were loaded are held in another form"
    if _telling(running.target.config) != _telling(found.target.config):
        return "its config.json is another one"
    if running.target.kv.fingerprint != found.target.kv.fingerprint:
        return "its layers would store keys and values in another way"
    return None


def _telling(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _SAYS_NOTHING}
