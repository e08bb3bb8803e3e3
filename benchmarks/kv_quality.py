"""Simulates ways to store 4 bits and fewer over Kvant's own codecs: which ones pay, and at which length?

    python -m benchmarks.kv_quality --context 1024 --out docs/benchmarks/kv-methods.json

A backend in plain torch keeps each row unrounded and as a codec returns it. A query reads the wide form
of the first `sink` tokens and of the last `recent` tokens before it, and the stored form of the others.
The matrices for error feedback of keys come from other text. Only the second half of each window
is evaluated; KL divergence is from the model's own dtype, in nats. A context of 8,192 tokens needs
0.8 GB for SmolLM2's rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.command import run_command
from kvant.attention.base import AttentionParams, Step
from kvant.cli.output import OutFile, write_json
from kvant.engine.llm import LLM
from kvant.errors import UnknownName
from kvant.kv.codecs import codec_for
from kvant.kv.codecs.rotation import block_length, rotate, unrotate
from kvant.kv.dtype import KVDtype
from kvant.kv.pool import LayerCache
from kvant.kv.spec import KVPlan
from kvant.measure.calibration.feedback import feedback_matrices
from kvant.measure.calibration.seen import SeeingBackend, Seen, nothing_seen
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.own_engine import runner_of
from kvant.measure.quality.kl_statistics import Baseline, Distances, join, statistics_of
from kvant.measure.quality.texts import evaluated, read_text, windows
from kvant.measure.teacher_forced import TextReader
from kvant.models.loaded import LoadedModel

CHUNK = 128
LESSON_WINDOWS = 8
LESSON_CONTEXT = 1024

Stored = Callable[[Tensor, Tensor | None], Tensor]
"""Rounds rows [tokens, heads, head_dim] with a layer's feedback matrices; returns the same shape."""


@dataclass(frozen=True, slots=True)
class Way:
    """bits: of a stored value at head size 64, scales included. sink, recent: tokens read wide."""

    bits: float
    k: Stored
    v: Stored
    sink: int = 0
    recent: int = 0

    def bits_at(self, tokens: int, wide: int) -> float:
        """Returns mean bits per value over a sequence of this length; wide: bits of a wide value."""
        kept = min(tokens, self.sink + self.recent)
        return (kept * wide + (tokens - kept) * self.bits) / tokens


def as_stored(dtype: KVDtype, *, fed: bool = False) -> Stored:
    codec = codec_for(dtype)

    def stored(x: Tensor, matrices: Tensor | None) -> Tensor:
        outside = matrices if fed else None
        return codec.decode(codec.encode(x, outside), outside, x.dtype)

    return stored


def steps(bits: int, *, fed: bool = False) -> Stored:
    """Rounds rotated rows to 2^bits steps, with a scale of 16 bits and a minimum of 16 per row."""

    def stored(x: Tensor, matrices: Tensor | None) -> Tensor:
        y = rotate(x.float())
        low, high = y.aminmax(dim=-1, keepdim=True)
        unit = float(
            block_length(x.shape[-1])
        )  # float16 must hold what an unnormalised rotation gives
        step = (((high - low) / (2**bits - 1) / unit).half().float() * unit).clamp(min=1e-30)
        low = (low / unit).half().float() * unit
        if not fed:
            codes = ((y - low) / step).round().clamp(0, 2**bits - 1)
            return unrotate(codes * step + low)
        assert matrices is not None
        wanted, out = y.clone(), torch.empty_like(y)
        for i in range(y.shape[-1]):
            codes = ((wanted[..., i] - low[..., 0]) / step[..., 0]).round().clamp(0, 2**bits - 1)
            out[..., i] = codes * step[..., 0] + low[..., 0]
            wanted[..., i + 1 :] += (y - out)[..., i, None] * matrices[:, i, i + 1 :]
        return unrotate(out)

    return stored


