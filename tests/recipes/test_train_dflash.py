"""The recipe end to end and the promises of its pieces, on a random target of a few weights."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_blocks import (
    block_labels,
    block_mask,
    draft_states,
    embedding_and_head,
    pack_rows,
    sample_anchors,
    target_features,
)
from dflash_data import (
    Answer,
    Request,
    chat_tokens,
    expand_templates,
    generate_answers,
    load_answers,
    vary_numbers,
)
from dflash_eval import NOTHING, greedy, replay, speculate
from dflash_loss import block_loss, position_weights
from dflash_model import Drafter, DrafterConfig, evenly_spaced_layers
from safetensors import safe_open
from train_dflash import ANSWERS, HELD_ANSWERS, main, prompt_of
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.recipes.tiny_target import MASK_TOKEN_ID, build_target

STOPS = frozenset([2])
BLOCK = 4
TEMPLATES = Path(__file__).parents[2] / "data" / "prompts" / "chat_templates.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    build_target(path)
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> LlamaForCausalLM:
    """In float64, where no two ways to compute a logit disagree about the argmax."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model


@pytest.fixture
def drafter(target: LlamaForCausalLM) -> Drafter:
    torch.manual_seed(1)
    config = DrafterConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6, rope_theta=10000.0,
        max_position_embeddings=512, vocab_size=target.config.vocab_size, block_size=BLOCK,
        mask_token_id=MASK_TOKEN_ID, target_layer_ids=(1, 2), num_target_layers=4,
    )  # fmt: skip
    return Drafter(config).double().eval()


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(4, 260) for _ in range(rng.randint(3, 9))) for _ in range(count)]


def answers_of(target: LlamaForCausalLM, count: int, new: int = 20) -> list[Answer]:
    asked = [Request(prompt, 0) for prompt in prompts(count)]
    return generate_answers(target, asked, new, STOPS, 1.0, batch=4, seed=0)


def test_batched_generation_equals_decoding_each_prompt_alone(target: LlamaForCausalLM) -> None:
    for prompt, answer in zip(prompts(7), answers_of(target, 7, new=40), strict=True):
        assert answer.tokens.tolist() == [*prompt, *greedy(target, prompt, 40, STOPS)]


def test_a_sampled_start_goes_on_greedily_and_is_not_learnt(target: LlamaForCausalLM) -> None:
    prompt = prompts(1)[0]
    asked = [Request(prompt, 5), Request(prompt, 0), Request(prompt, 20, learn_sampled=True)]
    started, plain, sampled = generate_answers(target, asked, 20, STOPS, 2.0, batch=8, seed=3)
    assert started.first_label == len(prompt) + 5
    given = started.tokens[: started.first_label].tolist()
    assert given != plain.tokens[: started.first_label].tolist()
    assert started.tokens[len(given) :].tolist() == greedy(target, given, 15, STOPS)
    assert sampled.first_label == plain.first_label == len(prompt)


def test_features_of_packed_rows_are_those_of_the_sequences_alone(
    target: LlamaForCausalLM,
) -> None:
    answers = answers_of(target, 4)
    rows = pack_rows(answers, 64)
    assert len(rows) < len(answers)
    features = target_features(target, rows, (1, 2))
    found = 0
    for r in range(len(rows)):
        for segment in range(int(rows.segments[r].max()) + 1):
            here = rows.segments[r] == segment
            alone = target(input_ids=rows.tokens[r, here][None], output_hidden_states=True)
            expected = torch.cat([alone.hidden_states[i + 1][0] for i in (1, 2)], dim=-1)
            torch.testing.assert_close(features[r, here], expected)
            found += 1
    assert found == len(answers)


def test_blocks_drafted_side_by_side_equal_blocks_drafted_alone(
    target: LlamaForCausalLM, drafter: Drafter
) -> None:
    """Packing, masks and positions change nothing: each block sees its own past and itself."""
    embedding, _ = embedding_and_head(target)
    rows = pack_rows(answers_of(target, 5), 80)
    features = target_features(target, rows, drafter.config.target_layer_ids).clone()
    anchors, real = sample_anchors(rows, 6, torch.Generator().manual_seed(0))
    mask = block_mask(rows, anchors, BLOCK, sparse=False)
    together = draft_states(drafter, embedding, rows, features, anchors, mask)
    assert real.all()
    for r in range(len(rows)):
        for a, anchor in enumerate(anchors[r].tolist()):
            past = (rows.segments[r] == rows.segments[r, anchor]) & (torch.arange(80) < anchor)
            block = embedding[[int(rows.tokens[r, anchor]), *[MASK_TOKEN_ID] * (BLOCK - 1)]][None]
            start = int(rows.positions[r, anchor])
            alone = drafter(
                block,
                drafter.context(features[r, past][None]),
                torch.arange(start, start + BLOCK)[None],
                torch.arange(start)[None],
                None,
            )
            torch.testing.assert_close(together[r, a], alone[0, 1:])


