"""`kvant demo`: shows Kvant's features on a real model, in short chapters. Each chapter is one function."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from kvant.cli.output import OutFile, figure_table, write_json
from kvant.models.demo import DEMO_NAME

if TYPE_CHECKING:
    from kvant.engine.llm import LLM

MODEL = "smollm2"
FORMAT = "int8_per_token_head"
WIDE_LAYERS = "0,-1"
QUESTION = "Why is the sky blue? Answer in three sentences."
ANSWER_TOKENS = 160  # more than the answer has, so it ends by itself
TEXT_TOKENS = 384
UNIFORM = "int4_per_token_head"
POLICY = Path(__file__).with_name("demo_policy.yaml")
"""Written by `kvant tune` on other text. Its first lines have the command."""

SERVED_TEXT_CHARS = 1600
SERVED_ANSWER_TOKENS = 64
SERVED_QUESTIONS = (
    "What is this text about? Answer in one short sentence.",
    "When was the lighthouse built? Answer in one short sentence.",
)
DRAFTER = "smollm2-dflash"
DRAFT_FORMAT = "fp8_per_token_head"
DRAFT_QUESTION = "Tom has 3 boxes of 8 pens. He gives away 5 pens. How many pens are left?"
DRAFT_TOKENS = 96
DRAFT_STOP = ("\n\n",)
SPEED_BATCHES = (1, 8)
SPEED_PROMPT_TOKENS = 64
SPEED_STEPS = 16
SPEED_ROUNDS = 2


def demo(out: OutFile = None) -> None:
    """Plan a model, let it answer, and compare KV cache formats. Takes a minute or two on two cores."""
    from kvant.cli.progress import bars
    from kvant.engine.llm import LLM

    console = Console()
    started = time.perf_counter()
    with bars(console) as progress:
        llm = LLM(
            MODEL,
            dtype="float32",
            kv_cache_dtype=FORMAT,
            kv_cache_dtype_skip_layers=WIDE_LAYERS,
            progress=progress,
        )
    measured: dict[str, object] = {}
    for number, (title, chapter) in enumerate(CHAPTERS, start=1):
        console.rule(f"[bold]{number}. {title}", align="left")
        measured |= chapter(llm, console) or {}
        console.print()
    if out is not None:
        _write(out, measured)
    console.print(
        f"done in {time.perf_counter() - started:.0f} s; go on with: .venv/bin/kvant chat"
    )


def _write(out: Path, measured: dict[str, object]) -> None:
    import torch

    from kvant.measure.facts import command_line, measurement_facts

    facts = measurement_facts(command_line("kvant"), ("torch", "transformers", "numba"))
    facts |= {"threads": torch.get_num_threads(), **measured}
    write_json(out, facts)


def _plan(llm: LLM, console: Console) -> None:
    from kvant.cli.plan_table import print_layers

    console.print(
        f"kvant plan {MODEL} --kv-cache-dtype {FORMAT} --kv-cache-dtype-skip-layers {WIDE_LAYERS}",
        style="dim",
        highlight=False,
    )
    print_layers(llm.planned.target, console)


def _answer(llm: LLM, console: Console) -> None:
    from kvant.kv.memory import format_size
    from kvant.sampling.sampling_params import SamplingParams

    console.print(f"[bold]you:[/] {QUESTION}")
    prompt = llm.encode_chat([{"role": "user", "content": QUESTION}])
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    started, first, count = time.perf_counter(), None, 0
    for piece in llm.stream(prompt, params):
        first = first or time.perf_counter()
        count += len(piece.token_ids)
        console.print(piece.text, end="", markup=False, highlight=False, soft_wrap=True)
    ended = time.perf_counter()
    assert first is not None
    speed = (count - 1) / (ended - first) if count > 1 else 0.0
    stored = (len(prompt) + count) * llm.plan.bytes_per_token
    console.print(
        f"\n[dim]{count} tokens, {speed:.1f} tokens/s, first after {first - started:.2f} s, "
        f"{format_size(stored)} of KV[/]"
    )


def _formats(llm: LLM, console: Console) -> dict[str, object]:
    from kvant.kv.dtype import KVDtype
    from kvant.kv.names import FormatRequest, whole_formats
    from kvant.measure.fidelity import passage
    from kvant.measure.formats import measure_formats

    baseline = FormatRequest(KVDtype.FLOAT32, KVDtype.FLOAT32)
    wanted = [*whole_formats()]
    wanted.append(FormatRequest(KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD))
    rows = measure_formats(llm, baseline, wanted, llm.encode(passage())[:TEXT_TOKENS])
    table = figure_table("KV format (K/V)", ("B/token", "tokens/GiB", "mean KL", "same top"))
    for row in rows:
        table.add_row(
            str(row.format),
            f"{row.bytes_per_token:,}",
            f"{row.tokens_per_gib:,}",
            f"{row.fidelity.mean_kl:.5f}",
            f"{row.fidelity.same_top:.1%}",
        )
    console.print(table)
    console.print(
        f"[dim]against float32 KV, teacher-forced over {rows[0].fidelity.num_tokens} tokens of bundled "
        "text, read through the paged cache. Mean KL divergence in nats; same top: how often the most "
        "likely token is the same[/]"
    )
    return {"formats": [{**asdict(row), "format": str(row.format)} for row in rows]}


def _tuned(llm: LLM, console: Console) -> dict[str, object]:
    """Compares one format for all layers with a policy that needs no more bytes."""
    from kvant.kv.dtype import KVDtype
    from kvant.kv.names import FormatRequest, parse_format
    from kvant.kv.policy import read_policy
    from kvant.measure.fidelity import compare, passage
    from kvant.measure.own_engine import plan_storing, runner_of
    from kvant.measure.teacher_forced import text_logits
    from kvant.plan.resolution import resolve_again

    console.print(_made_by(POLICY), style="dim", highlight=False, soft_wrap=True)
    model, tokens = runner_of(llm).model, llm.encode(passage())[:TEXT_TOKENS]
    baseline = FormatRequest(KVDtype.FLOAT32, KVDtype.FLOAT32)
    truth = text_logits(model, plan_storing(llm, baseline), tokens)
    plans = {
        f"{UNIFORM} in every layer": plan_storing(llm, parse_format(UNIFORM, asked_by="demo")),
        "the tuned policy": resolve_again(llm.planned, read_policy(POLICY).target),
    }
    table = figure_table("stored as", ("B/token", "mean KL", "same top"))
    measured: dict[str, object] = {}
    for name, plan in plans.items():
        found = compare(truth, text_logits(model, plan, tokens))
        measured[name] = {"bytes_per_token": plan.bytes_per_token, **asdict(found)}
        table.add_row(
            name, f"{plan.bytes_per_token:,}", f"{found.mean_kl:.5f}", f"{found.same_top:.1%}"
        )
    console.print(table)
    stored = ", ".join(
        f"{n} layer{'s' * (n > 1)} {name}" for name, n in plans["the tuned policy"].formats.items()
    )
    console.print(f"[dim]the policy stores {stored}; it was chosen on other text than this[/]")
    return {"tuned": measured}


def _made_by(policy: Path) -> str:
    """Returns the command in the first comment of a policy file."""
    lines = []
    for line in policy.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines).split("`")[1]


def _speed(llm: LLM, console: Console) -> dict[str, object]:
    """Compares with transformers' generate in one process with equal threads and weights (there float32)."""
    import torch
    import transformers

    from kvant.measure.beside_transformers import beside_transformers

    rows = beside_transformers(
        llm, SPEED_BATCHES, context=SPEED_PROMPT_TOKENS, steps=SPEED_STEPS, rounds=SPEED_ROUNDS
    )
    table = figure_table("", [f"tokens/s, {batch} at once" for batch in SPEED_BATCHES])
    for engine in dict.fromkeys(row.engine for row in rows):
        table.add_row(engine, *(f"{r.tokens_per_second:.1f}" for r in rows if r.engine == engine))
    console.print(table)
    console.print(
        f"[dim]decoding, greedy, after prompts of {SPEED_PROMPT_TOKENS} random tokens; float32 KV and "
        "the same weights in both, float32 in transformers and as the file stores them in Kvant, "
        f"{torch.get_num_threads()} of torch's threads each, medians of "
        f"{SPEED_ROUNDS * SPEED_STEPS} steps in turns; generate() of transformers "
        f"{transformers.__version__} with its own defaults. More, and llama.cpp: "
        "docs/benchmarks/cpu.md[/]"
    )
    return {"speed": [asdict(row) for row in rows]}