def ways() -> dict[str, Way]:
    int4 = as_stored(KVDtype.INT4_PER_TOKEN_HEAD)
    int8 = as_stored(KVDtype.INT8_PER_TOKEN_HEAD)
    fed4 = steps(4, fed=True)
    v3, v2, k3 = steps(3), steps(2), steps(3, fed=True)
    turbo = as_stored(KVDtype.TURBOQUANT_K3), as_stored(KVDtype.TURBOQUANT_V3)
    return {
        "int8_per_token_head": Way(8.5, int8, int8),
        "int4_per_token_head": Way(4.5, int4, int4),
        "int4, recent 128": Way(4.5, int4, int4, 0, 128),
        "int4, sink 16, recent 128": Way(4.5, int4, int4, 16, 128),
        "int4, K feedback": Way(4.5, fed4, int4),
        "int4, K feedback, sink 16": Way(4.5, fed4, int4, 16, 0),
        "int4, K feedback, sink 16, recent 128": Way(4.5, fed4, int4, 16, 128),
        "K4 feedback, V3": Way(4.0, fed4, v3),
        "K4 feedback, V3, sink 16, recent 128": Way(4.0, fed4, v3, 16, 128),
        "K4 feedback, V2, sink 16, recent 128": Way(3.5, fed4, v2, 16, 128),
        "K3 feedback, V3, sink 16, recent 128": Way(3.5, k3, v3, 16, 128),
        "K3 feedback, V2, sink 16, recent 128": Way(3.0, k3, v2, 16, 128),
        "turboquant k3/v3": Way(3.375, *turbo),
    }


class Rows:
    """The rows that one layer has stored: wide and narrow, [tokens, heads, head_dim]."""

    def __init__(self) -> None:
        self.wide: list[tuple[Tensor, Tensor]] = []
        self.narrow: list[tuple[Tensor, Tensor]] = []


class Simulated:
    """`AttentionBackend` for one text; it uses no pages."""

    name = "simulated"

    def __init__(self, way: Way, matrices: Mapping[int, Tensor]) -> None:
        self._way = way
        self._matrices = matrices
        self._rows: dict[int, Rows] = {}

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None:
        assert v is not None, "the models compared here keep keys and values"
        index = cache.spec.geometry.index
        rows = self._rows.setdefault(index, Rows())
        matrices = self._matrices.get(index)
        rows.wide.append((k.clone(), v.clone()))
        rows.narrow.append((self._way.k(k, matrices), self._way.v(v, matrices)))

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        rows = self._rows[cache.spec.geometry.index]
        wide_k, wide_v = (torch.cat([pair[i] for pair in rows.wide]) for i in (0, 1))
        narrow_k, narrow_v = (torch.cat([pair[i] for pair in rows.narrow]) for i in (0, 1))
        total, count = len(wide_k), len(q)
        place = torch.arange(total - count, total)[:, None]
        other = torch.arange(total)[None]
        exact = (other < self._way.sink) | (other > place - self._way.recent)
        hidden = other > place
        out = torch.empty(count, q.shape[1], wide_v.shape[2])
        group = q.shape[1] // wide_k.shape[1]
        for head in range(wide_k.shape[1]):
            rows_q = q[:, head * group : (head + 1) * group].transpose(0, 1)
            scores = torch.where(
                exact, rows_q @ wide_k[:, head].T, rows_q @ narrow_k[:, head].T
            ).mul_(params.scale)
            weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            near = (weights * exact) @ wide_v[:, head]
            far = weights.masked_fill_(exact, 0.0) @ narrow_v[:, head]
            out[:, head * group : (head + 1) * group] = (near + far).transpose(0, 1)
        return out


