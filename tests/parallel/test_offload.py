"""Pages of divided models leave the ranks and come back: every rank moves its own part of each page."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvant import LLM, SamplingParams
from kvant.engine.offload import check_tiers
from kvant.errors import NotServable, RankLost
from kvant.kv.offload.config import parse_offload
from kvant.kv.offload.policy import BreakEven
from kvant.kv.offload.sessions import SessionFiles
from kvant.parallel.runner import RankedRunner
from kvant.plan import planning
from tests.models import families, tiny
from tests.parallel.test_equality import make
from tests.parallel.test_lost_ranks import _run as run
from tests.parallel.test_plan import plan
from tests.speculative.engines import make_llm
from tests.speculative.pair import build_pair

PAGE = 4
PROMPTS = [[(7 * n + 5 * j * j + j) % 90 + 4 for j in range(40 + 9 * n)] for n in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)


def opened(path: Path, size: int = 2, **options: Any) -> LLM:
    given = {"page_size": PAGE, "max_model_len": 128, "batch_invariant": True, **options}
    return settled(make(path, size, **given))


def settled(llm: LLM) -> LLM:
    """Restores from one page on; nothing is on its way."""
    engine = llm.engine
    if engine.tiers is not None:
        engine.tiers.policy = BreakEven(PAGE, latency=-1e9)
    end = time.monotonic() + 20
    while engine.is_moving:
        engine.move(0.01)
        assert time.monotonic() < end
    engine.audit()
    return llm


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[object]:
    """One prompt after the other: tokens and the probabilities of three, which show every bit."""
    found: list[object] = []
    for prompt in prompts:
        (result,) = llm.generate([prompt], PARAMS)
        found.append((result.token_ids, result.logprobs))
        settled(llm)
    return found


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[tuple[int, ...]]:
    params, found = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), []
    for prompt in prompts:
        found.append(llm.generate([prompt], params)[0].token_ids)
        settled(llm)
    return found


def forget(llm: LLM) -> None:
    llm.engine.scheduler.allocator.forget_all()


def stats(llm: LLM) -> Any:
    found = llm.engine.stats.offload
    assert found is not None
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("fp8_per_token_head", 2),
        pytest.param("int4_per_token_head", 2, marks=pytest.mark.slow),
        pytest.param("auto", 4, marks=pytest.mark.slow),
        pytest.param("fp8_per_token_head", 8, marks=pytest.mark.slow),
    ],
)
def test_restored_pages_give_the_bits_of_a_run_without_a_break(
    path: Path, dtype: str, size: int, tmp_path: Path
) -> None:
    if size == 8:
        path = tiny.build("llama", tmp_path, num_attention_heads=8, head_dim=16)
    options: dict[str, Any] = {"kv_cache_dtype": dtype}
    if "int4" in dtype:
        options["kv_format_defaults"] = "off"
    llm = opened(path, size, kv_offload="host:4MiB", **options)
    expected = answers(llm)
    assert expected == answers(opened(path, size, enable_prefix_caching=False, **options))
    before = llm.engine.stats.num_computed_tokens
    for _ in range(2):
        forget(llm)
        assert answers(llm) == expected
    assert llm.engine.stats.num_computed_tokens - before <= 2 * len(PROMPTS) * (PAGE + 8)
    assert stats(llm).num_restores == 2 * len(PROMPTS)
    assert stats(llm).host.bad == 0
    stored, pages = stats(llm).host.bytes_stored, stats(llm).host.stored
    assert stored == pages * size * llm.planned.page_bytes, "bytes of all parts count"


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("qwen3_5_text", 2),
        *(
            pytest.param(name, size, marks=pytest.mark.slow)
            for name, size in (
                ("gemma3", 2), ("deepseek_v3", 2), ("mixtral", 2), ("gemma3", 4), ("qwen3_5_text", 4),
                ("deepseek_v3", 4), ("mixtral", 4),
            )
        ),
    ],
)  # fmt: skip
def test_windows_states_latents_and_experts_come_back(
    name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_STATE_STRIDES", {True: 32, False: 32})
    model = tmp_path / name
    if name in tiny.FAMILIES:
        model = tiny.build(name, model)
    else:
        families.build(name, model)
    llm = opened(model, size, kv_offload="host:16MiB", batch_invariant=False)
    expected = tokens(llm)
    forget(llm)
    assert tokens(llm) == expected
    assert stats(llm).num_restores == len(PROMPTS)


@pytest.mark.slow
def test_a_drafters_pages_come_back_on_every_rank(tmp_path: Path) -> None:
    pair = build_pair(tmp_path)
    prompts = [list(prompt) for prompt in pair.prompts[:3]]
    given: dict[str, Any] = {"dtype": "float32", "page_size": PAGE, "max_model_len": 96}
    llm = make_llm(pair, tensor_parallel_size=2, kv_offload="host:16MiB", **given)
    expected, counts = tokens(settled(llm), prompts), [0]
    for _ in range(3):
        counts.append(llm.metrics()["spec_decode_num_accepted_tokens"])
        forget(llm)
        assert tokens(llm, prompts) == expected
    by_turn = [after - before for before, after in pairwise(counts)]
    assert by_turn[0] == by_turn[1] == by_turn[2] > 0
    assert stats(llm).num_restores == 3 * len(prompts)


@pytest.mark.slow
def test_under_pressure_no_token_changes(path: Path) -> None:
    prompts = [PROMPTS[i % 4][: 20 + 3 * i] for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    whole = opened(path, 1, attention_backend="reference", batch_invariant=False)
    expected = [result.token_ids for result in whole.generate(prompts, params)]
    memory = 40 * opened(path).planned.page_bytes
    options: dict[str, Any] = {"kv_cache_memory": memory, "batch_invariant": False}
    llm = opened(path, max_model_len=80, kv_offload="host:1MiB", **options)
    for _ in range(3):
        assert [result.token_ids for result in llm.generate(prompts, params)] == expected
        settled(llm)
    assert stats(llm).num_restores > 0


# -- files -------------------------------------------------------------------------------------


def on_disk(path: Path, directory: Path, **options: Any) -> LLM:
    return opened(path, kv_offload=f"host:4MiB,disk:{directory}:64MiB", **options)


def homes(directory: Path) -> dict[int, Path]:
    """The directory of each rank's files."""
    found = {}
    for path in directory.glob("*/identity.json"):
        rank = int("rank 1 of 2" in path.read_text())
        assert rank not in found, "one identity for each rank"
        found[rank] = path.parent
    return found


