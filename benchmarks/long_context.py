"""Long contexts without running them: random numbers replace prompts' keys and values.

For timings of decoding over long contexts, whose prompts would take most of the time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvant.attention.backends import load_backends
from kvant.attention.base import Step
from kvant.engine.engine import Engine
from kvant.errors import BadValue
from kvant.kv.pages import page_hash
from kvant.kv.pool import KVPool

_ROWS = 1 << 16


def fill(pools: Iterable[KVPool]) -> None:
    """Writes normally distributed keys and values into every slot, through the pool's own writers."""
    for pool in pools:
        backends = load_backends(pool.plan)
        slots = torch.arange(pool.num_pages * pool.plan.page_size, device=pool.device)
        generator = torch.Generator(pool.device).manual_seed(0)
        for spec in pool.plan.layers:
            if spec.k is None:
                continue
            g = spec.geometry
            dtype = torch.float32 if pool.device.type == "cpu" else torch.bfloat16
            k = torch.empty(_ROWS, g.num_kv_heads, g.head_dim_k, dtype=dtype, device=pool.device)
            v = torch.empty(_ROWS, g.num_kv_heads, g.head_dim_v, dtype=dtype, device=pool.device)
            k.normal_(generator=generator)
            v.normal_(generator=generator)
            for some in torch.split(slots, _ROWS):
                nothing = torch.zeros(1, dtype=torch.int32, device=pool.device)
                step = Step(nothing, nothing[:0], nothing[None, :0], some, some, 0, 0)
                count = len(some)
                backends[g.index].write(pool[g.index], k[:count], v[:count], step)


def remember(engine: Engine) -> None:
    """Puts the full pages of every waiting prompt into the prefix cache, as if the prompts had run.

    Raises BadValue if the pool is too small for them.
    """
    assert engine.limits.prefix_caching
    allocator, page_size = engine.scheduler.allocator.groups[0], engine.limits.page_size
    for sequence in engine.scheduler.sequences():
        prompt = sequence.request.prompt_token_ids
        count = (len(prompt) - 1) // page_size
        pages = allocator.allocate(count)
        if pages is None:
            raise BadValue(
                f"the KV cache holds no {len(prompt)} tokens more",
                why="all requests of this measurement are to run at once",
            )
        digest = sequence.prefix_hashes[0]
        for index, page in enumerate(pages):
            digest = page_hash(digest, prompt[index * page_size : (index + 1) * page_size])
            assert allocator.remember(page, digest), "prompts are different"
        allocator.release(pages)
    allocator.take_pages_to_zero()  # they are full