def look(model: LoadedModel, plan: KVPlan, lesson: Tensor, longest: int) -> Seen:
    """Reads windows [n, context] at positions spread over the model's range."""
    from kvant.attention.backends import load_backends

    seen = nothing_seen(plan)
    for number, ids in enumerate(lesson):
        first = (longest - lesson.shape[1]) * number // max(1, len(lesson) - 1)
        seeing = tuple(SeeingBackend(inner, seen) for inner in load_backends(plan))
        reader = TextReader(model, plan, 1, len(ids), backends=seeing, first_position=first)
        for part in ids[None].split(256, 1):
            reader.fill(part)
    return seen


def compare(
    model: LoadedModel, plan: KVPlan, way: Way, matrices: Mapping[int, Tensor], ids: Tensor
) -> Distances:
    """Compares one window [1, context] with the model's own dtype, over the evaluated positions.

    Both read piece by piece, so that no logits of a whole window are kept.
    """
    context = ids.shape[1]
    backends = (Simulated(way, matrices),) * len(plan.layers)
    reader = TextReader(model, plan, 1, context, backends=backends)
    own = TextReader(model, plan, 1, context)
    counted = evaluated(context)
    first, last = counted[0], counted[-1] + 1
    parts = []
    for start in range(0, context, CHUNK):
        piece = ids[:, start : start + CHUNK]
        begin, end = max(0, first - start), min(CHUNK, last - start)
        if begin >= end:
            own.fill(piece)
            reader.fill(piece)
            continue
        following = ids[0, start + begin + 1 : start + end + 1]
        judge = Baseline(own.read(piece)[0, begin:end], following)
        parts.append(judge.distances(reader.read(piece)[0, begin:end]))
    return join(parts)


def kv_quality(
    names: Annotated[list[str] | None, typer.Argument(help="Ways; default: all.")] = None,
    model: Annotated[str, typer.Option("--model")] = "smollm2",
    text: Annotated[Path | None, typer.Option("--text", help="Text to read.")] = None,
    lesson: Annotated[Path | None, typer.Option("--lesson", help="Text to calibrate on.")] = None,
    contexts: Annotated[list[int] | None, typer.Option("--context")] = None,
    count: Annotated[int, typer.Option("--windows", help="Windows of each context.")] = 2,
    out: OutFile = None,
) -> None:
    """Simulate ways to store keys and values."""
    known = ways()
    for name in names or ():
        if name not in known:
            raise UnknownName("way", name, known)
    llm = LLM(
        model, dtype="float32", kv_cache_dtype="model", kv_cache_memory="32MiB", max_model_len=256
    )
    runner = runner_of(llm)
    loaded, plan = runner.model, llm.plan
    longest = llm.planned.target.geometry.max_model_len or LESSON_CONTEXT
    read = read_text(text, llm)
    taught = read_text(lesson, llm)
    # The same text serves both only if the lesson is behind the windows.
    last = windows(taught, llm, LESSON_CONTEXT, len(taught.token_ids))[-LESSON_WINDOWS:]
    matrices = feedback_matrices(look(loaded, plan, last, longest))
    found: list[dict[str, object]] = []
    for context in contexts or (1024,):
        total: dict[str, list[Distances]] = {}
        for ids in windows(read, llm, context, context * count)[:count]:
            for name in names or known:
                one = compare(loaded, plan, known[name], matrices, ids[None])
                total.setdefault(name, []).append(one)
                line = f"{context} {name}: {one.kl.mean():.5f} {one.same_top.mean():.3f}\n"
                sys.stderr.write(line)
        for name, parts in total.items():
            whole = asdict(statistics_of(join(parts)))
            bits = known[name].bits_at(context, 16)
            found.append({"way": name, "context": context, "bits": round(bits, 3), **whole})
    facts = measurement_facts(command_line("python -m benchmarks.kv_quality"), ("torch",))
    body = {"schema": 1, "model": model, "windows": count, "rows": found, **facts}
    if out is not None:
        write_json(out, body)
    else:
        sys.stdout.write(json.dumps(body) + "\n")


if __name__ == "__main__":
    run_command(kv_quality)
