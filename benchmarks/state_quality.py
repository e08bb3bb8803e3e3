"""KL divergence of formats of recurrent states, alone and with KV formats, along the recurrence.

    python -m benchmarks.state_quality OUT --text OUT/held-out.txt --context 4096 --out FILE

A prompt rounds a state once per piece, decoding at every token. So each window's tokens are read one at a
time behind a prompt of 64: the state behind token n was rounded n - 64 times. The baseline keeps keys, values
and states in float32. `stretches` are mean KL divergences in nats by position; "prompt" is the same window
read in pieces of at most 256 tokens. `scripts/train_hybrid.py` makes models to measure.

`--rounding` rounds states in int8_per_token_head in another way, which no format has:

    feedback      the error of an element is added to the next one of its row: first-order noise shaping
    stochastic    up with the probability of the fraction, else down

Both take 126 steps on each side, since a code may be one more than the nearest, and the format's bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer

from benchmarks.command import run_command
from kvant.cli.output import OutFile, write_json
from kvant.engine.llm import LLM
from kvant.kv.codecs.int8_per_token_head import RowScaledInt8Codec
from kvant.kv.names import parse_format, parse_one
from kvant.kv.spec import KVPlan
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.own_engine import plan_storing, runner_of
from kvant.measure.quality.compare import Compared, compare_windows
from kvant.measure.quality.kl_statistics import Distances, statistics_of
from kvant.measure.quality.texts import read_text

PAIRS = (
    "float32,bfloat16",
    "float32,fp8_per_token_head",
    "float32,int8_per_token_head",
    "int8_per_token_head,float32",
    "int8_per_token_head,int8_per_token_head",
)
"""Formats of keys and values, and of states."""
PROMPT = 64
EDGES = (PROMPT, 256, 512, 1024, 2048, 3072, 4096, 8192, 16384)
"""Positions between which KL divergences are averaged, up to the window's end."""


class Rounding(StrEnum):
    """A way to round states in int8_per_token_head."""

    NEAREST = "nearest"
    FEEDBACK = "feedback"
    STOCHASTIC = "stochastic"


def state_quality(
    model: Annotated[str, typer.Argument(help="A model with recurrent layers.")],
    text: Annotated[Path, typer.Option("--text", metavar="FILE")],
    pairs: Annotated[
        list[str] | None, typer.Option("--pair", metavar="KV,STATE", help="May be repeated.")
    ] = None,
    context: Annotated[int, typer.Option("--context", min=128)] = 4096,
    count: Annotated[int, typer.Option("--windows", min=1, help="Windows of text.")] = 4,
    rounding: Annotated[Rounding, typer.Option("--rounding")] = Rounding.NEAREST,
    out: OutFile = None,
) -> None:
    """Measure formats of recurrent states at every position of windows of text."""
    llm = LLM(model, dtype="float32", kv_cache_memory="32MiB", max_model_len=256)
    token_ids = read_text(text, llm).token_ids
    starts = np.linspace(0, len(token_ids) - context, count).astype(int).tolist()
    windows = torch.tensor([token_ids[start : start + context] for start in starts])
    wide = parse_format("float32", asked_by="the baseline")
    exact = parse_one("float32", asked_by="the baseline")
    plans: dict[str, KVPlan] = {}
    for pair in pairs or PAIRS:
        stored, _, state = pair.partition(",")
        plans[pair] = plan_storing(
            llm,
            parse_format(stored, asked_by="--pair"),
            state=parse_one(state, asked_by="--pair"),
        )
    with _rounded(rounding):
        compared = compare_windows(
            runner_of(llm).model, plan_storing(llm, wide, state=exact), plans, windows,
            vocab_size=llm.engine.vocab_size, decode=context - 1 - PROMPT, on_progress=_show_tokens(),
        )  # fmt: skip
    rows = [
        {
            "kv": pair.partition(",")[0],
            "state": pair.partition(",")[2],
            **({} if rounding is Rounding.NEAREST else {"rounding": rounding.value}),
            "bytes_per_token": plan.bytes_per_token,
            "bytes_per_sequence": plan.bytes_per_sequence,
            **_figures(compared[pair], context, count),
        }
        for pair, plan in plans.items()
    ]
    body = {
        "schema": 1,
        "model": llm.planned.target.geometry.architecture,
        "training": _training(Path(model)),
        "context": context,
        "windows": count,
        "prompt": PROMPT,
        "noise_floor": _figures(compared[""], context, count),
        "rows": rows,
        **measurement_facts(command_line("python -m benchmarks.state_quality"), ("torch",)),
    }
    if out is not None:
        write_json(out, body)
    else:
        sys.stdout.write(json.dumps(body) + "\n")


def with_feedback(steps: torch.Tensor) -> torch.Tensor:
    """Rounds steps [.., n], each taking over the error of the one before it. Exact: sums of 2^-16 steps."""
    sums = (steps * 65536).round().long().cumsum(-1)
    whole = (sums + 32768) >> 16
    return whole.diff(dim=-1, prepend=torch.zeros_like(whole[..., :1])).to(steps.dtype)


def _stochastic(steps: torch.Tensor) -> torch.Tensor:
    return (steps + torch.rand_like(steps)).floor()


_WAYS: dict[Rounding, Callable[[torch.Tensor], torch.Tensor]] = {
    Rounding.FEEDBACK: with_feedback,
    Rounding.STOCHASTIC: _stochastic,
}


def _rounded(rounding: Rounding) -> Any:
    """Replaces how int8_per_token_head encodes."""
    if rounding is Rounding.NEAREST:
        return nullcontext()
    way = _WAYS[rounding]

    def encode(_: object, x: torch.Tensor, scale: None) -> tuple[torch.Tensor, ...]:
        x = x.to(torch.float32)
        scales = (x.abs().amax(-1, keepdim=True) / 126).clamp_min(2.0**-126)
        return way(x / scales).to(torch.int8).view(torch.uint8), scales

    return patch.object(RowScaledInt8Codec, "encode", encode)


def _figures(one: Compared, context: int, count: int) -> dict[str, Any]:
    """Returns figures of all decoded positions, by stretch, and of the same positions in pieces."""
    decoded = one.decode
    ends = [edge for edge in EDGES if edge < context - 1] + [context - 1]
    kl = decoded.kl.reshape(-1, count)  # [positions, windows]
    found: dict[str, Any] = _brief(decoded)
    found["stretches"] = {
        f"{first}-{end}": float(kl[first - PROMPT : end - PROMPT].mean())
        for first, end in pairwise(ends)
    }
    seen = one.positions >= PROMPT
    if seen.any():
        found["prompt"] = _brief(
            Distances(
                *(getattr(one.prefill, n)[seen] for n in ("kl", "nll", "baseline_nll", "same_top"))
            )
        )
    return found


def _brief(found: Distances) -> dict[str, float]:
    whole = statistics_of(found)
    return {
        "kld_mean": whole.kld_mean,
        "kld_mean_error": whole.kld_mean_error,
        "kld_p99": whole.kld_p99,
        "same_top": whole.same_top,
        "ppl": whole.ppl,
        "ppl_ratio": whole.ppl_ratio,
    }


def _training(directory: Path) -> Any:
    """Returns what scripts/train_hybrid.py wrote beside the model; None for other models."""
    path = directory / "training.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _show_tokens() -> Any:
    done = 0

    def show(tokens: int) -> None:
        nonlocal done
        done += tokens
        sys.stderr.write(f"\r{done:,} tokens")

    return show


if __name__ == "__main__":
    run_command(state_quality)
