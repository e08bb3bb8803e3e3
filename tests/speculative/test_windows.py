"""Pages behind windows are released beside a drafter too, once their tokens are verified."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvant.engine.llm import LLM
from kvant.kv.pages import SCRATCH
from kvant.kv.spec import Role
from kvant.sampling.sampling_params import SamplingParams
from tests.speculative.engines import make_llm
from tests.speculative.pair import Pair

WINDOW = 12
GREEDY = SamplingParams(temperature=0, max_tokens=44, ignore_eos=True)


def change(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def as_windowed(pair: Pair, directory: Path, name: str) -> Pair:
    """The pair's weights in models with windows.

    name: what has some. mixed: two of the target's layers. all: every layer of the target. both: those, and
    a draft layer.
    """
    target, draft = directory / "target", directory / "draft"
    shutil.copytree(pair.target, target)
    shutil.copytree(pair.draft, draft)
    fields = {"sliding_window": WINDOW, "head_dim": 16}
    if name == "mixed":
        kinds = ["sliding_attention", "full_attention"] * 2
        change(
            target, model_type="ministral", architectures=["MinistralForCausalLM"], layer_types=kinds,
            **fields,
        )  # fmt: skip
    else:
        change(target, model_type="mistral", architectures=["MistralForCausalLM"], **fields)
    if name == "both":
        change(draft, layer_types=["sliding_attention", "full_attention"], sliding_window=20)
    return Pair(target, draft, pair.model, pair.drafter, pair.prompts)


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        pytest.param("mixed", [None, 12], marks=pytest.mark.slow),
        pytest.param("all", [None, 12], marks=pytest.mark.slow),
        ("both", [None, 20, 12]),
    ],
)
def test_tokens_are_those_of_plain_decoding_under_pressure(
    pair: Pair, name: str, windows: list[int | None], tmp_path: Path
) -> None:
    pair = as_windowed(pair, tmp_path, name)
    prompts = [list(prompt) for prompt in pair.prompts] * 2
    options = {"page_size": 4, "max_model_len": 112, "kv_cache_dtype": "float32"}
    plain = make_llm(pair, plain=True, **options)
    expected = [r.token_ids for r in plain.generate(prompts, GREEDY)]
    llm = make_llm(pair, **{**options, "kv_cache_memory": "240KB"})
    layout = llm.planned.layout
    assert layout is not None
    assert [group.window for group in layout.groups] == windows
    assert layout.holds(Role.DRAFT)
    assert llm.engine.runner.pool.num_bytes <= 240_000  # type: ignore[attr-defined]
    engine, released = llm.engine, 0
    numbers = [engine.submit(prompt, GREEDY) for prompt in prompts]
    results = {}
    while engine.has_work:
        for piece in engine.step():
            if piece.result is not None:
                results[piece.number] = piece.result.token_ids
        for sequence in engine.scheduler.sequences():
            released += any(SCRATCH in held for held in sequence.held)
        engine.audit()
    assert [results[number] for number in numbers] == expected
    assert released > 0
    assert engine.stats.num_preemptions > 0
    _some_stood(llm)
    again = [
        r.token_ids for r in llm.generate(prompts, GREEDY)
    ]  # from the cache as far as it is left
    assert again == expected


def _some_stood(llm: LLM) -> None:
    found = llm.metrics()
    accepted = found["spec_decode_num_accepted_tokens"]
    assert 0 < accepted < found["spec_decode_num_draft_tokens"]


@pytest.mark.slow
def test_wide_rows_are_released_beside_a_drafter(pair: Pair) -> None:
    prompts = [list(prompt) for prompt in pair.prompts] * 2
    options = {
        "page_size": 4, "max_model_len": 112, "kv_cache_dtype": "int4_per_token_head",
        "kv_format_defaults": "off", "kv_recent_tokens": WINDOW, "kv_sink_tokens": 3,
    }  # fmt: skip
    plain = make_llm(pair, plain=True, **options)
    expected = [r.token_ids for r in plain.generate(prompts, GREEDY)]
    llm = make_llm(pair, **{**options, "kv_cache_memory": "165KB"})
    layout = llm.planned.layout
    assert layout is not None
    assert [(group.window, group.sink) for group in layout.groups] == [(None, 0), (WINDOW, 3)]
    assert layout.holds(Role.DRAFT)
    for _ in range(2):
        assert [r.token_ids for r in llm.generate(prompts, GREEDY)] == expected
        llm.engine.audit()
    assert llm.engine.stats.num_preemptions > 0
    _some_stood(llm)
