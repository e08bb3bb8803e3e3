"""Prefill in one engine, decode in another: pages move from memory to memory, and no token changes.

Without NIXL, memory of this process stands in for it: what engines tell each other is the same.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvant.engine.engine import Engine
from kvant.errors import NotServable
from kvant.kv.transfer import memory, reader, taker
from kvant.kv.transfer.memory import ReadFailed, require_nixl
from tests.engine.fakes import answer
from tests.kv.transfer.engines import (
    IDENTITY,
    PAGE,
    GivingProcess,
    exchanging,
    free_address,
    prompt,
    run,
)

HAS_NIXL = importlib.util.find_spec("nixl") is not None


class LocalMemory:
    """As `RemoteMemory`, within one process. fails: the next read does not end well."""

    fails = False

    def __init__(self, name: str) -> None:
        self.metadata = f"{name} {uuid.uuid4()}".encode()

    def register(self, address: int, num_bytes: int) -> None: ...

    def meet(self, metadata: bytes) -> str:
        return metadata.decode()

    def part(self, name: str) -> None: ...

    def read(self, name: str, pieces: Sequence[tuple[int, int, int]]) -> None:
        if LocalMemory.fails:
            raise ReadFailed("the other end is gone")
        for to, at, size in pieces:
            ctypes.memmove(to, at, size)

    def close(self) -> None: ...


@pytest.fixture(
    params=["local", pytest.param("nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="no NIXL"))]
)
def _memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(taker, "RETRY_SECONDS", 0.2)
    if request.param == "local":
        monkeypatch.setattr("kvant.kv.transfer.reader.RemoteMemory", LocalMemory)
        monkeypatch.setattr("kvant.kv.transfer.giver.RemoteMemory", LocalMemory)
    yield
    LocalMemory.fails = False


@pytest.mark.usefixtures("_memory")
def test_the_decoder_computes_last_tokens_only() -> None:
    address = free_address()
    prefill, _ = exchanging(give=address)
    decode, runner = exchanging(take=address)
    for number in range(3):
        assert run(prefill, prompt(number), num_tokens=1) == answer(prompt(number), 1)
    for number in range(3):
        assert run(decode, prompt(number)) == answer(prompt(number), 6)
    assert runner.num_run_tokens <= 3 * (PAGE + 6)
    stats = decode.stats.offload
    assert stats is not None
    assert stats.peer is not None
    assert stats.peer.restored == 3 * ((40 - 1) // PAGE)
    assert stats.peer.bad == 0


@pytest.mark.usefixtures("_memory")
def test_pages_are_found_by_their_salt_alone() -> None:
    address = free_address()
    prefill, _ = exchanging(give=address)
    decode, runner = exchanging(take=address)
    run(prefill, prompt(0), num_tokens=1, salt="a")
    run(decode, prompt(0), salt="b")
    assert runner.num_run_tokens >= 40
    before = runner.num_run_tokens
    assert run(decode, prompt(0), salt="a") == answer(prompt(0), 6)
    assert runner.num_run_tokens - before <= PAGE + 6


FIELDS = [name for name in IDENTITY.fields if name not in ("byte_order", "scheme")]


@pytest.mark.usefixtures("_memory")
@pytest.mark.parametrize("field", FIELDS)
def test_an_engine_of_another_identity_is_refused_by_the_field(field: str) -> None:
    address = free_address()
    prefill, _ = exchanging(give=address)
    run(prefill, prompt(0), num_tokens=1)
    with pytest.raises(NotServable, match=f"{field} is {IDENTITY.fields[field] or 'empty'}"):
        exchanging(take=address, identity=replace(IDENTITY, **{field: "other"}))


@pytest.mark.usefixtures("_memory")
@pytest.mark.parametrize(
    ("theirs", "mine", "words"),
    [
        (2, 1, "it runs 2 ranks, here one rank"),
        (1, 2, "it runs one rank, here 2 ranks"),
        (4, 2, "it runs 4 ranks, here 2 ranks"),
    ],
)
def test_an_engine_divided_otherwise_is_refused_with_a_way_out(
    theirs: int, mine: int, words: str
) -> None:
    address = free_address()
    prefill, _ = exchanging(give=address, num_ranks=theirs)
    run(prefill, prompt(0), num_tokens=1)
    with pytest.raises(NotServable, match=f"{words}: a rank reads") as found:
        exchanging(take=address, num_ranks=mine)
    assert f"--tensor-parallel-size {theirs}" in str(found.value)


@pytest.mark.usefixtures("_memory")
def test_an_engine_that_begins_later_is_met_then() -> None:
    address = free_address()
    decode, runner = exchanging(take=address)
    assert run(decode, prompt(0)) == answer(prompt(0), 6)
    assert runner.num_run_tokens >= 40
    prefill, _ = exchanging(give=address)
    run(prefill, prompt(1), num_tokens=1)
    _wait_until_met(decode)
    before = runner.num_run_tokens
    assert run(decode, prompt(1)) == answer(prompt(1), 6)
    assert runner.num_run_tokens - before <= PAGE + 6


@pytest.mark.usefixtures("_memory")
def test_a_page_that_gave_way_while_it_was_read_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = free_address()
    prefill, _ = exchanging(give=address)
    run(prefill, prompt(0), num_tokens=1)
    decode, runner = exchanging(take=address)
    checksum = reader.checksum
    seen: list[bytes] = []

    def third_is_bad(data: memoryview) -> bytes:
        seen.append(checksum(data))
        return b"?" * 16 if len(seen) == 3 else seen[-1]

    monkeypatch.setattr(reader, "checksum", third_is_bad)
    assert run(decode, prompt(0)) == answer(prompt(0), 6)
    assert runner.num_run_tokens >= 40 - 2 * PAGE
    stats = decode.stats.offload
    assert stats is not None
    assert stats.peer is not None
    assert stats.peer.bad == 1


def test_a_read_that_fails_costs_the_restore_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taker, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr("kvant.kv.transfer.reader.RemoteMemory", LocalMemory)
    monkeypatch.setattr("kvant.kv.transfer.giver.RemoteMemory", LocalMemory)
    address = free_address()
    prefill, _ = exchanging(give=address)
    run(prefill, prompt(0), num_tokens=1)
    decode, runner = exchanging(take=address)
    monkeypatch.setattr(LocalMemory, "fails", True)
    assert run(decode, prompt(0)) == answer(prompt(0), 6)
    assert runner.num_run_tokens >= 40
    assert decode.stats.num_held_pages == 0
    monkeypatch.setattr(LocalMemory, "fails", False)
    _wait_until_met(decode)
    run(prefill, prompt(1), num_tokens=1)
    before = runner.num_run_tokens
    assert run(decode, prompt(1)) == answer(prompt(1), 6)
    assert runner.num_run_tokens - before <= PAGE + 6


@pytest.mark.skipif(not HAS_NIXL, reason="no NIXL")
@pytest.mark.parametrize(
    "when", ["before it is asked", "after it told where pages lie", "without an end"]
)
def test_a_process_that_vanishes_leaves_nothing(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taker, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(taker, "ANSWER_SECONDS", 1.0)
    address = free_address()
    other = GivingProcess(address)
    decode, runner = exchanging(take=address)
    assert run(decode, prompt(0)) == answer(prompt(0), 6)
    assert runner.num_run_tokens <= PAGE + 6, "pages of another process were read"
    if when == "before it is asked":
        other.kill()
    elif when == "without an end":
        other.stop()
    else:
        read = memory.RemoteMemory.read

        def killed(read_from: memory.RemoteMemory, *rest: object) -> None:
            other.kill()
            read(read_from, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(memory.RemoteMemory, "read", killed)
    before = runner.num_run_tokens
    assert run(decode, prompt(1)) == answer(prompt(1), 6)
    assert runner.num_run_tokens - before >= 40
    assert decode.stats.num_held_pages == 0
    assert decode.tiers is not None
    assert not decode.tiers.audit()
    other.kill()
    monkeypatch.undo()
    monkeypatch.setattr(taker, "RETRY_SECONDS", 0.2)
    again = GivingProcess(address)
    try:
        _wait_until_met(decode)
        before = runner.num_run_tokens
        assert run(decode, prompt(2)) == answer(prompt(2), 6)
        assert runner.num_run_tokens - before <= PAGE + 6
    finally:
        again.kill()


def test_an_agent_ends_where_it_is_closed_even_if_memory_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[threading.Thread] = []

    class Agent:
        def __init__(self, *given: object) -> None:
            weakref.finalize(self, lambda: ended.append(threading.current_thread()))

        def register_memory(self, *given: object) -> int:
            return 7

        def deregister_memory(self, found: int) -> None:
            assert found == 7
            raise RuntimeError("it is in use")

    library = SimpleNamespace(nixl_agent=Agent, nixl_agent_config=lambda **given: None)
    monkeypatch.setattr(memory, "require_nixl", lambda: library)
    made = memory.RemoteMemory("a")
    made.register(0, 8)
    closing = threading.Thread(target=made.close)
    closing.start()
    closing.join(10)
    assert ended == [closing]


@pytest.mark.skipif(HAS_NIXL, reason="NIXL is here")
def test_without_nixl_the_extra_is_named() -> None:
    with pytest.raises(NotServable, match=r"kvant\[transfer\]"):
        require_nixl()


def _wait_until_met(engine: Engine) -> None:
    end = time.monotonic() + 20
    assert engine.tiers is not None
    (source,) = engine.tiers._sources
    while not source.is_ready:
        time.sleep(0.05)
        assert time.monotonic() < end
