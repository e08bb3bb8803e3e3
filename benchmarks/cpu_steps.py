"""Kvant's own whole steps on a CPU: weight formats at a short context, KV formats at a long one, and
Python's share of a step.

At a long context the pages are copies of one prompt's pages: see `benchmarks.peers.filled`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine_timing import Case, Timing, time_engine
from benchmarks.json_lines import read_texts
from benchmarks.peers.filled import engine_with
from kvant.engine.llm import LLM
from kvant.kv.dtype import KVDtype
from kvant.kv.names import FormatRequest
from kvant.measure.own_engine import runner_of
from kvant.measure.teacher_forced import text_logits
from kvant.models.demo import DEMO_NAME
from kvant.models.quantization import Quantization

SHORT = (Case(True, 1, 128), Case(True, 8, 128))
PREFILL = Case(False, 1, 2048)
LONG = (Case(True, 1, 4096), Case(True, 8, 4096))
KV_FORMATS = (
    KVDtype.FLOAT32,
    KVDtype.BFLOAT16,
    KVDtype.FP8_E4M3,
    KVDtype.INT8_PER_TOKEN_HEAD,
    KVDtype.INT4_PER_TOKEN_HEAD,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One case of one pair of weights and KV format."""

    weights: str
    kv: str
    case: str
    tokens_per_second: float
    median_ms: float
    python_share: float | None
    milliseconds: tuple[float, ...]


def measure_steps(
    weights: Sequence[Quantization | None], formats: Sequence[KVDtype], *, repeats: int
) -> Iterator[Row]:
    """Measures every weight format on the short cases and the prompt with float32 KV, and every KV format on
    the long cases.
    """
    for quantization in weights:
        llm, name = _open(quantization), _name(quantization)
        plain = FormatRequest(KVDtype.FLOAT32, KVDtype.FLOAT32)
        engine = engine_with(llm, plain, batch=8, context=PREFILL.context, filled=False)
        for timing in time_engine(engine, SHORT, repeats=repeats):
            yield _row(name, KVDtype.FLOAT32, timing)
        for timing in time_engine(engine, [PREFILL], repeats=repeats // 2):
            yield _row(name, KVDtype.FLOAT32, timing)
        for stored in formats:
            engine = engine_with(
                llm, FormatRequest(stored, stored), batch=8, context=LONG[0].context, filled=True
            )
            for timing in time_engine(engine, LONG, repeats=repeats // 2):
                yield _row(name, stored, timing)
        del llm, engine
        gc.collect()


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of one format.

    mean_log_likelihood: of the tokens of right answers, in nats, given earlier ones.
    """

    weights: str
    mean_log_likelihood: float
    num_tokens: int


def measure_quality(
    weights: Sequence[Quantization | None], problems: Path, count: int
) -> Iterator[Quality]:
    """Measures quality over the answers to the first problems of GSM8K, in file order."""
    read = read_texts(problems, ("question",), ("answer",), count=count)
    texts = [(f"{question}\n", answer) for question, answer in read]
    for quantization in weights:
        llm = _open(quantization)
        runner = runner_of(llm)
        total, tokens = 0.0, 0
        for question, answer in texts:
            before = len(llm.encode(question))
            ids = torch.tensor(llm.encode(question + answer))
            logits = text_logits(runner.model, llm.plan, ids.tolist())[before - 1 : -1]
            found = torch.log_softmax(logits.double(), -1).gather(1, ids[before:, None])
            total, tokens = total + found.sum().item(), tokens + len(found)
        yield Quality(_name(quantization), total / tokens, tokens)


def table(rows: Sequence[Row]) -> str:
    """Formats results as Markdown."""
    lines = [
        "| weights | KV | what | ms | tokens/s | of that Python |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        share = "" if row.python_share is None else f"{100 * row.python_share:.1f} %"
        lines.append(
            f"| {row.weights} | {row.kv} | {row.case} | {row.median_ms:.2f} "
            f"| {row.tokens_per_second:.1f} | {share} |"
        )
    return "\n".join(lines)


def _open(quantization: Quantization | None) -> LLM:
    return LLM(
        DEMO_NAME,
        dtype="float32",
        kv_cache_dtype="float32",
        max_num_seqs=1,
        kv_cache_memory="64MiB",
        quantization=None if quantization is None else quantization.value,
    )


def _name(quantization: Quantization | None) -> str:
    return "float32" if quantization is None else quantization.value


def _row(weights: str, stored: KVDtype, timing: Timing) -> Row:
    return Row(
        weights,
        str(stored),
        str(timing.case),
        timing.tokens_per_second,
        timing.median_ms,
        timing.python_share,
        timing.milliseconds,
    )