def _served(llm: LLM, console: Console) -> None:
    from kvant.cli.demo_server import ask, client_name, served
    from kvant.measure.fidelity import passage

    flags = (
        "--dtype", "float32", "--kv-cache-dtype", FORMAT, "--max-model-len", "2048",
        "--kv-cache-memory", "128MiB",
    )  # fmt: skip
    console.print(f"kvant serve {MODEL} {' '.join(flags)}", style="dim", highlight=False)
    text = passage()[:SERVED_TEXT_CHARS]
    table = figure_table("client", ("prompt tokens", "of them cached", "first text after"))
    with served(MODEL, flags) as port:
        for client, question in zip("AB", SERVED_QUESTIONS, strict=True):
            messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
            answer = ask(port, MODEL, messages, max_tokens=SERVED_ANSWER_TOKENS)
            console.print(f"[bold]{client}:[/] {question} [dim](after a text that both have)[/]")
            console.print(" ".join(answer.text.split()), markup=False, highlight=False)
            counts = (str(answer.prompt_tokens), str(answer.cached_tokens))
            table.add_row(client, *counts, f"{answer.first:.2f} s")
    console.print(table)
    console.print(
        f"[dim]two clients ({client_name()}) on 127.0.0.1; the second finds the pages of the text that "
        "the first one left, in the format they were stored in[/]"
    )


