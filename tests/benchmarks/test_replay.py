"""Replayed acceptance: as many drafts stand as are meant to, and everything behind the logits is real."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmarks.replay_rounds import Load, measure, table
from benchmarks.replayed import accepted_counts, decide

from kvant.attention.base import Step
from kvant.errors import DoesNotFit
from kvant.plan.config import config_of
from kvant.plan.speculative_config import parse_speculative_config
from tests.speculative.pair import BLOCK, Pair, build_pair


@pytest.mark.parametrize("mean", [1.0, 3.3, 6.4, 14.0])
def test_counts_have_the_mean_that_is_asked_for(mean: float) -> None:
    counts = accepted_counts(mean, 15, seed=3)
    assert 1 + counts.mean() == pytest.approx(mean, abs=0.1)
    assert counts.min() >= 0
    assert counts.max() <= 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_likeliest_token_is_the_draft_as_long_as_it_is_to_stand(dtype: torch.dtype) -> None:
    ids = torch.tensor([9, 1, 2, 3, 8, 4, 5, 6])
    lengths = torch.tensor([0, 4, 8], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2, 3, 50, 51, 52, 53])
    table_ = torch.zeros(2, 1, dtype=torch.int32)
    step = Step(lengths, lengths[1:], table_, positions, positions, 4, 60)
    for stands in range(4):
        logits = torch.randn(8, 12).to(dtype)
        decide(logits, ids, step, torch.tensor([stands]))
        assert logits.float().isfinite().all()
        same = logits.argmax(-1)[:-1] == ids[1:]
        assert same[:3].tolist() == same[4:].tolist() == [place < stands for place in range(3)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("written", [False, True])
def test_a_load_is_timed_with_and_without_drafts(pair: Pair, written: bool) -> None:
    config = config_of(
        pair.target,
        {"dtype": "float32", "kv_cache_memory": "4MB", "max_num_seqs": 4, "max_model_len": 300,
         "attention_backend": "reference"},
    )  # fmt: skip
    config = replace(config, plan=replace(config.plan, prefix_caching=written), seed=0)
    asked = parse_speculative_config(
        {"method": "dflash", "model": str(pair.draft), "adaptive": False}
    )
    asked = replace(asked, options={"hundredths_of_mean": 300, "seed": 1})
    found = list(
        measure(config, asked, ["float32"], [Load(3, 40, 90, 10)], 1, plain=True, written=written)
    )
    plain, drafting = found
    assert (plain.num_drafts, plain.mean_length) == (0, 0.0)
    assert drafting.num_drafts == BLOCK - 1
    assert drafting.mean_length == pytest.approx(3.0, abs=0.5)
    assert drafting.repeats[0].steps < plain.repeats[0].steps
    assert len(table(found).splitlines()) == 4


def test_a_load_that_does_not_fit_a_sequence_is_the_users_to_mend(pair: Pair) -> None:
    config = config_of(
        pair.target,
        {"dtype": "float32", "kv_cache_memory": "4MB", "max_model_len": 64,
         "attention_backend": "reference"},
    )  # fmt: skip
    asked = parse_speculative_config({"method": "dflash", "model": str(pair.draft)})
    asked = replace(asked, options={"hundredths_of_mean": 300, "seed": 1})
    rounds = measure(
        config, asked, ["float32"], [Load(1, 30, 40, 4)], 1, plain=False, written=False
    )
    with pytest.raises(DoesNotFit, match="ended before"):
        next(rounds)