def test_files_of_every_rank_survive_the_engine(path: Path, tmp_path: Path) -> None:
    expected = answers(on_disk(path, tmp_path))
    by_rank = homes(tmp_path)
    names = [sorted(file.name for file in by_rank[rank].rglob("*.0")) for rank in (0, 1)]
    assert names[0] == names[1] != []
    llm = on_disk(path, tmp_path)
    before = llm.engine.stats.num_computed_tokens
    assert answers(llm) == expected
    assert llm.engine.stats.num_computed_tokens - before <= len(PROMPTS) * (PAGE + 8)
    assert stats(llm).disk.restored > 0
    four = on_disk(path, tmp_path, kv_cache_dtype="fp8_per_token_head")
    answers(four)
    assert stats(four).disk.restored == 0, "another format is another identity"


@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        ("flipped", 1),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("flipped", 0), ("gone", 0), ("gone", 1))
        ),
    ],
)
def test_a_part_that_is_bad_or_gone_makes_the_page_a_missing_one(
    path: Path, tmp_path: Path, rank: int, fault: str
) -> None:
    expected = answers(on_disk(path, tmp_path), PROMPTS[:1])
    files = sorted(homes(tmp_path)[rank].rglob("*.0"))
    for file in files:
        if fault == "gone":
            file.unlink()
        else:
            data = bytearray(file.read_bytes())
            data[-3] ^= 4
            file.write_bytes(data)
    llm = on_disk(path, tmp_path)
    before = llm.engine.stats.num_computed_tokens
    assert answers(llm, PROMPTS[:1]) == expected
    assert llm.engine.stats.num_computed_tokens - before >= len(PROMPTS[0])
    assert (stats(llm).disk.bad > 0) is (fault == "flipped")
    answers(llm, PROMPTS[1:2])
    forget(llm)
    assert answers(llm, PROMPTS[:1]) == expected
    again = on_disk(path, tmp_path)
    assert answers(again, PROMPTS[:1]) == expected
    assert stats(again).disk.restored > 0, "the parts were written again"


