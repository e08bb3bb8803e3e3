"""Before the first request: kernels are compiled and libraries have made their plans."""

from __future__ import annotations

import numpy as np
import torch

from kvant.attention.base import Step
from kvant.attention.long import list_long
from kvant.engine.graphs import Forward
from kvant.kv.pool import KVPool
from kvant.models.loaded import LoadedModel


def warm_up(
    model: LoadedModel,
    pool: KVPool,
    forward: Forward,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> None:
    """Run steps that write nowhere: short and long prompts, alone and beside each other."""
    long = min(300, max_num_batched_tokens, max_model_len)
    some = min(64, long)  # of a prompt's end, or drafts: another kernel than a few or many take
    page_size = model.plan.page_size
    for lengths in ((1, 5), (some,), (long,), (1, long), (5, long)):
        if sum(lengths) <= max_num_batched_tokens:
            step = _nowhere(lengths, page_size, model.device)
            ids = torch.zeros_like(step.positions)
            forward(ids, step, (step.cu_seqlens_q[1:] - 1).to(torch.int64))
    from kvant.attention.triton.prefill import prepare  # Triton is there where there is a GPU

    prepare(pool, model.dtype, max_num_batched_tokens, max_model_len)
    torch.cuda.synchronize(model.device)


def _nowhere(lengths: tuple[int, ...], page_size: int, device: torch.device) -> Step:
    """Prompts of these lengths whose rows are not stored; they read the scratch page."""
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
    )
    return list_long(step, count, count)
