"""Prefill in one divided engine, decode in another: each rank reads its parts from the rank of its number."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from kvant import LLM
from kvant.errors import NotServable
from kvant.kv.transfer import taker
from kvant.parallel import ranks
from kvant.parallel.runner import RankedRunner
from kvant.parallel.transfer import RankedPeer
from tests import forked
from tests.kv.transfer.engines import free_address
from tests.models import families, tiny
from tests.parallel import stand_in_nixl
from tests.parallel.test_offload import PAGE, PROMPTS, answers, opened, settled, stats, tokens

HAS_NIXL = importlib.util.find_spec("nixl") is not None
WHOLE_PAGES = sum((len(prompt) - 1) // PAGE for prompt in PROMPTS)


def _rank(link: socket.socket, pulse: socket.socket) -> None:
    sys.modules["nixl"] = stand_in_nixl
    forked._rank(link, pulse)


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch, forked_ranks: None) -> None:
    """Every process of this test has the stand-in for NIXL."""
    monkeypatch.setitem(sys.modules, "nixl", stand_in_nixl)
    monkeypatch.setattr(ranks, "spawn", lambda *given: forked._start(_rank, *given))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama", tmp_path_factory.mktemp("model"))


def exchanging(path: Path, transfer: str, size: int = 2, **options: Any) -> LLM:
    return opened(path, size, kv_offload="host:4MiB", kv_transfer=transfer, **options)


def pair(path: Path, size: int = 2, **options: Any) -> tuple[LLM, LLM]:
    """An engine that has the prompts' pages, and one that takes them."""
    address = free_address()
    prefill = exchanging(path, f"give:{address}", size, **options)
    tokens(prefill)
    return prefill, exchanging(path, f"take:{address}", size, **options)


def pid_of(llm: LLM) -> int:
    assert isinstance(llm.engine.runner, RankedRunner)
    (pid,) = llm.engine.runner.ranks.pids
    return pid


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("fp8_per_token_head", 2),
        pytest.param("auto", 2, marks=pytest.mark.slow),
        pytest.param("auto", 4, marks=pytest.mark.slow),
    ],
)
def test_the_decoder_computes_last_tokens_only(path: Path, dtype: str, size: int) -> None:
    expected = answers(opened(path, size, kv_cache_dtype=dtype))
    prefill, decode = pair(path, size, kv_cache_dtype=dtype)
    assert answers(decode) == expected
    assert decode.engine.stats.num_computed_tokens <= len(PROMPTS) * (PAGE + 8)
    peer = stats(decode).peer
    assert peer.restored == WHOLE_PAGES
    assert peer.bytes_restored == WHOLE_PAGES * size * decode.planned.page_bytes
    assert peer.bad == 0
    assert stats(prefill).num_restores == 0


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3"])
def test_windows_and_latents_are_exchanged(name: str, tmp_path: Path) -> None:
    model = tmp_path / name
    if name in tiny.FAMILIES:
        model = tiny.build(name, model)
    else:
        families.build(name, model)
    expected = tokens(opened(model))
    _prefill, decode = pair(model)
    assert tokens(decode) == expected
    assert stats(decode).peer.restored > 0
    assert stats(decode).num_restores == len(PROMPTS)


@pytest.mark.usefixtures("_stand_in")
def test_a_bad_part_of_one_rank_makes_the_page_a_missing_one(path: Path) -> None:
    expected = answers(opened(path), PROMPTS[:1])
    prefill, decode = pair(path)
    assert decode.engine.tiers is not None
    (source,) = decode.engine.tiers._sources
    assert isinstance(source, RankedPeer)
    giver = source._own.giver
    assert giver is not None
    (part,) = giver.others
    (group,) = part.groups
    memory = os.open(f"/proc/{pid_of(prefill)}/mem", os.O_RDWR)
    for page in range(1, 200):
        os.pwrite(memory, b"bad page", part.first + page * group.stride)
    os.close(memory)
    assert answers(decode, PROMPTS[:1]) == expected
    assert decode.engine.stats.num_computed_tokens >= len(PROMPTS[0])
    assert stats(decode).peer.bad > 0
    assert stats(decode).peer.restored == 0


@pytest.mark.slow
@pytest.mark.usefixtures("_stand_in")
def test_a_rank_that_vanishes_costs_the_restore_alone(path: Path) -> None:
    """The other engine's rank 0 still tells where pages lie, and its rank 1 is gone."""
    expected = answers(opened(path), PROMPTS[:1])
    prefill, decode = pair(path)
    os.kill(pid_of(prefill), signal.SIGKILL)
    assert answers(decode, PROMPTS[:1]) == expected
    assert decode.engine.stats.num_computed_tokens >= len(PROMPTS[0])
    assert stats(decode).peer.restored == 0
    assert decode.engine.stats.num_held_pages == 0


@pytest.mark.slow
@pytest.mark.usefixtures("_stand_in")
def test_every_rank_converts_its_parts(path: Path) -> None:
    stored, own = "fp8_per_token_head", "int8_per_token_head"
    address = free_address()
    prefill = exchanging(path, f"give:{address}", kv_cache_dtype=stored)
    expected = tokens(prefill)
    decode = exchanging(path, f"take:{address}", kv_cache_dtype=own, kv_transfer_convert=stored)
    assert [len(found) for found in tokens(decode)] == [len(found) for found in expected]
    assert decode.engine.stats.num_computed_tokens <= len(PROMPTS) * (PAGE + 12)
    assert stats(decode).peer.restored == WHOLE_PAGES
    assert stats(decode).peer.bad == 0


@pytest.mark.usefixtures("_stand_in")
def test_an_engine_of_other_ranks_is_refused_with_a_way_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taker, "ANSWER_SECONDS", 10.0)
    address = free_address()
    _prefill = exchanging(path, f"give:{address}")
    for convert in (None, "float32"):
        with pytest.raises(NotServable, match="it runs 2 ranks, here one rank") as found:
            exchanging(path, f"take:{address}", 1, kv_transfer_convert=convert)
        assert "--tensor-parallel-size 2" in str(found.value)


@pytest.mark.slow
@pytest.mark.usefixtures("real_processes")
@pytest.mark.skipif(not HAS_NIXL, reason="no NIXL")
def test_ranks_exchange_pages_over_nixl(path: Path) -> None:
    expected = answers(opened(path))
    prefill, decode = pair(path)
    assert answers(decode) == expected
    assert decode.engine.stats.num_computed_tokens <= len(PROMPTS) * (PAGE + 8)
    assert stats(decode).peer.restored == WHOLE_PAGES
    os.kill(pid_of(prefill), signal.SIGKILL)
    settled(decode)
    before = decode.engine.stats.num_computed_tokens
    decode.engine.scheduler.allocator.forget_all()
    assert decode.engine.tiers is not None
    decode.engine.tiers.forget_all()
    assert answers(decode) == expected, "prompts are computed without the other engine"
    assert decode.engine.stats.num_computed_tokens - before >= sum(map(len, PROMPTS))
