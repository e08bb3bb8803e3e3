"""Loss of quality of pages that were converted from one format to another (`--kv-transfer-convert`).

    python -m benchmarks.conversions smollm2 --out smollm2-conversions.json

Every row of K and V is encoded in the first format, decoded to float32 and encoded in the second one, as
`kvant.kv.transfer.convert` does with pages. All pairs read the same windows of text, also each format alone.
KL divergence is from the model's own dtype, in nats, at every position but the last of each window. Scales
outside the pages are 1.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.command import run_command
from kvant.attention.backends import load_backends
from kvant.attention.base import AttentionBackend, AttentionParams, Step
from kvant.cli.output import OutFile, write_json
from kvant.engine.llm import LLM
from kvant.kv.codecs import codec_for
from kvant.kv.dtype import KVDtype
from kvant.kv.names import parse_format
from kvant.kv.pool import LayerCache
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.own_engine import plan_storing, runner_of
from kvant.measure.quality.kl_statistics import Baseline, Distances, join, statistics_of
from kvant.measure.quality.texts import read_text, windows
from kvant.measure.teacher_forced import TextReader

FORMATS = (
    "bfloat16", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head",
)  # fmt: skip
CHUNK = 128
MOST_WINDOWS = 4


class Converted:
    """A backend that stores rows as another format would have rounded them."""

    def __init__(self, own: AttentionBackend, source: KVDtype) -> None:
        self.name = own.name
        self._own, self._codec = own, codec_for(source)
        self._scale = torch.ones(1) if source.format.takes_outside_scale else None

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None:
        self._own.write(cache, self._rounded(k), None if v is None else self._rounded(v), step)

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        return self._own.attend(cache, q, step, params)

    def _rounded(self, rows: Tensor) -> Tensor:
        codec, scale = self._codec, self._scale
        return codec.decode(codec.encode(rows, scale), scale, torch.float32)


def conversions(
    model: Annotated[str, typer.Argument(help="A model that runs on this machine's CPU.")],
    formats: Annotated[list[str] | None, typer.Option("--kv-format", metavar="F")] = None,
    context: Annotated[int, typer.Option("--context", min=64)] = 256,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of text.")] = 2048,
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE")] = None,
    out: OutFile = None,
) -> None:
    """Measure formats alone and after each other."""
    llm = LLM(
        model, dtype="float32", device="cpu", attention_backend="reference", kv_cache_dtype="model",
        kv_cache_memory="32MiB", max_model_len=256,
    )  # fmt: skip
    found = runner_of(llm).model
    names = formats or FORMATS
    asked = {name: parse_format(name, asked_by="--kv-format") for name in names}
    plans = {name: plan_storing(llm, one) for name, one in asked.items()}
    ways = list(product(names, names))
    read = read_text(text, llm)
    texts = windows(read, llm, context, tokens)
    parts: dict[tuple[str, str], list[Distances]] = {way: [] for way in ways}
    for batch in torch.split(texts, MOST_WINDOWS):
        own = TextReader(found, llm.plan, *batch.shape)
        readers = {}
        for source, target in ways:
            plan, dtype = plans[target], asked[source].k
            backends = load_backends(plan, batch_invariant=found.batch_invariant)
            if source != target:
                assert isinstance(dtype, KVDtype)
                backends = tuple(Converted(backend, dtype) for backend in backends)
            readers[source, target] = TextReader(found, plan, *batch.shape, backends=backends)
        for start in range(0, context, CHUNK):
            ids = batch[:, start : start + CHUNK]
            num = min(ids.shape[1], context - 1 - start)
            following = batch[:, start + 1 : start + 1 + num].reshape(-1)
            judge = Baseline(own.read(ids)[:, :num].flatten(0, 1), following)
            for way, reader in readers.items():
                one = judge.distances(reader.read(ids)[:, :num].flatten(0, 1))
                parts[way].append(one)
                sys.stderr.write(f"{start} {' '.join(way)}: {one.kl.mean():.5f}\n")
    rows = [
        {"source": source, "target": target, **asdict(statistics_of(join(parts[source, target])))}
        for source, target in ways
    ]
    facts = measurement_facts(command_line("python -m benchmarks.conversions"), ("torch",))
    body = {
        "schema": 1, "model": model, "fingerprint": llm.planned.target.geometry.fingerprint,
        "context": context, "text": read.name, "sha256": read.sha256, "rows": rows, **facts,
    }  # fmt: skip
    if out is not None:
        write_json(out, body)
    else:
        sys.stdout.write(json.dumps(body) + "\n")


if __name__ == "__main__":
    run_command(conversions)