def _drafts(llm: LLM, console: Console) -> None:
    """Compares engines with and without drafts, batch-invariant so that rounding cannot change answers."""
    from kvant.engine.llm import LLM
    from kvant.sampling.sampling_params import SamplingParams

    drafter = {"method": "dflash", "model": DRAFTER}
    console.print(
        f"kvant generate --temperature 0 --kv-cache-dtype {DRAFT_FORMAT} --batch-invariant "
        f"--speculative-config '{json.dumps(drafter)}'",
        style="dim",
        highlight=False,
        markup=False,
    )
    console.print(f"[bold]you:[/] {DRAFT_QUESTION}")
    params = SamplingParams(temperature=0, max_tokens=DRAFT_TOKENS, stop=DRAFT_STOP)
    table = figure_table("", ("tokens/s", "tokens a step", "drafts that stood"))
    texts, speeds = [], []
    for name, config in (("one by one", None), ("with drafts", drafter)):
        one = LLM(
            DEMO_NAME,
            kv_cache_dtype=DRAFT_FORMAT,
            batch_invariant=True,
            kv_cache_memory="64MiB",
            max_num_seqs=1,
            speculative_config=config,
        )
        prompt = one.encode_chat([{"role": "user", "content": DRAFT_QUESTION}])
        one.generate(prompt, SamplingParams(temperature=0, max_tokens=2))
        times = []
        for piece in one.stream(prompt, params):
            times.append(time.perf_counter())
            if piece.result is not None:
                texts.append(piece.result.text)
        found = one.metrics()
        length = found.get("spec_decode_mean_acceptance_length", 1.0)
        stood = (
            f"{found['spec_decode_num_accepted_tokens']} of {found['spec_decode_num_draft_tokens']}"
            if config
            else "-"
        )
        speeds.append((len(times) - 1) / (times[-1] - times[0]))
        table.add_row(name, f"{speeds[-1]:.1f}", f"{length:.2f}", stood)
    console.print(texts[0], markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    same = "the same tokens both ways" if texts[0] == texts[1] else "[red]the answers differ[/]"
    console.print(
        f"[dim]{same}; target and drafter store {DRAFT_FORMAT}, the drafter reads its own "
        "without a causal mask[/]"
    )
    if speeds[1] < speeds[0]:
        console.print(
            "[dim]here a step with drafts costs more than it saves: drafts pay on GPUs "
            "(docs/benchmarks/speculative.md)[/]"
        )


CHAPTERS: tuple[tuple[str, Callable[[LLM, Console], dict[str, object] | None]], ...] = (
    ("What is stored, layer by layer, and who decided it", _plan),
    ("A real model answers through that cache", _answer),
    ("The same model under every format", _formats),
    ("One format for all layers against a tuned policy of the same bytes", _tuned),
    ("Tokens a second, beside transformers", _speed),
    ("A drafter over the same quantised cache: fewer steps, and the same answer", _drafts),
    ("Served over HTTP: two clients share a prefix", _served),
)