def test_labels_are_the_tokens_after_the_anchor_and_stop_with_the_sequence() -> None:
    rows = pack_rows(
        [
            Answer(np.array([10, 11, 12, 13, 14], np.int32), 2, 3),
            Answer(np.array([20, 21, 22], np.int32), 1, 1),
        ],
        9,
    )
    assert rows.anchorable[0].nonzero()[:, 0].tolist() == [2, 3, 6]
    anchors, real = sample_anchors(rows, 4, None)
    assert anchors[0][real[0]].tolist() == [2, 3, 6]
    labels, exists = block_labels(rows, anchors, real, BLOCK)
    read = [labels[0, a][exists[0, a]].tolist() for a in range(4) if bool(real[0, a])]
    assert read == [[13, 14], [14], [22]]
    assert not exists[0][~real[0]].any()


def test_the_loss_gradient_is_that_of_the_weighted_cross_entropy() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(6, 3, 8, dtype=torch.float64, requires_grad=True)
    head = torch.randn(20, 8, dtype=torch.float64)
    labels = torch.randint(20, (6, 3))
    exists = torch.ones(6, 3, dtype=torch.bool)
    exists[2, 1:] = False
    out = block_loss(hidden, head, labels, exists, alpha=0.5, chunk=4)
    torch.autograd.backward(out.loss)
    logits = hidden @ head.t()
    entropy = -torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]
    weights = position_weights(entropy.detach(), exists, 0.5)
    expected = (weights * entropy).sum() / weights.sum()
    torch.testing.assert_close(out.loss.double(), expected, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(hidden.grad, gradient, rtol=1e-4, atol=1e-6)
    assert torch.equal(out.hits, (logits.argmax(-1) == labels) & exists)


def test_without_smoothing_the_weights_are_the_slope_of_the_expected_accepted_length() -> None:
    log_q = torch.tensor([[-0.1, -0.7, -0.3]], requires_grad=True)
    expected_length = log_q.exp().cumprod(dim=1).sum()
    (slope,) = torch.autograd.grad(expected_length, log_q)
    weights = position_weights(-log_q.detach(), torch.ones(1, 3, dtype=torch.bool), alpha=0.0)
    torch.testing.assert_close(weights, slope)


def test_drafts_never_change_the_greedy_answer(target: LlamaForCausalLM, drafter: Drafter) -> None:
    for prompt in prompts(6, seed=5):
        reply, acceptance = speculate(target, drafter, prompt, 33, STOPS)
        assert reply == greedy(target, prompt, 33, STOPS)
        assert acceptance.tokens == len(reply) - 1


def train_on(folder: Path, out: Path, *more: str) -> dict[str, Any]:
    """Run the recipe on eight short prompts, with settings small enough for a second or two."""
    file = out / "prompts.jsonl"
    out.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    small = (
        "--device cpu --block-size 4 --taps 2 --continued 1 --varied 1 --longest-start 4 "
        "--max-new-tokens 24 --validation 1 --batch 16 --row-length 128 --rows-per-step 4 "
        "--anchors-per-row 12 --learning-rate 0.03 --log-every 100 --check 2"
    )
    return main([
        "--target", str(folder), "--out", str(out), "--prompts", str(file),
        "--mask-token-id", str(MASK_TOKEN_ID), "--eval", f"seen={file}", *small.split(), *more,
    ])  # fmt: skip


PROMPTS = [f"{word} {n}?" for n, word in enumerate(["sum", "cat", "why", "map", "tea"] * 2, 3)]


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("trained")
    return out, train_on(folder, out, "--steps", "150")


def test_the_recipe_teaches_a_drafter_that_is_accepted(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    out, report = trained
    assert report["acceptance"]["seen"]["mean_acceptance_length"] > 1.5
    assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(report))


def test_replay_counts_what_real_decoding_counts(
    target: LlamaForCausalLM, folder: Path, trained: tuple[Path, dict[str, Any]]
) -> None:
    """With the trained drafter, so that drafts are accepted and refused at every position."""
    drafter = Drafter.load(trained[0] / "drafter").double()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = NOTHING
    for prompt in PROMPTS:
        ids = chat_tokens(tokenizer, prompt)
        (answer,) = generate_answers(target, [Request(ids, 0)], 24, STOPS, 1.0, 1, 0)
        replayed = replay(target, drafter, answer)
        assert replayed == speculate(target, drafter, ids, 24, STOPS)[1]
        total += replayed
    accepted_at = [*total.per_position, 0]
    refused_at = [before - after for before, after in pairwise([total.steps, *accepted_at[:-1]])]
    assert all(refused_at)
    assert accepted_at[BLOCK - 2] > 0


def test_the_checkpoint_has_the_fields_and_tensors_of_published_drafters(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    folder = trained[0] / "drafter"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == 4
    assert config["num_target_layers"] == 4
    assert config["dflash_config"] == {
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": [1, 2],
    }
    per_layer = [
        "input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj",
        "post_attention_layernorm", "self_attn.k_norm", "self_attn.k_proj", "self_attn.o_proj",
        "self_attn.q_norm", "self_attn.q_proj", "self_attn.v_proj",
    ]  # fmt: skip
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{i}.{name}.weight" for i in range(2) for name in per_layer}
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == expected
        assert file.get_tensor("fc.weight").shape == (32, 2 * 32)
        assert file.get_tensor("fc.weight").dtype is torch.bfloat16


def test_a_saved_drafter_drafts_as_the_trained_one(drafter: Drafter, tmp_path: Path) -> None:
    """The divisor of the features is in the weights: a loader needs to know nothing of it."""
    with torch.no_grad():
        drafter.fc.input_scale.copy_(torch.linspace(0.1, 30.0, 64))
        for weight in drafter.parameters():
            weight.copy_(weight.bfloat16())
    features = torch.randn(1, 5, 64, dtype=torch.float64) * drafter.fc.input_scale
    drafter.save(tmp_path)
    loaded = Drafter.load(tmp_path, torch.float64)
    assert loaded.config == drafter.config
    assert torch.equal(loaded.fc.input_scale, torch.ones(64, dtype=torch.float64))
    expected, got = drafter.context(features), loaded.context(features)
    assert (got - expected).norm() / expected.norm() < 5e-3


def test_a_run_that_extends_another_keeps_its_held_out_prompts_out(
    folder: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    train_on(folder, tmp_path, "--steps", "1", "--extend", str(trained[0]), "--continued", "0")
    before, after = load_answers(trained[0] / ANSWERS), load_answers(tmp_path / ANSWERS)
    held = [prompt_of(answer) for answer in load_answers(tmp_path / HELD_ANSWERS)]
    assert held == [prompt_of(answer) for answer in load_answers(trained[0] / HELD_ANSWERS)]
    assert len(held) == 1
    assert len(after) > len(before)
    greedy_ones = [prompt_of(a) for a in after if a.first_label == a.prompt_length]
    assert held[0] not in greedy_ones
    known = [prompt_of(a) for a in before if a.first_label == a.prompt_length]
    assert all(greedy_ones.count(prompt) == known.count(prompt) for prompt in known)


def test_varied_prompts_keep_everything_but_the_numbers() -> None:
    text = "Ann's 1 dog ate 12 of 1,500 treats on the 3rd day, 0.75 pounds for $48 (50% off)."
    varied = vary_numbers(text, random.Random(0))
    found = re.fullmatch(
        r"Ann's 1 dog ate (\d+) of 1,500 treats on the 3rd day, 0\.75 pounds "
        r"for \$(\d+) \((\d+)% off\)\.",
        varied,
    )
    assert found
    numbers = [int(n) for n in found.groups()]
    assert numbers != [12, 48, 50]
    assert all(n // 2 <= new <= 2 * n for n, new in zip([12, 48, 50], numbers, strict=True))


def test_written_prompts_are_many_and_the_same_each_time() -> None:
    first = expand_templates(TEMPLATES, chat=300, word_problems=100, seed=7)
    assert first == expand_templates(TEMPLATES, chat=300, word_problems=100, seed=7)
    assert len(first) == len(set(first)) > 400
    assert not any("{" in prompt for prompt in first)


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [(30, 5, (1, 8, 14, 21, 28)), (4, 2, (1, 2)), (2, 1, (0,)), (36, 1, (34,))],
)
def test_tapped_layers_are_spread_and_leave_the_last_one_out(
    layers: int, taps: int, expected: tuple[int, ...]
) -> None:
    assert evenly_spaced_layers(layers, taps) == expected


def test_more_taps_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="no 5 layers to tap"):
        evenly_spaced_layers(4, 5)


def test_a_layer_the_target_does_not_have_is_refused(drafter: Drafter) -> None:
    with pytest.raises(ValueError, match="0 to 3"):
        replace(drafter.config, target_layer_ids=(1, 4))


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="--row-length"):
        pack_rows([Answer(np.arange(10, dtype=np.int32), 2, 2)], 8)
