"""How a checkpoint wants its tokens chosen where nobody says: generation_config.json, for every surface.

What a request says holds; what it does not say is as the model's file has it; what neither says is
`SamplingParams`' own: temperature 1 and no filters, as in OpenAI's API. `do_sample` false is the file's
way of writing temperature 0; true or missing, it changes nothing: transformers would read values without
it as greedy, but whoever writes a temperature means it. End-of-sequence tokens, which the file names too,
are the loaded model's (`LoadedModel.eos_token_ids`).
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

from kvant.errors import RequestError
from kvant.sampling.sampling_params import SamplingParams

_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_log = logging.getLogger(__name__)


def recommended_params(path: Path) -> SamplingParams:
    """Of the model directory `path`, for requests that say nothing.

    A recommendation is nobody's request: what cannot be read, or cannot be, is left out with a warning.
    """
    params = SamplingParams()
    try:
        said = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return params
    except (OSError, ValueError, RecursionError) as fault:
        _log.warning("generation_config.json cannot be read and is left out: %s", fault)
        return params
    if not isinstance(said, dict):
        _log.warning("generation_config.json is no JSON object and is left out")
        return params
    if said.get("do_sample") is False:
        said["temperature"] = 0.0
    for name in _FIELDS:
        if said.get(name) is None:
            continue
        try:
            params = replace(params, **{name: said[name]})
        except RequestError as fault:
            _log.warning("generation_config.json: %s; it is left out", fault)
    return params


def recommendation(params: SamplingParams) -> str:
    """What a model recommends, for people: "temperature 0.6, top_k 20"; empty where it says nothing."""
    neutral = SamplingParams()
    return ", ".join(
        f"{name} {getattr(params, name):g}"
        for name in _FIELDS
        if getattr(params, name) != getattr(neutral, name)
    )
