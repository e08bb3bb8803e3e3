"""Joint cost of weight formats and KV formats: KL divergence from the float32 model, on a CPU.

    python -m benchmarks.weight_quality --out docs/benchmarks/cpu-weight-quality.json

The publisher rounded the demo model to Q4_1. These numbers in float32 are the reference, so Q4_1
is exact here. Other 4-bit formats round a second time, so they look worse than they are.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.command import run_command
from benchmarks.peers.gguf_files import PeerWeights, demo_file
from kvant.cli.output import OutFile, write_json
from kvant.engine.llm import LLM
from kvant.kv.dtype import KVDtype
from kvant.kv.names import FormatRequest
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.own_engine import plan_storing, runner_of
from kvant.measure.quality.texts import read_text
from kvant.measure.teacher_forced import text_logits
from kvant.models.demo import DEMO_NAME
from kvant.models.locate import locate

KV_FORMATS = (
    KVDtype.FLOAT32,
    KVDtype.FP8_E4M3,
    KVDtype.INT8_PER_TOKEN_HEAD,
    KVDtype.INT4_PER_TOKEN_HEAD,
)


@dataclass(frozen=True, slots=True)
class Weights:
    """One way to store and multiply weights. model: None for the demo's own file."""

    name: str
    model: PeerWeights | None
    quantization: str | None = None
    activations: str | None = None


WAYS = (
    Weights("Q4_1, as the demo is stored", None),
    Weights("Q4_1, activations int8", None, activations="int8"),
    Weights("Q8_0", PeerWeights.Q8_0),
    Weights("Q8_0, activations int8", PeerWeights.Q8_0, activations="int8"),
    Weights("int8", None, quantization="int8"),
    Weights("int4", None, quantization="int4"),
    Weights("Q4_0", PeerWeights.Q4_0),
    Weights("Q4_0, activations int8", PeerWeights.Q4_0, activations="int8"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """mean_kl: in nats, over positions. same_top: share of positions with the same most likely token."""

    weights: str
    kv: str
    mean_kl: float
    same_top: float


def weight_quality(
    tokens: Annotated[int, typer.Option("--tokens", min=32, help="Length of the text.")] = 512,
    threads: Annotated[int | None, typer.Option("--threads", min=1)] = None,
    out: OutFile = None,
) -> None:
    """Measure every pair of weights and KV format on one text."""
    if threads is not None:
        torch.set_num_threads(threads)
    llm = _open(str(locate(DEMO_NAME).path))
    text = read_text(None, llm)
    ids = text.token_ids[:tokens]
    expected = torch.log_softmax(_logits(llm, KVDtype.FLOAT32, ids), -1)
    del llm
    rows = []
    for row in _measure(expected, ids):
        sys.stdout.write(f"{row.weights:32} {row.kv:22} {row.mean_kl:.5f} {row.same_top:.1%}\n")
        sys.stdout.flush()
        rows.append(row)
    if out is not None:
        facts: dict[str, Any] = {"text": text.name, "sha256": text.sha256, "tokens": len(ids)}
        made = measurement_facts(
            command_line("python -m benchmarks.weight_quality"), ("torch", "transformers", "numba")
        )
        write_json(out, {**made, **facts, "rows": [asdict(row) for row in rows]})


def _measure(expected: Tensor, ids: tuple[int, ...]) -> Iterator[Row]:
    for way in WAYS:
        model = DEMO_NAME if way.model is None else str(demo_file(way.model))
        llm = _open(model, quantization=way.quantization, weight_activations=way.activations)
        for stored in KV_FORMATS:
            found = torch.log_softmax(_logits(llm, stored, ids), -1)
            yield Row(way.name, str(stored), *kl_and_same_top(found, expected))
        del llm
        gc.collect()


def kl_and_same_top(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Returns `Row.mean_kl` and `Row.same_top` of log-probabilities [T, vocab_size]."""
    kl = torch.nn.functional.kl_div(found, expected, reduction="none", log_target=True)
    same = (found.argmax(-1) == expected.argmax(-1)).double().mean()
    return kl.double().sum(-1).mean().item(), same.item()


def _open(model: str, **options: str | None) -> LLM:
    return LLM(
        Path(model) if model != DEMO_NAME else model,
        device="cpu",
        dtype="float32",
        kv_cache_dtype="float32",
        max_num_seqs=1,
        kv_cache_memory="64MiB",
        **options,  # type: ignore[arg-type]
    )


def _logits(llm: LLM, stored: KVDtype, ids: tuple[int, ...]) -> Tensor:
    plan = plan_storing(llm, FormatRequest(stored, stored))
    return text_logits(runner_of(llm).model, plan, ids)


if __name__ == "__main__":
    run_command(weight_quality)
