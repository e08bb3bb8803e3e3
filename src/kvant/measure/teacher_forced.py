"""What a model says at every position of a given text, read through the paged cache.

The text goes in by chunks, so that most positions attend over keys and values that were stored by
an earlier step: exactly what generation does. Attention reads stored bytes in every case. Chunks of
`kvant.attention.need.LONG` tokens are long queries, as in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvant.attention.backends import load_backends
from kvant.attention.base import AttentionBackend, Step, StepCall
from kvant.attention.long import list_long
from kvant.kv.pool import SCRATCH_PAGE, KVPool
from kvant.kv.spec import KVPlan
from kvant.models.loaded import LoadedModel

CHUNK = 128


def text_logits(
    model: LoadedModel,
    plan: KVPlan,
    token_ids: Sequence[int],
    *,
    chunk: int = CHUNK,
    backend: AttentionBackend | None = None,
) -> Tensor:
    """Logits after each token, [len(token_ids), vocab_size], with the KV cache stored as in `plan`.

    plan may differ from the one the model was loaded with in formats and backends only; scales are the
    model's. backend: reads and writes every layer instead of the plan's.
    """
    pages = -(-len(token_ids) // plan.page_size)
    device = model.device
    pool = KVPool(plan, SCRATCH_PAGE + 1 + pages, device=device, scales=model.scales)
    if backend is None:
        backends = load_backends(plan, batch_invariant=model.batch_invariant)
    else:
        backends = (backend,) * len(plan.layers)
    first = SCRATCH_PAGE + 1
    table = torch.arange(first, first + pages, dtype=torch.int32, device=device)[None]
    ids = torch.tensor(token_ids, dtype=torch.int64, device=device)
    parts = []
    for start in range(0, len(token_ids), chunk):
        end = min(start + chunk, len(token_ids))
        positions = torch.arange(start, end, device=device)
        step = Step(
            cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32, device=device),
            seqlens_kv=torch.tensor([end], dtype=torch.int32, device=device),
            page_table=table,
            slot_mapping=positions + first * plan.page_size,
            positions=positions,
            max_seqlen_q=end - start,
            max_seqlen_kv=end,
        )
        step = list_long(step, np.array([end - start]), np.array([end]))
        call = StepCall(step, pool, backends)
        parts.append(model.forward(ids[start:end], call, torch.arange(end - start, device=device)))
    return torch.cat(parts)
