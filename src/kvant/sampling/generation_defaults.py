"""A checkpoint's own sampling defaults: generation_config.json, read the same way everywhere.

A request's own value wins. Next comes the model's file. Last comes `SamplingParams`' default:
temperature 1 and no filters, as in OpenAI's API. `do_sample: false` in the file means temperature 0.
`do_sample: true` or a missing `do_sample` changes nothing, because a file that names a temperature means
it. End-of-sequence tokens of the same file belong to the loaded model (`LoadedModel.eos_token_ids`).
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

from kvant.errors import RequestError
from kvant.sampling.sampling_params import PARAMS, SamplingParams

_FIELDS = tuple(name for name, param in PARAMS.items() if param.from_model)
_log = logging.getLogger(__name__)


def recommended_params(path: Path) -> SamplingParams:
    """Returns the defaults of the model directory `path`.

    Unreadable files and impossible values are skipped with a warning: a default is not a request.
    """
    params = SamplingParams()
    try:
        said = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return params
    except (OSError, ValueError, RecursionError) as fault:
        _log.warning("generation_config.json cannot be read and is ignored: %s", fault)
        return params
    if not isinstance(said, dict):
        _log.warning("generation_config.json is not a JSON object and is ignored")
        return params
    if said.get("do_sample") is False:
        said["temperature"] = 0.0
    for name in _FIELDS:
        if said.get(name) is None:
            continue
        try:
            params = replace(params, **{name: said[name]})
        except RequestError as fault:
            _log.warning("generation_config.json: %s; this value is ignored", fault)
    return params


def recommendation(params: SamplingParams) -> str:
    """Returns a model's defaults as text, such as "temperature 0.6, top_k 20", or an empty string."""
    neutral = SamplingParams()
    return ", ".join(
        f"{name} {getattr(params, name):g}"
        for name in _FIELDS
        if getattr(params, name) != getattr(neutral, name)
    )
