"""Ranks release pages behind windows, each its own bytes of the same pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvant import SamplingParams
from tests.models import tiny
from tests.parallel.test_equality import make

LONG = [(7 * j * j + 3 * j) % 120 + 3 for j in range(60)]
PROMPTS = [LONG] + [
    [(11 * i + 5 * j * j + j) % 120 + 3 for j in range(3 + (13 * i) % 47)] for i in range(7)
]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize(
    ("family", "memory"),
    [("gemma3", 60), ("mistral", 24), pytest.param("gpt_oss", 60, marks=pytest.mark.slow)],
)
def test_two_ranks_share_page_tables_of_windows_under_pressure(
    family: str, memory: int, tmp_path: Path
) -> None:
    path = tiny.build(family, tmp_path)
    options = {"page_size": 4, "max_model_len": 104, "max_num_batched_tokens": 16}
    one = make(path, 1, kv_cache_memory="4MiB", attention_backend="reference", **options)
    two = make(path, 2, kv_cache_memory=f"{memory}KiB", **options)
    layout = two.planned.layout
    assert layout is not None
    assert layout.groups[-1].window == tiny.WINDOW
    expected = [result.token_ids for result in one.generate(PROMPTS, GREEDY)]
    for _ in range(2):  # the second time from the cache, as far as it is left
        assert [result.token_ids for result in two.generate(PROMPTS, GREEDY)] == expected
    assert two.engine.stats.num_preemptions > 0
    two.engine.audit()
    page, whole = layout.superblock_bytes, one.planned.layout
    assert whole is not None
    assert 2 * page == whole.superblock_bytes  # which is what one device's page takes


@pytest.mark.slow
def test_two_ranks_release_wide_rows_under_pressure(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    options = {
        "page_size": 4, "max_model_len": 104, "max_num_batched_tokens": 16,
        "kv_cache_dtype": "int4_per_token_head", "kv_format_defaults": "off",
        "kv_recent_tokens": tiny.WINDOW, "kv_sink_tokens": 3,
    }  # fmt: skip
    one = make(path, 1, kv_cache_memory="4MiB", attention_backend="reference", **options)
    two = make(path, 2, kv_cache_memory="60KiB", **options)
    layout = two.planned.layout
    assert layout is not None
    assert [(group.window, group.sink) for group in layout.groups] == [(None, 0), (tiny.WINDOW, 3)]
    expected = [result.token_ids for result in one.generate(PROMPTS, GREEDY)]
    for _ in range(2):
        assert [result.token_ids for result in two.generate(PROMPTS, GREEDY)] == expected
    assert two.engine.stats.num_preemptions > 0
    two.engine.audit()
