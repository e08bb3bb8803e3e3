"""benchmarks/state_quality.py: each position's KL divergence is counted in its stretch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from benchmarks import state_quality
from scripts import train_hybrid
from transformers import BambaConfig, BambaForCausalLM

from kvant.measure.quality.compare import Compared
from kvant.measure.quality.kl_statistics import Distances


def test_divergences_are_averaged_by_stretch() -> None:
    context, count = 600, 3
    positions = np.arange(state_quality.PROMPT, context - 1)
    kl = np.repeat(positions.astype(float), count)  # positions first, windows second
    none = np.zeros(len(kl))
    decoded = Distances(kl, none, none, none.astype(bool))
    before = np.tile(np.arange(context - 1), count)
    zeros = np.zeros(len(before))
    prefilled = Distances(before.astype(float), zeros, zeros, zeros.astype(bool))
    found = state_quality._figures(
        Compared(prefilled, before, decoded, np.zeros(1)), context, count
    )
    assert found["stretches"] == {
        "64-256": np.arange(64, 256).mean(),
        "256-512": np.arange(256, 512).mean(),
        "512-599": np.arange(512, 599).mean(),
    }
    assert found["prompt"]["kld_mean"] == pytest.approx(positions.mean())


def test_feedback_passes_each_error_to_the_next_element() -> None:
    torch.manual_seed(0)
    steps = torch.empty(50, 128).uniform_(-126, 126)
    found = state_quality.with_feedback(steps)
    for row, rounded in zip(steps.tolist(), found.tolist(), strict=True):
        error = 0.0
        for wanted, code in zip(row, rounded, strict=True):
            assert abs(wanted + error - code) <= 0.5 + 1e-3
            error += wanted - code
    assert found.abs().max() <= 127
    assert torch.equal(
        state_quality.with_feedback(torch.full((1, 4), 0.5))[0], torch.tensor([1, 0, 1, 0.0])
    )


def test_training_takes_every_step_at_a_planned_length() -> None:
    found = list(train_hybrid._lengths(20))
    assert found == [512] * 17 + [2048] * 3


def test_time_steps_start_spread_over_two_decades() -> None:
    torch.manual_seed(0)
    model = BambaForCausalLM(
        BambaConfig(
            vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, mamba_n_heads=128,
            mamba_d_head=1, mamba_d_state=8, attn_layer_indices=[1], num_attention_heads=2,
            num_key_value_heads=1,
        )
    )  # fmt: skip
    train_hybrid.spread_time_steps(model)
    steps = torch.nn.functional.softplus(model.model.layers[0].mamba.dt_bias.detach())
    low, high = train_hybrid.STEP_TIMES
    assert low * 0.999 < float(steps.min()) < 2 * low
    assert high / 2 < float(steps.max()) < high * 1.001
    middle = math.sqrt(low * high)
    assert 0.4 < float((steps < middle).float().mean()) < 0.6