def test_a_rank_that_cannot_write_keeps_no_page(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's writes fail as on a full disk; rank 0's parts alone are of no use and are removed."""
    llm = on_disk(path, tmp_path)
    home = homes(tmp_path)[1]
    for place in range(256):
        (home / f"{place:02x}").write_text("no directory")
    expected = answers(llm)
    end = time.monotonic() + 10
    while list(homes(tmp_path)[0].rglob("*.0")):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert stats(llm).disk.stored == 0
    forget(llm)
    assert answers(llm) == expected
    assert stats(llm).num_restores > 0, "host memory goes on"


def test_sessions_count_what_every_rank_has(path: Path, tmp_path: Path) -> None:
    llm = on_disk(path, tmp_path)
    answers(llm, PROMPTS[:1])
    tiers = llm.engine.tiers
    assert tiers is not None
    assert tiers.files is not None
    windows = llm.engine.scheduler.allocator.every_window
    sessions = SessionFiles(tiers.files.store, windows, PAGE, tiers.files.others)
    hashes = sessions.hashes(PROMPTS[0], "")
    assert sessions.count_saved(hashes) == len(hashes)
    (other,) = tiers.files.others
    other.path(0, hashes[-1]).unlink()
    assert sessions.count_saved(hashes) == len(hashes) - 1
    saved = sessions.save("talk", "", PROMPTS[0], "")
    assert saved.saved_tokens == (len(hashes) - 1) * PAGE


# -- failures ----------------------------------------------------------------------------------


def test_a_rank_lost_while_pages_come_back_ends_the_engine(path: Path) -> None:
    llm = opened(path, kv_offload="host:4MiB")
    answers(llm)
    forget(llm)
    runner = llm.engine.runner
    assert isinstance(runner, RankedRunner)
    (pid,) = runner.ranks.pids
    os.kill(pid, signal.SIGSTOP)
    llm.engine.submit(PROMPTS[0], PARAMS)
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RankLost):
        run(llm.engine)
    assert time.monotonic() - started < 10


def test_the_plan_counts_the_bytes_of_all_ranks(path: Path) -> None:
    one, two, four = (plan(path, size, kv_offload="host:1MiB").tiers[0] for size in (1, 2, 4))
    assert one.tokens == two.tokens
    assert four.tokens == two.tokens // 2, "each of two KV heads is kept twice"


def test_what_several_ranks_cannot_keep_is_refused(path: Path) -> None:
    planned = plan(path, 2, kv_offload="host:1MiB")
    config = parse_offload("host:1MiB,disk:/tmp/kvant-none:1MiB", asked_by="test")
    with pytest.raises(NotServable, match="torchrun"):
        check_tiers(planned, config, is_launched=True)
    check_tiers(planned, parse_offload("host:1MiB", asked_by="test"), is_launched=True)


def test_a_rank_without_its_directory_refuses_to_start(path: Path, tmp_path: Path) -> None:
    """Files of another user, for example: rank 0 says what rank 1 met."""
    answers(on_disk(path, tmp_path), PROMPTS[:1])
    home = homes(tmp_path)[1]
    for file in sorted(home.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    home.rmdir()
    home.write_text("no directory")
    with pytest.raises(RankLost, match="pages cannot be kept"):
        on_disk(path, tmp_path)
