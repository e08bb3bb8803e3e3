"""Models with recurrent layers in the engine: transformers' tokens, however prompts are cut and batched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvant import LLM, SamplingParams
from kvant.errors import BadValue, NotServable
from kvant.execution.runner import ModelRunner
from kvant.kv import groups
from kvant.kv.dtype import KVDtype
from kvant.models.quiet import quiet_transformers
from kvant.plan import planning
from tests.models import families
from tests.speculative import scripted
from tests.speculative.recorded import Again

NAMES = ("qwen3_5_text", "falcon_h1", "lfm2")
MODELS = [
    "qwen3_5_text",
    "lfm2",
    pytest.param("falcon_h1", marks=pytest.mark.slow),
]
LENGTHS = (70, 1, 129, 64, 17)
PROMPTS = [[5 + (i * i + n) % 110 for i in range(n)] for n in LENGTHS]
NUM_TOKENS = [40 - 4 * i for i in range(len(PROMPTS))]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in NUM_TOKENS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("hybrids")
    for name in NAMES:
        families.build(name, where / name)
    return {name: where / name for name in NAMES}


def opened(path: Path, **options: object) -> LLM:
    given = {"device": "cpu", "dtype": "float32", "max_model_len": 300, "page_size": 16, **options}
    return LLM(path, **given)  # type: ignore[arg-type]


def texts(llm: LLM) -> list[list[int]]:
    found = [list(result.token_ids) for result in llm.generate(PROMPTS, PARAMS)]
    llm.engine.audit()
    return found


def tight_pool(path: Path) -> dict[str, int]:
    """Returns options with a pool for one sequence of 200 tokens, in which the prompts preempt each other."""
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 200, "page_size": 4}
    plan = opened(path, **given).planned
    # A sequence of Qwen3.5 holds two of three superblocks, so a second one starts only with a fourth.
    spare = plan.page_bytes if path.name == "qwen3_5_text" else 0
    return {**given, "kv_cache_memory": plan.bytes_for(200) + spare}


def transformers(path: Path, dtype: torch.dtype = torch.float32) -> list[list[int]]:
    found = []
    with quiet_transformers(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=dtype)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        for prompt, count in zip(PROMPTS, NUM_TOKENS, strict=True):
            ids = torch.tensor([prompt])
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count
            )
            found.append(made[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_transformers(models: dict[str, Path], name: str) -> None:
    expected = transformers(models[name])
    assert len({token for text in expected for token in text}) > 20
    whole = opened(models[name], max_num_seqs=8, max_num_batched_tokens=1000)
    assert texts(whole) == expected
    cut = opened(models[name], max_num_seqs=3, max_num_batched_tokens=41)
    assert texts(cut) == expected
    # Sequences lose their pages and start over from a state of zeros.
    tight = opened(models[name], **tight_pool(models[name]))
    assert texts(tight) == expected
    assert tight.engine.stats.num_preemptions > 0


@pytest.mark.parametrize("name", MODELS)
def test_answers_in_float64_are_transformers(models: dict[str, Path], name: str) -> None:
    expected = transformers(models[name], torch.float64)
    given = {"dtype": "float64", "max_num_seqs": 3, "max_num_batched_tokens": 41}
    assert texts(opened(models[name], **given)) == expected


@pytest.mark.parametrize("name", MODELS)
def test_recorded_steps_give_the_same(models: dict[str, Path], name: str) -> None:
    """Their padding touches the scratch row alone."""
    llm = opened(models[name], max_num_seqs=3, max_num_batched_tokens=64)
    expected = texts(llm)
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    limits = llm.engine.limits
    runner.record(Again(), limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len)
    assert texts(llm) == expected


def test_a_cancelled_request_leaves_no_state_behind(models: dict[str, Path]) -> None:
    llm = opened(models["qwen3_5_text"], max_num_seqs=1, max_num_batched_tokens=64)
    alone = texts(llm)
    number = llm.engine.submit(PROMPTS[0], PARAMS[-1])
    for _ in range(9):
        llm.engine.step()
    llm.engine.cancel(number)
    assert texts(llm) == alone


def test_a_bfloat16_state_is_stored_and_counted(models: dict[str, Path]) -> None:
    wide = opened(models["qwen3_5_text"], max_num_seqs=2)
    narrow = opened(models["qwen3_5_text"], max_num_seqs=2, state_dtype="bf16")
    for llm in (wide, narrow):
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        assert runner.states is not None
        layout = runner.pool.arena.layout
        assert layout == llm.planned.layout
        assert layout.of_states is not None
        assert layout.of_states.used_bytes == llm.plan.bytes_per_sequence
        assert layout.waste <= groups.MOST_WASTE
        assert runner.pool.num_bytes == llm.planned.memory.kv_bytes
    spec = narrow.plan.layers[0].states[1]
    assert spec.choice.dtype is KVDtype.BFLOAT16
    assert spec.choice.because == "state_dtype='bf16'"
    same = [a == b for a, b in zip(texts(wide), texts(narrow), strict=True)]
    assert any(same)


@pytest.mark.parametrize("name", ["fp8_per_token_head", "int8_per_token_head"])
def test_a_state_in_codes_is_rounded_at_every_step(models: dict[str, Path], name: str) -> None:
    wide = opened(models["qwen3_5_text"], max_num_seqs=2)
    llm = opened(models["qwen3_5_text"], max_num_seqs=2, state_dtype=name)
    layer = llm.plan.layers[0]
    heads, values, keys = layer.states[1].geometry.shape
    assert layer.states[1].bytes_per_sequence == heads * values * (keys + 4)
    found, expected = texts(llm), texts(wide)
    assert texts(llm) == found
    assert [text[0] for text in found] == [
        text[0] for text in expected
    ]  # prompts are not rounded inside
    assert found != expected


def test_what_a_state_cannot_be_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    hybrid = models["qwen3_5_text"]
    with pytest.raises(NotServable, match="float16"):
        opened(hybrid, state_dtype="float16")
    with pytest.raises(NotServable, match="error feedback") as refused:
        opened(hybrid, state_dtype="int8_feedback")
    assert any("bfloat16" in str(way) for way in refused.value.ways_out)
    with pytest.raises(NotServable, match="error feedback"):
        opened(hybrid, kv_cache_rules=["linear_attention:state=int8_feedback"])
    with pytest.raises(NotServable, match="conv state"):
        opened(hybrid, conv_state_dtype="fp8")
    with pytest.raises(BadValue, match="no layer with a recurrent state"):
        opened(hybrid, kv_cache_rules=["3:state=bf16"])
    config = json.loads((hybrid / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mamba_ssm_dtype": "bfloat16"}))
    (tmp_path / "model.safetensors").symlink_to(hybrid / "model.safetensors")
    wished = opened(tmp_path).plan.layers[0].states[1].choice
    assert (wished.dtype, wished.because) == (KVDtype.BFLOAT16, "config.json: mamba_ssm_dtype")


@pytest.mark.parametrize("name", MODELS)
def test_drafts_change_no_token(models: dict[str, Path], name: str) -> None:
    """Every seventh token is drafted wrong; states go on behind the last one that is right."""
    asked = {
        "method": "tests.speculative.scripted:METHOD",
        "num_speculative_tokens": 4,
        "adaptive": False,
    }
    given = {"max_num_seqs": 3, "max_num_batched_tokens": 41}
    expected = texts(opened(models[name], **given))
    known = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    for options in (given, tight_pool(models[name])):
        llm = opened(models[name], **options, speculative_config=asked)
        assert llm.engine.limits.draft_states == 4 * llm.engine.limits.max_num_seqs
        scripted.speculate(llm.engine, known, wrong_every=7)
        assert texts(llm) == expected
        assert texts(llm) == expected  # from the prefix cache, where there was room
        stats = llm.engine.stats.speculation
        assert stats is not None
        assert 0.3 < stats.acceptance_rate < 0.9
        if options is not given:
            assert llm.engine.stats.num_preemptions > 0


@pytest.mark.parametrize("name", MODELS)
def test_batch_invariant_numbers_are_the_same_however_steps_are_made(
    models: dict[str, Path], name: str
) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=3)] * 3
    prompts = [PROMPTS[0][:30], PROMPTS[4], PROMPTS[1]]

    def numbers(llm: LLM, some: list[list[int]]) -> list[object]:
        made = llm.generate(some, params[: len(some)])
        return [(list(one.token_ids), one.logprobs) for one in made]

    given = {"batch_invariant": True, "page_size": 4, "max_model_len": 60}
    alone = opened(models[name], **given, max_num_seqs=1, max_num_batched_tokens=300)
    expected = [numbers(alone, [prompt])[0] for prompt in prompts]
    together = opened(models[name], **given, max_num_seqs=3, max_num_batched_tokens=23)
    assert numbers(together, prompts) == expected
    assert numbers(together, prompts) == expected  # from the prefix cache
    least = together.planned.bytes_for(60)
    tight = opened(models[name], **given, max_num_seqs=3, kv_cache_memory=least)
    assert numbers(tight, prompts) == expected
    asked = {"method": "tests.speculative.scripted:METHOD", "num_speculative_tokens": 2}
    drafting = opened(models[name], **given, max_num_seqs=3, speculative_config=asked)
    answers = [list(one[0]) for one in expected]  # type: ignore[index]
    known = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    scripted.speculate(drafting.engine, known, wrong_every=5)
    assert numbers(drafting, prompts) == expected


def test_steps_without_drafts_are_recorded_beside_others(models: dict[str, Path]) -> None:
    asked = {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False}
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 64}
    expected = texts(opened(models["lfm2"], **options))
    llm = opened(models["lfm2"], **options, speculative_config=asked)
    runner, limits = llm.engine.runner, llm.engine.limits
    assert isinstance(runner, ModelRunner)
    runner.record(Again(), limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len)
    assert texts(llm) == expected
    drafting = llm.engine.stats.speculation
    assert drafting is not None
    assert drafting.num_plain_steps > 0
    assert drafting.num_drafts > 0


def answers(llm: LLM, prompts: list[list[int]], count: int = 12) -> list[tuple[list[int], int]]:
    """Each prompt alone, after the others: its tokens, and how many came from the cache."""
    found = []
    for prompt in prompts:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        (result,) = llm.generate([prompt], [params])
        found.append((list(result.token_ids), result.num_cached_tokens))
    llm.engine.audit()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_hits_give_the_tokens_of_cold_runs(
    models: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_STATE_STRIDES", {True: 64, False: 64})
    text = [5 + (i * i + 3 * i) % 110 for i in range(260)]
    other = [6 + (i * i + i) % 110 for i in range(90)]
    prompts = [
        text[:200],
        text[:200],  # again: up to where its last whole page ended
        text[:200] + other[:50],  # goes on
        text[:150] + other,  # differs from token 150 on: up to the multiple of 64 before
        text[:40] + other,  # before any place where a state is kept
        other + text[:150],  # shifted: nothing in common
        [*other, *text[:150], 7, 8, 9],
    ]
    cold = opened(models[name], enable_prefix_caching=False, max_num_seqs=2)
    warm = opened(models[name], max_num_seqs=2, state_cache_memory=9 * cold.plan.bytes_per_sequence)
    expected, found = answers(cold, prompts), answers(warm, prompts)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    # The sixth ends 32 tokens behind a multiple of 64: too few for a step that keeps its state.
    assert [cached for _, cached in found] == [0, 192, 192, 128, 0, 0, 192]
    # One slot: the last state alone is kept, and every answer is the same.
    least = opened(models[name], max_num_seqs=2, state_cache_memory=cold.plan.bytes_per_sequence)
    assert [tokens for tokens, _ in answers(least, prompts)] == [tokens for tokens, _ in expected]
    assert sum(cached for _, cached in answers(least, prompts[:2])) == 192


def test_few_tokens_behind_a_kept_state_take_one_step(models: dict[str, Path]) -> None:
    llm = opened(models["qwen3_5_text"], max_num_seqs=2)
    text = [5 + (i * i + 3 * i) % 110 for i in range(240)]
    steps = []
    for prompt in (text[:200], text):
        before = llm.engine.stats.num_steps
        answers(llm, [prompt], 1)
        steps.append(llm.engine.stats.num_steps - before)
    assert steps == [2, 1]


def test_hits_in_a_full_pool(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that share beginnings run together, lose their pages, and begin again from kept states."""
    monkeypatch.setattr(planning, "_STATE_STRIDES", {True: 32, False: 32})
    path = models["qwen3_5_text"]
    base = [5 + (i * i + 3 * i) % 110 for i in range(150)]
    prompts = [base[: 130 + i] + [9 + i] * (3 * i) for i in range(6)]
    params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True) for _ in prompts]
    cold = opened(path, enable_prefix_caching=False, max_num_seqs=6)
    expected = [list(result.token_ids) for result in cold.generate(prompts, params)]
    given = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 240, "page_size": 4}
    given["state_cache_memory"] = 3 * cold.plan.bytes_per_sequence
    planned = opened(path, **given).planned
    llm = opened(path, **given, kv_cache_memory=planned.bytes_for(240) + 2 * planned.page_bytes)
    for _ in range(2):
        assert [list(result.token_ids) for result in llm.generate(prompts, params)] == expected
        llm.engine.audit()
    assert llm.engine.stats.num_preemptions > 0


def test_a_cancelled_request_keeps_no_state(models: dict[str, Path]) -> None:
    llm = opened(models["qwen3_5_text"], max_num_seqs=2)
    number = llm.engine.submit([5 + i % 90 for i in range(200)], PARAMS[0])
    for _ in range(4):
        llm.engine.step()
    assert llm.engine.scheduler.states.num_kept == 1
    llm.engine.cancel(number)
    assert llm.engine.scheduler.states.num_kept == 0
    llm.engine.audit()
