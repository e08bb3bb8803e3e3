"""States of recurrent layers leave the device with the pages before them and come back; no token changes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvant import LLM, SamplingParams
from kvant.errors import BadValue
from kvant.kv.offload.policy import BreakEven
from kvant.kv.offload.sessions import SessionFiles
from kvant.plan import planning
from tests.models import families

PROMPTS = [[5 + (i * i + 3 * i + n) % 110 for i in range(n)] for n in (150, 97, 131)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("hybrids") / "qwen3_5_text"
    families.build("qwen3_5_text", where)
    return where


@pytest.fixture(autouse=True)
def _stride(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_STATE_STRIDES", {True: 32, False: 32})


def opened(path: Path, **options: object) -> LLM:
    given = {
        "device": "cpu", "dtype": "float64", "max_model_len": 240, "page_size": 4, "max_num_seqs": 4,
        **options,
    }  # fmt: skip
    llm = LLM(path, **given)  # type: ignore[arg-type]
    if llm.engine.tiers is not None:
        llm.engine.tiers.policy = BreakEven(4, latency=-1e9)
        settle(llm)
    return llm


def settle(llm: LLM) -> None:
    end = time.monotonic() + 20
    while llm.engine.is_moving:
        llm.engine.move(0.01)
        assert time.monotonic() < end
    llm.engine.audit()


def texts(llm: LLM) -> list[list[int]]:
    """One prompt after the other, then all at once."""
    found = []
    for prompt in PROMPTS:
        found += [list(result.token_ids) for result in llm.generate([prompt], PARAMS)]
        settle(llm)
    together = [list(result.token_ids) for result in llm.generate(PROMPTS, PARAMS)]
    settle(llm)
    assert together == found
    return found


def test_states_come_back_from_host_memory(path: Path) -> None:
    expected = texts(opened(path, enable_prefix_caching=False))
    llm = opened(path, kv_offload="host:64MiB")
    assert texts(llm) == expected
    llm.engine.scheduler.allocator.forget_all()
    before = llm.engine.stats.num_computed_tokens
    assert texts(llm) == expected
    computed = llm.engine.stats.num_computed_tokens - before
    assert computed <= 2 * len(PROMPTS) * (32 + 12)
    stats = llm.engine.stats.offload
    assert stats is not None
    assert stats.num_restored_tokens >= sum(len(p) - 36 for p in PROMPTS)
    assert stats.host.bad == 0
    assert llm.engine.scheduler.states.num_kept <= llm.engine.limits.state_slots


@pytest.mark.slow
def test_few_kept_states_and_a_small_pool_change_nothing(path: Path) -> None:
    """States and pages come and go while others run."""
    expected = texts(opened(path, enable_prefix_caching=False))
    given: dict[str, object] = {"max_num_batched_tokens": 48}
    given["state_cache_memory"] = 2 * opened(path).plan.bytes_per_sequence
    planned = opened(path, **given).planned
    memory = planned.bytes_for(240) + 2 * planned.page_bytes
    llm = opened(path, **given, kv_cache_memory=memory, kv_offload="host:64MiB")
    for _ in range(3):
        assert texts(llm) == expected
    stats = llm.engine.stats.offload
    assert stats is not None
    assert stats.num_restored_tokens > 0


@pytest.mark.parametrize("order", [(0, 1, 0, 1), (2, 0, 3, 1, 4, 1, 4, 5)])
def test_loads_neither_lose_their_state_nor_block_a_pool_for_one_sequence(
    path: Path, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_STATE_STRIDES", {True: 512, False: 512})
    text = [5 + (i * i + 3 * i) % 110 for i in range(260)]
    other = [6 + (i * i + i) % 110 for i in range(130)]
    every = (
        text[:200], other[:100] + text[:120], text[100:230], text[:200] + other[:30], text[:65],
        text[:150] + other[:40],
    )  # fmt: skip
    prompts = [every[i] for i in order]
    given: dict[str, object] = {
        "dtype": "float32", "max_model_len": 300, "max_num_seqs": 1, "max_num_batched_tokens": 64,
    }  # fmt: skip
    cold = opened(path, **given, enable_prefix_caching=False)
    expected = [list(cold.generate([prompt], PARAMS)[0].token_ids) for prompt in prompts]
    memory = opened(path, **given).planned.bytes_for(300)
    llm = opened(path, **given, kv_cache_memory=memory, kv_offload="host:64MiB")
    seen: set[int] = set()
    for number, prompt, answer in zip(order, prompts, expected, strict=True):
        (result,) = llm.generate([prompt], PARAMS)
        settle(llm)
        assert list(result.token_ids) == answer
        if number in seen and len(prompt) > 196:
            assert result.num_cached_tokens > len(prompt) - 8
        seen.add(number)
    together = llm.generate(prompts, PARAMS)
    assert [list(result.token_ids) for result in together] == expected


@pytest.mark.slow
def test_states_survive_the_engine_in_files_and_sessions_count_them(
    path: Path, tmp_path: Path
) -> None:
    expected = texts(opened(path, enable_prefix_caching=False))
    offload = f"host:64MiB,disk:{tmp_path}:1GiB"
    first = opened(path, kv_offload=offload)
    assert texts(first) == expected
    llm = opened(path, kv_offload=offload)
    assert texts(llm) == expected
    stats = llm.engine.stats.offload
    assert stats is not None
    assert stats.num_restored_tokens >= sum(len(p) - 36 for p in PROMPTS)
    tiers = llm.engine.tiers
    assert tiers is not None
    assert tiers.files is not None
    windows = llm.engine.scheduler.allocator.every_window
    sessions = SessionFiles(tiers.files.store, windows, 4)
    hashes = sessions.hashes(PROMPTS[0], "")
    saved = sessions.count_saved(hashes)
    assert 0 < saved < len(PROMPTS[0]) // 4 + 1
    tiers.files.store.path(len(windows) - 1, hashes[saved - 1]).unlink()
    assert sessions.count_saved(hashes) < saved, "no state stands behind these pages"


def test_without_kept_states_tiers_are_refused(path: Path) -> None:
    with pytest.raises(BadValue, match="without kept states"):
        opened(path, kv_offload="host:1MiB", state_cache_memory="1KiB")
