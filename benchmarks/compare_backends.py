"""Compares attention backends on one text, by KV format, with a float32 KV cache.

    python -m benchmarks.compare_backends MODEL --text FILE.jsonl --format F .. --backend B .. [--out FILE]

The text, questions and answers of a JSON lines file, is read in chunks over the pages of earlier chunks;
chunks of 256 tokens and more are long prompts, as in the engine. For every format and backend it prints
the mean KL divergence from the float32 cache, read by the backend that Kvant chooses, and that mean's
standard error; the share of positions with the same most likely token; the text's mean negative
log-likelihood, in nats per token.

`--defined` measures what the definition of fp8 products computes (`kvant.attention.verify.rounded`, in
float64), on any device: what `--backend triton_fp8` does up to ties.

If a sum is made in another order, a code near a tie may round the other way, and later ones follow. So exact
backends differ too. Differences within the standard errors mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from kvant import LLM
from kvant.attention.base import AttentionBackend, AttentionParams, Step
from kvant.attention.need import LONG
from kvant.attention.reference.backend import ReferenceBackend
from kvant.attention.select import parse_backend
from kvant.attention.triton_fp8.info import SERVED
from kvant.attention.verify import rounded
from kvant.kv.dtype import KVDtype
from kvant.kv.names import FormatRequest, parse_format
from kvant.kv.pool import LayerCache
from kvant.kv.spec import KVPlan
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.fidelity import divergences
from kvant.measure.own_engine import plan_storing, runner_of
from kvant.measure.teacher_forced import text_logits

BASELINE = FormatRequest(KVDtype.FLOAT32, KVDtype.FLOAT32)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of results.

    mean_kl, same_top: relative to the baseline, None for itself. kl_error: standard error of the mean,
    assuming independent positions. nll: mean, in nats per token.
    """

    format: str
    backend: str
    mean_kl: float | None
    kl_error: float | None
    same_top: float | None
    nll: float


class Defined(ReferenceBackend):
    """The definition of fp8 products for long runs of queries."""

    name = "fp8, defined"

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        return rounded.attend(cache, q, step, params)[0].to(q.dtype)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True, help='lines of {"question", "answer"}')
    parser.add_argument("--format", action="append", required=True)
    parser.add_argument("--backend", action="append", required=True)
    parser.add_argument("--defined", action="store_true", help="fp8 products by their definition")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text, from its start")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    if asked.defined:
        for name in asked.format:
            stored = parse_format(name, asked_by="--format")
            if stored.k not in SERVED or stored.v not in SERVED:
                parser.error(
                    f"--defined: fp8 products are of {', '.join(map(str, SERVED))}, not {name}"
                )
        if asked.chunk < LONG:
            parser.error(
                f"--defined: chunks of {LONG} tokens or more are rounded, not {asked.chunk}"
            )
    llm = LLM(
        asked.model,
        device=asked.device,
        dtype=asked.dtype,
        kv_cache_memory="1GiB",
        max_model_len=asked.tokens,
        max_num_seqs=4,
    )
    ids = list(llm.encode(read_text(asked.text)))
    if len(ids) < asked.tokens:
        parser.error(f"--tokens {asked.tokens}: {asked.text} has {len(ids)}")
    rows = measure(
        llm, ids[: asked.tokens], asked.format, asked.backend, asked.chunk, asked.defined
    )
    print(table(rows))
    if asked.out is not None:
        command = command_line("python -m benchmarks.compare_backends")
        told = {
            **measurement_facts(command, ["torch", "transformers"]),
            "model": asked.model,
            "compute": llm.plan.compute_dtype.value,
            "text": asked.text.name,
            "tokens": asked.tokens,
            "chunk": asked.chunk,
            "rows": [asdict(row) for row in rows],
        }
        asked.out.write_text(json.dumps(told, indent=1) + "\n")


def read_text(path: Path) -> str:
    """Returns all questions with their answers, concatenated."""
    problems = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return "\n".join(f"{problem['question']}\n{problem['answer']}" for problem in problems)


def measure(
    llm: LLM,
    ids: list[int],
    formats: Sequence[str],
    backends: Sequence[str],
    chunk: int,
    defined: bool = False,
) -> list[Row]:
    """Yields the baseline's row, then one per format and backend.

    Formats that cannot be served fail first.
    """
    runner = runner_of(llm)
    plans = [
        plan_storing(
            llm,
            parse_format(name, asked_by="--format"),
            parse_backend(backend, asked_by="--backend"),
        )
        for name, backend in itertools.product(formats, backends)
    ]
    plan = plan_storing(llm, BASELINE)
    exact = text_logits(runner.model, plan, ids, chunk=chunk)
    rows = [Row(str(BASELINE), _readers(plan), None, None, None, _nll(exact, ids))]
    measured: list[tuple[str, KVPlan, str, AttentionBackend | None]] = [
        (name, plan, _readers(plan), None)
        for (name, _), plan in zip(itertools.product(formats, backends), plans, strict=True)
    ]
    if defined:
        by_name = ((name, parse_format(name, asked_by="--format")) for name in formats)
        measured += [
            (name, plan_storing(llm, stored), Defined.name, Defined()) for name, stored in by_name
        ]
    for name, plan, reader, backend in measured:
        found = text_logits(runner.model, plan, ids, chunk=chunk, backend=backend)
        kl = divergences(exact, found)
        error = kl.std() / len(kl) ** 0.5
        same = (exact.argmax(-1) == found.argmax(-1)).double().mean()
        rows.append(
            Row(name, reader, kl.mean().item(), error.item(), same.item(), _nll(found, ids))
        )
    return rows


def _readers(plan: KVPlan) -> str:
    return ", ".join(sorted({layer.backend for layer in plan.layers if layer.backend is not None}))


def _nll(logits: Tensor, ids: Sequence[int]) -> float:
    """Returns the mean negative log-likelihood of every token except the first."""
    following = torch.tensor(ids[1:], device=logits.device)
    return float(functional.cross_entropy(logits[:-1].float(), following))


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'format':24} {'backend':12} {'mean KL':>9} {'error':>9} {'same top':>9} {'NLL':>8}"
    ]  # fmt: skip
    for r in rows:
        kl, error = ("-" if x is None else f"{x:.5f}" for x in (r.mean_kl, r.kl_error))
        same = "-" if r.same_top is None else f"{r.same_top:.4f}"
        lines.append(f"{r.format:24} {r.backend:12} {kl:>9} {error:>9} {same:>9} {r.nll:8.4f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
