"""Time of one layer's attention in decode steps of short contexts, with its rotation and its writes.

    python -m benchmarks.short_decode --out short-decode.json

Layers follow each other in a captured graph, each with pages of its own. "general" is the kernel
that reads contexts of any length. Figures are medians. --cuts also measures other shapes of the CUDA kernel.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import run_command
from kvant.attention.base import AttentionParams, HeadRotation, Step
from kvant.attention.cuda import one_query
from kvant.attention.cuda.one_query import Shape
from kvant.cli.output import OutFile, write_json
from kvant.kernels.cuda import build
from kvant.kv.dtype import KVDtype
from kvant.measure.attention_inputs import Case, make_cache, paged_step
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.gpu_time import captured, replay_us

LAYERS = 8
MODELS = {"qwen3-8b": (32, 8, 128), "qwen3-30b-a3b": (32, 4, 128), "gemma-3-12b": (16, 8, 256)}
"""Query heads, KV heads and their size."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (160, 256, 384, 1024)


def short_decode(
    models: Annotated[list[str] | None, typer.Option("--shape", help="Default: all.")] = None,
    batches: Annotated[list[int] | None, typer.Option("--batch")] = None,
    lengths: Annotated[list[int] | None, typer.Option("--length")] = None,
    names: Annotated[
        list[str] | None, typer.Option("--kv-format", help="Default: bfloat16.")
    ] = None,
    cuts: Annotated[bool, typer.Option("--cuts", help="Measure other shapes too.")] = False,
    rounds: Annotated[int, typer.Option("--rounds", min=1)] = 15,
    out: OutFile = None,
) -> None:
    """Measure decode attention of short contexts."""
    formats = [KVDtype[name.upper()] for name in names or ()]
    rows: list[dict[str, Any]] = []
    for stored, model, batch, length in itertools.product(
        formats or [KVDtype.BFLOAT16], models or MODELS, batches or BATCHES, lengths or LENGTHS
    ):
        row = {"stored": str(stored), "shape": model, "sequences": batch, "tokens": length}
        row |= measure(MODELS[model], batch, length, stored, cuts=cuts, rounds=rounds)
        rows.append(row)
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)
    if out is not None:
        facts = measurement_facts(command_line("python -m benchmarks.short_decode"), ["torch"])
        write_json(out, {**facts, "layers": LAYERS, "rows": rows})


def measure(
    sizes: tuple[int, int, int],
    batch: int,
    length: int,
    stored: KVDtype = KVDtype.BFLOAT16,
    *,
    cuts: bool,
    rounds: int,
) -> dict[str, Any]:
    """Returns microseconds of a layer with the general kernel and with `one_query`, and by shape if asked."""
    q_heads, kv_heads, head = sizes
    device = torch.device("cuda")
    case = Case(
        stored, stored, (length,) * batch,
        q_heads=q_heads, kv_heads=kv_heads, head_dim=head,
    )  # fmt: skip
    pages = batch * -(-length // case.page_size)
    caches = [make_cache(case, pages + 1, device, seed=layer) for layer in range(LAYERS)]
    order = torch.randperm(pages, device=device, dtype=torch.int32) + 1
    step = paged_step(case.lengths, 1, order, case.page_size)
    last = step.page_table[:, (length - 1) // case.page_size].to(torch.int64)
    step = replace(
        step,
        slot_mapping=last * case.page_size + (length - 1) % case.page_size,
        positions=torch.full((batch,), length - 1, dtype=torch.int64, device=device),
    )
    qkv = torch.randn(batch, (q_heads + 2 * kv_heads) * head, device=device).bfloat16()
    weight = torch.ones(head, device=device, dtype=torch.bfloat16)
    angles = torch.rand(length, head // 2, device=device).bfloat16()
    rotation = HeadRotation(angles.cos(), angles.sin(), True, weight, weight, 1e-6)
    params = AttentionParams(head**-0.5)
    from kvant.attention.triton.backend import TritonBackend  # only machines with a GPU have Triton

    backend = TritonBackend()

    def layers(step: Step, shape: Shape | None) -> list[torch.Tensor]:
        outs = []
        for cache in caches:
            if shape is not None and stored is KVDtype.BFLOAT16:
                outs.append(one_query.attend_rotated(cache, qkv, rotation, step, params, shape))
                continue
            q = backend.write_rotated(cache, qkv, rotation, step)
            if shape is None:
                outs.append(backend.attend(cache, q, step, params))
            else:
                outs.append(one_query.attend(cache, q, step, params, shape))
        return outs

    # Steps that may be longer use the general kernel.
    general = replace(step, max_seqlen_kv=1 << 20)
    chosen = one_query.shape_for(batch, kv_heads, head, stored)
    kinds: dict[str, tuple[Step, Shape | None]] = {"general": (general, None)}
    kinds["short"] = (step, chosen)
    if cuts:
        for parts in itertools.product((1, 2, 4, 8), (2, 4, 8), (1, 2, 3, 4)):
            cut = Shape(*parts)
            fits = one_query.shared_bytes(cut, head, stored) <= 200 * 1024
            if fits and batch * kv_heads * cut.cluster <= 1056 and cut != chosen:
                kinds["/".join(map(str, parts))] = (step, cut)
    for _, shape in kinds.values():
        if shape is not None:
            turn = one_query.Turn.of(rotation) if stored is KVDtype.BFLOAT16 else None
            made = one_query.macros(shape, one_query.Layer.of(caches[0], torch.bfloat16), turn)
            files = one_query.sources(stored, stored, turn)
            build.begin("kvant.attention.cuda", files, made)
    right = layers(general, None)[0].double()
    found: dict[str, Any] = {"chosen": "/".join(map(str, chosen))}
    graphs = {}
    for name, (its_step, shape) in kinds.items():
        graphs[name] = captured(partial(layers, replace(its_step), shape), 1)
        error = float((layers(replace(its_step), shape)[0].double() - right).norm() / right.norm())
        if not error < 5e-3:
            raise RuntimeError(f"{name} errs by {error:.2g}")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(replay_us(graph) / LAYERS)
    return found | {name: round(statistics.median(us), 2) for name, us in times.items()}


if __name__ == "__main__":
    run_command(short_decode)
