"""Pages cross a GPU's bus and come back unchanged: python -m pytest -m gpu here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvant.kv.pages import SharedPages
from tests.models import tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["bfloat16", "fp8_per_token_head", "int4_per_token_head"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_restored_tokens_are_those_of_a_cold_run(tmp_path: Path, family: str, name: str) -> None:
    pytest.importorskip("xxhash")
    from kvant import LLM, SamplingParams

    path = tiny.build(family, tmp_path)
    llm = LLM(
        path, device="cuda", dtype="bfloat16", kv_cache_dtype=name, kv_format_defaults="off",
        kv_cache_memory="2MiB", max_model_len=384, max_num_seqs=4, batch_invariant=True,
        kv_offload="host:64MiB",
    )  # fmt: skip
    engine = llm.engine
    assert engine.tiers is not None
    engine.tiers.policy.latency = -1e9  # such a model computes faster than pages come back
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompts = [[(7 * i + 5 * j * j + j) % 120 + 4 for j in range(150 + 20 * i)] for i in range(6)]
    cold = []
    for prompt in prompts:
        engine.scheduler.allocator.forget_all()
        engine.tiers.forget_all()
        cold += [result.token_ids for result in llm.generate([prompt], params)]
    for prompt in prompts:
        llm.generate([prompt], params)
        while engine.is_moving:
            engine.move(0.01)
    for _ in range(3):
        engine.scheduler.allocator.forget_all()
        assert [result.token_ids for result in llm.generate(prompts, params)] == cold
        engine.audit()
    stats = engine.stats.offload
    assert stats is not None
    assert stats.host.bad == 0
    assert stats.num_restores >= len(prompts)


def test_a_copy_moves_every_byte_and_no_other() -> None:
    pytest.importorskip("xxhash")
    from kvant.kv.offload.build import build_tiers
    from kvant.kv.offload.tiers import Key, Offer

    made = torch.Generator("cuda").manual_seed(0)
    pieces = [
        torch.randint(0, 256, (9, size), dtype=torch.uint8, device="cuda", generator=made)
        for size in (16_400, 48, 32_768)
    ]
    before = [piece.cpu().clone() for piece in pieces]
    shared = SharedPages(9)
    tiers = build_tiers(shared, [pieces], 1 << 20)
    (pages,) = shared.allocate([4]) or [[]]
    digests = [bytes([i]) * 32 for i in range(4)]
    for page, digest in zip(pages, digests, strict=True):
        shared.groups[0].remember(page, digest)
    offers = [
        Offer(Key(0, digest), page, shared.groups[0].generation_of(page) or 0, None)
        for page, digest in zip(pages, digests, strict=True)
    ]
    tiers.offer(offers)
    while tiers.is_moving:
        tiers.wait(0.01)
    shared.groups[0].release(pages)
    shared.forget_all()
    for piece in pieces:
        piece.zero_()
    keys = [Key(0, digest) for digest in digests]
    assert tiers.load(1, [[]], keys, [None] * 4, 64)
    while tiers.is_moving:
        tiers.wait(0.01)
    torch.cuda.synchronize()
    for digest, page in zip(digests, pages, strict=True):
        found = shared.groups[0].find(digest)
        assert found is not None
        for piece, old in zip(pieces, before, strict=True):
            assert torch.equal(piece[found].cpu(), old[page])
    touched = {shared.groups[0].find(digest) for digest in digests}
    for piece in pieces:
        for page in set(range(9)) - touched:
            assert not piece[page].any()
