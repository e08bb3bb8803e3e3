"""Compiles kernels and lets libraries make their plans before the first request."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvant.attention.base import Step, with_groups
from kvant.attention.long import list_long
from kvant.execution.graphs import Forward
from kvant.kv.pool import KVPool
from kvant.models.loaded import LoadedModel, widened
from kvant.plan.device import chosen_gpu, work_on

_MOST_AT_ONCE = 6
"""The most steps compiled in parallel. More gain little: part of compiling holds the interpreter lock."""

_LARGE = 1024
"""Steps of more tokens run one at a time: the plan has memory for the activations of one large step."""


def warm_up(
    model: LoadedModel,
    pool: KVPool,
    forward: Forward,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Runs steps that store nothing: short and long prompts, alone and together.

    on_progress: called with the number of steps done, and the number of all steps.
    Several threads launch small steps in parallel, since compiling takes most of the time. They share a
    stream, so the device runs their kernels one after the other.
    """

    def run(lengths: tuple[int, ...]) -> Tensor:
        step = _nowhere(lengths, model.plan.page_size, model.device, max_num_seqs)
        ids, index = torch.zeros_like(step.positions), (step.cu_seqlens_q[1:] - 1).to(torch.int64)
        if step.max_seqlen_q == 1 and not model.batch_invariant:  # long contexts use another kernel
            forward(ids, in_all_groups(replace(step, max_seqlen_kv=max_model_len)), index)
        return forward(ids, in_all_groups(step), index)

    def in_all_groups(step: Step) -> Step:
        others = len(pool.arena.layout.of_tokens) - 1
        return with_groups(step, [(step.page_table, step.slot_mapping)] * others)

    # Imported here: only machines with a GPU have Triton.
    from kvant.attention.triton.prefill import prepare
    from kvant.kernels.triton.first_launch import one_loads
    from kvant.sampling.triton_draw import draw_once

    first, *others = step_lengths(max_num_seqs, max_num_batched_tokens, max_model_len)
    small = [lengths for lengths in others if sum(lengths) <= _LARGE]
    large = [lengths for lengths in others if sum(lengths) > _LARGE]
    logits = run(first)  # alone: it allocates what all later steps share
    at_once = _at_once(model.device)
    with (
        one_loads(),
        ThreadPoolExecutor(at_once, initializer=work_on, initargs=(chosen_gpu(),)) as threads,
    ):
        compiled = threads.map(run, small)
        draw = threads.submit(draw_once, logits.to(widened(logits.dtype)))
        try:
            # In this thread, which will run the steps: cuDNN keeps its plans per thread.
            prepare(pool, model.dtype, max_num_batched_tokens, max_model_len)
            for done, _ in enumerate(compiled, start=1):
                on_progress(done, len(others))
            draw.result()
        except BaseException:  # a start that fails does not go on compiling
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    for done, lengths in enumerate(large, start=len(small) + 1):
        run(lengths)
        on_progress(done, len(others))
    torch.cuda.synchronize(model.device)


def _at_once(device: torch.device) -> int:
    """Returns how many steps are compiled in parallel; one under Triton's interpreter."""
    return 1 if device.type == "cpu" else max(1, min(_MOST_AT_ONCE, len(os.sched_getaffinity(0))))


def step_lengths(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> list[tuple[int, ...]]:
    """Returns the sequences' query lengths for each step to run, so that every kernel variant is compiled.

    Kernels are specialised by powers of two: of query rows per sequence and KV head, of a step's tokens and
    of rows of logits. They also differ for few, some and many sequences. Products have larger tiles for more
    tokens, up to the largest step. Decode steps are recorded later, but some run without a graph, for
    example beside a long prompt.
    """
    long = min(300, max_num_batched_tokens, max_model_len)
    many = min(64, max_num_seqs)
    found: list[tuple[int, ...]] = [(1, 5), (1, 33), (long,), (1, long), (5, long), (long, long)]
    found += [(n,) for n in (1, 2, 4, 8, 16, 32, 64)]
    found += [(1,) * min(32, many), *((n,) * many for n in (1, 2, 4, 8, 16))]
    found += [(1,) * seqs for seqs in (3, 5, 6, 9, 129)]
    # Another variant joins the partial results of many sequences that are not all single tokens.
    found += [(*(1,) * 128, 2)]
    found += [(n,) * seqs for seqs in (2, 3, 4, 5) for n in (2, 3, 6, 17)]
    most = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    tokens = 2 * long
    while tokens < most:
        tokens = min(2 * tokens, most)
        found.append(_prompts(tokens, max_model_len))
    return [
        lengths
        for lengths in dict.fromkeys(found)
        if sum(lengths) <= max_num_batched_tokens
        and len(lengths) <= max_num_seqs
        and max(lengths) <= max_model_len
    ]


def _prompts(tokens: int, most: int) -> tuple[int, ...]:
    """Returns lengths of at most `most` whose sum is `tokens`."""
    whole, rest = divmod(tokens, most)
    return (most,) * whole + ((rest,) if rest else ())


def _nowhere(
    lengths: tuple[int, ...], page_size: int, device: torch.device, scratch_row: int
) -> Step:
    """Returns a step of prompts of these lengths that stores nothing and reads the scratch page and row."""
    count = np.array(lengths)
    total, longest = int(count.sum()), int(count.max())
    step = Step(
        cu_seqlens_q=torch.tensor([0, *np.cumsum(count)], dtype=torch.int32, device=device),
        seqlens_kv=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_table=torch.zeros(
            len(lengths), -(-longest // page_size), dtype=torch.int32, device=device
        ),
        slot_mapping=torch.full((total,), -1, dtype=torch.int64, device=device),
        positions=torch.zeros(total, dtype=torch.int64, device=device),
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        rows=torch.full((len(lengths),), scratch_row, dtype=torch.int64, device=device),
        lengths=None if longest == 1 else lengths,
    )
    return list_long(step, count, count)
