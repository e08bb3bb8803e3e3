"""A drafter with layers of its own runs on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvant import SamplingParams
from kvant.kv.spec import Role
from kvant.sampling.sampling_params import SamplingParams as Params
from tests.speculative.engines import make_llm
from tests.speculative.pair import ANSWER, Pair, build_pair
from tests.speculative.test_windows import as_windowed

GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER + 6, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize(
    ("windows", "size"), [(False, 2), (True, 2), pytest.param(False, 4, marks=pytest.mark.slow)]
)
def test_ranks_draft_and_answer_as_one_device(
    windows: bool, size: int, pair: Pair, tmp_path: Path
) -> None:
    if windows:
        pair = as_windowed(pair, tmp_path, "both")
    options = {"dtype": "float32", "page_size": 4, "max_model_len": 96, "max_num_seqs": 8}
    one = make_llm(pair, attention_backend="reference", **options)
    memory = "120KB" if windows else "200KB"
    two = make_llm(pair, tensor_parallel_size=size, **{**options, "kv_cache_memory": memory})
    prompts = [list(prompt) for prompt in pair.prompts]
    expected = [r.token_ids for r in one.generate(prompts, GREEDY)]
    assert [r.token_ids for r in two.generate(prompts, GREEDY)] == expected
    assert two.engine.stats.num_preemptions > 0
    two.engine.audit()
    layout = two.planned.layout
    assert (layout is not None) is windows
    assert layout is None or layout.holds(Role.DRAFT)
    drawn = Params(temperature=0.8, seed=3, max_tokens=12)
    assert [r.token_ids for r in two.generate(prompts[:3], drawn)] == [
        r.token_ids for r in one.generate(prompts[:3], drawn)
    ]
    found, alone = two.metrics(), one.metrics()
    accepted = found["spec_decode_num_accepted_tokens"]
    assert 0 < accepted < found["spec_decode_num_draft_tokens"]
    assert alone["spec_decode_num_accepted_tokens"] > 0
    assert two.planned.division is not None
    assert any("drafter" in line for line in two.planned.division.replicated)
