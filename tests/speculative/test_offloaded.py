"""A drafter's pages leave and come back with the target's: it drafts as well as before."""

from __future__ import annotations

from itertools import pairwise

from kvant.engine.result import EngineStats
from kvant.sampling.sampling_params import SamplingParams
from tests.speculative.engines import make_llm
from tests.speculative.pair import Pair


def test_restored_pages_of_a_drafter_draft_the_same(pair: Pair) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[(7 * i + 5 * j * j + j) % 90 + 4 for j in range(60)] for i in range(3)]
    plain = [r.token_ids for r in make_llm(pair, plain=True).generate(prompts, params)]

    def accepted(stats: EngineStats) -> int:
        assert stats.speculation is not None
        return stats.speculation.num_accepted_tokens

    llm = make_llm(pair, page_size=4, kv_offload="host:16MiB")
    engine = llm.engine
    assert engine.tiers is not None
    engine.tiers.policy.latency = -1e9  # such a model computes faster than pages come back
    engine.tiers.policy.least_tokens = 4
    counts = [0]
    for turn in range(3):
        found = [llm.generate([prompt], params)[0] for prompt in prompts]
        assert [result.token_ids for result in found] == plain
        assert all(result.num_cached_tokens >= 56 for result in found) or not turn
        counts.append(accepted(engine.stats))
        while engine.is_moving:
            engine.move(0.01)
        engine.scheduler.allocator.forget_all()
    stats = engine.stats.offload
    assert stats is not None
    assert stats.num_restores == 2 * len(prompts)
    by_turn = [after - before for before, after in pairwise(counts)]
    assert by_turn[1] == by_turn[2] == by_turn[0] > 0
