"""How a checkpoint recommends its tokens to be chosen: generation_config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvant.engine.sampling_params import SamplingParams
from kvant.errors import BadCheckpoint, RequestError


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What stands in for parameters that nobody gave; greedy where the checkpoint says nothing.

    because: where this comes from, in one phrase.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    because: str = "the model recommends nothing: greedy"


def read_defaults(path: Path) -> SamplingDefaults:
    """Of the model directory `path`. BadCheckpoint if the file cannot be read or makes no sense."""
    file = path / "generation_config.json"
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return SamplingDefaults()
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as fault:
        raise BadCheckpoint(f"{file} cannot be read", why=str(fault)) from None
    if not isinstance(said, dict):
        raise BadCheckpoint(f"{file} is no JSON object", why=f"it is a {type(said).__name__}")
    if said.get("do_sample") is not True:
        return SamplingDefaults()

    def of(name: str, default: float) -> float:
        return default if said.get(name) is None else said[name]

    # transformers samples at 1.0 from the 50 likeliest where do_sample stands alone.
    temperature, top_k = of("temperature", 1.0), of("top_k", 50)
    top_p, min_p = of("top_p", 1.0), of("min_p", 0.0)
    try:
        checked = SamplingParams(
            temperature=temperature,
            top_k=int(top_k),
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=of("repetition_penalty", 1.0),
        )
    except (RequestError, TypeError, ValueError) as fault:
        raise BadCheckpoint(f"{file} recommends what cannot be", why=str(fault)) from None
    return SamplingDefaults(
        checked.temperature,
        checked.top_k,
        checked.top_p,
        checked.min_p,
        checked.repetition_penalty,
        "generation_config.json",
    )
