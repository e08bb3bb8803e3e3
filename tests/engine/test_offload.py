"""Pages leave the device's pool and come back, and no token changes."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from kvant import LLM
from kvant.engine.engine import Engine
from kvant.errors import ConfigError, DoesNotFit
from kvant.kv.events import Medium, PageLog, Removed, Stored
from kvant.kv.groups import lay_out
from kvant.kv.identity import PageIdentity
from kvant.kv.names import parse_format
from kvant.kv.offload.build import build_tiers
from kvant.kv.offload.mover import HostRows, MemoryCopier, pieces_of
from kvant.kv.offload.page_files import PageFiles
from kvant.kv.offload.policy import BreakEven
from kvant.kv.offload.tiers import Tiers
from kvant.kv.pages import SharedPages
from kvant.sampling.sampling_params import SamplingParams
from tests.engine.equality import FORMATS, Bench, llama_for_every_format
from tests.engine.fakes import RememberingRunner, answer, finish, make_engine
from tests.models import tiny

PAGE = 4
NUM_TOKENS = 6
IDENTITY = PageIdentity("w", "stored", "f", "s", "r", "l", "none", "")


def prompt(number: int, length: int = 40) -> list[int]:
    return [(7 * number + 5 * j * j + j) % 90 + 4 for j in range(length)]


def policy() -> BreakEven:
    """Restores from one page on: what these models compute takes no time."""
    return BreakEven(PAGE, latency=-1e9)


def offloading(
    num_pages: int = 32,
    host_pages: int = 400,
    directory: Path | None = None,
    budget: int = 1 << 30,
    **options: object,
) -> tuple[Engine, RememberingRunner]:
    """A fake model with tiers."""

    def tiers(shared: SharedPages, runner: RememberingRunner) -> Tiers:
        pieces = [[runner.stored.view(torch.uint8).view(num_pages, -1)]]
        files = None if directory is None else PageFiles(directory, IDENTITY, budget)
        return build_tiers(shared, pieces, host_pages * 8 * PAGE, files=files, policy=policy())

    return make_engine(num_pages=num_pages, page_size=PAGE, offload=tiers, **options)  # type: ignore[arg-type]


def settle(engine: Engine) -> None:
    """Until no page is on its way."""
    end = time.monotonic() + 20
    while engine.is_moving:
        engine.move(0.01)
        assert time.monotonic() < end
    engine.audit()


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    salt: str = "",
    num_tokens: int = NUM_TOKENS,
) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    numbers = [engine.submit(p, params, salt=salt) for p in prompts]
    results = finish(engine, engine.audit)
    settle(engine)
    return [results[n].token_ids for n in numbers]


def counts(engine: Engine) -> tuple[int, int]:
    """Restores, and tokens whose K and V came back."""
    stats = engine.stats.offload
    assert stats is not None
    return stats.num_restores, stats.num_restored_tokens


def test_evicted_pages_come_back_and_only_last_pages_are_computed() -> None:
    engine, runner = offloading()
    prompts = [prompt(i) for i in range(8)]
    expected = [tuple(answer(p, NUM_TOKENS)) for p in prompts]
    for p, tokens in zip(prompts, expected, strict=True):
        assert run(engine, [p]) == [tokens]
    before = runner.num_run_tokens
    for p, tokens in zip(prompts, expected, strict=True):
        assert run(engine, [p]) == [tokens]
    assert runner.num_run_tokens - before <= len(prompts) * (PAGE + NUM_TOKENS)
    assert counts(engine)[0] > 0


def test_without_room_in_host_memory_pages_are_computed_again() -> None:
    engine, _ = offloading(host_pages=4)
    for _ in range(2):
        for i in range(8):
            assert run(engine, [prompt(i)]) == [tuple(answer(prompt(i), NUM_TOKENS))]
    stats = engine.stats.offload
    assert stats is not None
    assert stats.host.num_pages <= 4
    assert stats.host.evicted > 0


def test_under_pressure_of_many_requests_no_token_changes() -> None:
    engine, _ = offloading(num_pages=24, max_model_len=60)
    prompts = [prompt(i % 5, 20 + 3 * (i % 4)) for i in range(40)]
    for _ in range(3):
        assert run(engine, prompts) == [tuple(answer(p, NUM_TOKENS)) for p in prompts]
    assert counts(engine)[0] > 0


def test_salted_pages_are_found_by_their_salt_alone() -> None:
    engine, runner = offloading()
    for salt in ("a", "b"):
        for i in range(8):
            run(engine, [prompt(i)], salt=salt)
    restored = counts(engine)[1]
    run(engine, [prompt(0)], salt="c")
    assert counts(engine)[1] == restored
    before = runner.num_run_tokens
    assert run(engine, [prompt(0)], salt="a") == [tuple(answer(prompt(0), NUM_TOKENS))]
    assert runner.num_run_tokens - before <= PAGE + NUM_TOKENS
    assert counts(engine)[1] > restored


def test_a_request_that_is_cancelled_while_its_pages_come_back_leaves_nothing() -> None:
    engine, _ = offloading()
    for i in range(8):
        run(engine, [prompt(i)])
    number = engine.submit(prompt(0), SamplingParams(temperature=0, max_tokens=4))
    engine.step()
    engine.cancel(number)
    assert engine.stats.num_held_pages == 0
    engine.audit()
    assert run(engine, [prompt(0)]) == [tuple(answer(prompt(0), NUM_TOKENS))]


def test_pages_that_are_not_what_was_stored_are_computed_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, runner = offloading()
    for i in range(8):
        run(engine, [prompt(i)])
    assert engine.tiers is not None
    host, mover = engine.tiers._host, engine.tiers._mover
    for _, page in host.groups[0].known():
        mover.row(0, page)[5] ^= 1
    for i in range(8):
        assert run(engine, [prompt(i)]) == [tuple(answer(prompt(i), NUM_TOKENS))]
    stats = engine.stats.offload
    assert stats is not None
    assert stats.host.bad > 0
    assert stats.num_restored_tokens == 0
    assert len([r for r in caplog.records if "computed again" in r.message]) == 1
    del runner


def test_numerical_errors_and_faults_of_memory_empty_the_tiers() -> None:
    engine, runner = offloading()
    for i in range(8):
        run(engine, [prompt(i)])
    runner.poison = lambda context: context[:3] == prompt(0)[:3]
    run(engine, [prompt(0)])
    runner.poison = lambda context: False
    restored = counts(engine)[1]
    assert run(engine, [prompt(0)]) == [tuple(answer(prompt(0), NUM_TOKENS))]
    assert counts(engine)[1] == restored, "what a NaN may have come from"
    assert engine.tiers is not None
    engine.tiers.forget_all()
    settle(engine)
    stats = engine.stats.offload
    assert stats is not None
    assert stats.host.num_pages == 0


def test_indexers_learn_what_host_memory_holds() -> None:
    engine, _ = offloading(host_pages=30)
    log = PageLog()
    engine.tell(log)
    for i in range(8):
        run(engine, [prompt(i)])
    run(engine, [prompt(9)], salt="secret")
    run(engine, [prompt(0)])
    events = log.take()
    assert engine.tiers is not None
    for medium, shared in (
        (Medium.DEVICE, engine.scheduler.allocator),
        (Medium.HOST, engine.tiers._host),
    ):
        held: set[bytes] = set()
        for event in events:
            if isinstance(event, Stored) and event.medium is medium:
                assert event.digest not in held
                held.add(event.digest)
            elif isinstance(event, Removed) and event.medium is medium:
                held.remove(event.digest)
        found = {digest for digest, _ in shared.groups[0].known()}
        assert held <= found
        assert len(found - held) in ((40 + NUM_TOKENS - 1) // PAGE, 0), "salted pages are not told"


# -- files -------------------------------------------------------------------------------------


def test_files_survive_the_engine(tmp_path: Path) -> None:
    first, _ = offloading(directory=tmp_path)
    for i in range(8):
        run(first, [prompt(i)])
    del first
    engine, runner = offloading(directory=tmp_path)
    before = runner.num_run_tokens
    for i in range(8):
        assert run(engine, [prompt(i)]) == [tuple(answer(prompt(i), NUM_TOKENS))]
    assert runner.num_run_tokens - before <= 8 * (PAGE + NUM_TOKENS)
    stats = engine.stats.offload
    assert stats is not None
    assert stats.disk is not None
    assert stats.disk.restored == 8 * ((40 - 1) // PAGE)


def test_a_long_prompt_is_looked_for_in_files_once_it_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a running request, which no step holds up to hash all of it."""
    monkeypatch.setattr("kvant.scheduling.scheduler.HASHED_PAGES", 2)
    first, _ = offloading(directory=tmp_path)
    run(first, [prompt(0)])
    engine, runner = offloading(directory=tmp_path)
    settle(engine)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine.submit(prompt(5, 8), params)
    while not runner.num_run_tokens:  # its pages are looked for, too
        engine.step()
        engine.move(0.001)
    before = runner.num_run_tokens
    assert run(engine, [prompt(0)]) == [tuple(answer(prompt(0), NUM_TOKENS))]
    assert runner.num_run_tokens - before <= 60 + PAGE + NUM_TOKENS
    assert counts(engine)[0] == 1


def test_a_load_that_is_cancelled_before_its_first_copy_leaves_nothing() -> None:
    engine, _ = offloading()
    for i in range(8):
        run(engine, [prompt(i)])
    engine.submit(prompt(9, 8), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    engine.step()
    number = engine.submit(prompt(0), SamplingParams(temperature=0, max_tokens=4))
    tiers = engine.tiers
    assert tiers is not None
    while not tiers._loads:
        engine.step()
    assert not tiers._parts, "copies begin with the next step"
    engine.cancel(number)
    finish(engine, engine.audit)
    assert engine.stats.num_held_pages == 0
    engine.audit()


def test_an_engine_reads_what_another_one_writes_meanwhile(tmp_path: Path) -> None:
    """Prefill in one engine, decode in another: the files of a directory are all they share."""
    prefill, _ = offloading(directory=tmp_path)
    decode, runner = offloading(directory=tmp_path)
    settle(decode)
    assert run(prefill, [prompt(0)], num_tokens=1) == [tuple(answer(prompt(0), 1))]
    assert run(decode, [prompt(0)]) == [tuple(answer(prompt(0), NUM_TOKENS))]
    assert runner.num_run_tokens <= PAGE + NUM_TOKENS


@pytest.mark.parametrize("fault", ["cut", "flipped", "foreign", "gone", "empty"])
def test_files_that_are_not_what_was_stored_are_computed_again(tmp_path: Path, fault: str) -> None:
    first, _ = offloading(directory=tmp_path)
    run(first, [prompt(0)])
    engine, runner = offloading(directory=tmp_path)
    settle(engine)
    files = sorted(path for path in tmp_path.rglob("*.0"))
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        if fault == "cut":
            path.write_bytes(data[:-3])
        elif fault == "flipped":
            data[-3] ^= 4
            path.write_bytes(data)
        elif fault == "foreign":
            data[20] ^= 4  # of the identity
            path.write_bytes(data)
        elif fault == "empty":
            path.write_bytes(b"")
        else:
            path.unlink()
    assert run(engine, [prompt(0)]) == [tuple(answer(prompt(0), NUM_TOKENS))]
    assert runner.num_run_tokens >= 40, "everything was computed"
    stats = engine.stats.offload
    assert stats is not None
    assert stats.disk is not None
    assert stats.disk.bad == (0 if fault == "gone" else len(files[: (40 - 1) // PAGE]))


# -- real models -------------------------------------------------------------------------------

PROMPTS = [
    [(11 * i + 5 * j * j + j) % 125 + 3 for j in range(17 + (13 * i) % 37)] for i in range(7)
]


@cache
def bench_of(build: Callable[[], Path], **options: object) -> Bench:
    given = {"dtype": "float32", "page_size": PAGE, "kv_cache_memory": "4MiB", "max_model_len": 128}
    return Bench(LLM(build(), **{**given, **options}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def with_tiers(bench: Bench, **options: object) -> Engine:
    def tiers(shared: SharedPages, runner: object) -> Tiers:
        return build_tiers(shared, pieces_of(runner.pools), 1 << 19, policy=policy())  # type: ignore[attr-defined]

    return bench.engine(caching=True, offload=tiers, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def invariant(where: Path) -> LLM:
    path = llama_for_every_format(where / "llama")
    return LLM(
        path, dtype="float32", page_size=PAGE, kv_cache_memory="4MiB", max_model_len=128,
        batch_invariant=True, attention_backend="reference",
    )  # fmt: skip


FAST = ("fp8_per_token_head", "int4_per_token_head")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in FORMATS]
)
def test_restored_tokens_are_those_of_a_cold_run_in_every_format(invariant: LLM, name: str) -> None:
    bench = Bench(invariant, parse_format(name, asked_by="test"))
    expected = bench.alone(PROMPTS, NUM_TOKENS)
    engine = with_tiers(bench, num_pages=26, max_model_len=96)
    for _ in range(2):
        for p, tokens in zip(PROMPTS, expected, strict=True):
            assert run(engine, [p]) == [tokens]
    assert counts(engine)[0] > 0
    assert run(engine, PROMPTS * 2) == expected * 2


@pytest.mark.parametrize("family", ["gemma3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_windows_need_their_last_pages_alone(where: Path, family: str) -> None:
    path = tiny.build(family, where / family)
    bench = bench_of(lambda: path, dtype="float64")
    assert len(lay_out(bench.plan).groups) > 1
    expected = bench.alone(PROMPTS, NUM_TOKENS)
    engine = with_tiers(bench, num_pages=34, max_model_len=60, windows=True)
    for _ in range(2):
        for p, tokens in zip(PROMPTS, expected, strict=True):
            assert run(engine, [p]) == [tokens]
    restores, restored = counts(engine)
    assert restores > 0
    assert restored > 0
    assert run(engine, PROMPTS * 2) == expected * 2


def test_files_that_do_not_answer_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = offloading(directory=tmp_path)
    run(first, [prompt(0)])
    engine, runner = offloading(directory=tmp_path)
    settle(engine)
    hang = threading.Event()
    real = PageFiles.read

    def read(*given: object) -> bytes:
        hang.wait(20)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(PageFiles, "read", read)
    monkeypatch.setattr("kvant.kv.offload.tiers.READ_SECONDS", 0.2)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    number = engine.submit(prompt(0), params)
    results = finish(engine, engine.audit)
    assert results[number].token_ids == tuple(answer(prompt(0), NUM_TOKENS))
    assert runner.num_run_tokens >= 40
    stats = engine.stats.offload
    assert stats is not None
    assert stats.disk is not None
    assert stats.disk.late == 1
    began = time.monotonic()
    number = engine.submit(prompt(3), params)
    assert finish(engine)[number].token_ids == tuple(answer(prompt(3), NUM_TOKENS))
    assert engine.tiers is not None
    assert engine.tiers._avoided_until > began, "later requests do not wait at all"
    hang.set()
    settle(engine)


def test_a_full_disk_stops_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PageFiles, "write", full)
    engine, _ = offloading(directory=tmp_path)
    for _ in range(2):
        for i in range(8):
            assert run(engine, [prompt(i)]) == [tuple(answer(prompt(i), NUM_TOKENS))]
    stats = engine.stats.offload
    assert stats is not None
    assert stats.disk is not None
    assert stats.disk.stored == 0
    assert stats.num_restores > 0, "host memory goes on"


def test_host_memory_that_the_system_refuses_ends_with_a_way_out() -> None:
    with pytest.raises(DoesNotFit, match="cannot be allocated"):
        HostRows((1 << 20,), 1 << 30, 1 << 20, (1,), pinned=False)


def test_copies_that_find_no_memory_stop_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Host memory is exhausted while pages leave and come back; later it is not."""
    engine, _ = offloading()

    def exhausted(*given: object) -> Callable[[], None]:
        raise MemoryError

    real = MemoryCopier.store, MemoryCopier.load
    expected = [tuple(answer(prompt(i), NUM_TOKENS)) for i in range(8)]
    monkeypatch.setattr(MemoryCopier, "store", exhausted)
    assert [run(engine, [prompt(i)])[0] for i in range(8)] == expected
    stats = engine.stats.offload
    assert stats is not None
    assert (stats.host.stored, stats.host.num_pages) == (0, 0)
    assert stats.host.dropped > 0
    monkeypatch.setattr(MemoryCopier, "store", real[0])
    assert [run(engine, [prompt(i)])[0] for i in range(8)] == expected
    monkeypatch.setattr(MemoryCopier, "load", exhausted)
    engine.scheduler.allocator.forget_all()
    assert [run(engine, [prompt(i)])[0] for i in range(8)] == expected
    assert counts(engine)[1] == 0
    stats = engine.stats.offload
    assert stats is not None
    assert stats.host.bad == 0, "the pages are what was stored"
    assert stats.host.num_pages > 0
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in told] == [
        f"pages could not be copied {way} host memory (MemoryError)" for way in ("to", "from")
    ]
    monkeypatch.setattr(MemoryCopier, "load", real[1])
    for _ in range(2):
        engine.scheduler.allocator.forget_all()
        assert [run(engine, [prompt(i)])[0] for i in range(8)] == expected
    assert counts(engine)[1] > 0
    assert engine.stats.num_held_pages == 0


def test_two_engines_on_one_small_directory_agree_with_the_model(tmp_path: Path) -> None:
    engines = [
        offloading(directory=tmp_path, budget=30 * (128 + 8 * PAGE), host_pages=40)[0]
        for _ in range(2)
    ]
    for turn in range(3):
        for i in range(8):
            engine = engines[(turn + i) % 2]
            assert run(engine, [prompt(i)]) == [tuple(answer(prompt(i), NUM_TOKENS))]
    for engine in engines:
        stats = engine.stats.offload
        assert stats is not None
        assert stats.host.bad == 0
        assert stats.disk is not None
        assert stats.disk.bad == 0


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("llama", {"enable_prefix_caching": False}, "needs the prefix cache"),
        ("llama", {"kv_offload": "host:900TiB"}, "are not available"),
    ],
)
def test_what_is_not_offloaded_is_refused(
    where: Path, family: str, options: dict[str, object], reason: str
) -> None:
    path = tiny.build(family, where / f"refused-{family}")
    with pytest.raises(ConfigError, match=reason):
        LLM(path, **{"kv_offload": "host:1MiB", "kv_cache_memory": "1MiB", **options})  # type: ignore[arg-type]


def test_a_long_prompt_comes_back_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvant.kv.offload.tiers.LOAD_PAGES", 2)
    monkeypatch.setattr("kvant.kv.offload.tiers.MOST_LOADING", 2)
    engine, runner = offloading(num_pages=64)
    for i in range(12):
        run(engine, [prompt(i)])
    engine.scheduler.allocator.forget_all()
    before, (restores, restored) = runner.num_run_tokens, counts(engine)
    assert run(engine, [prompt(0)]) == [tuple(answer(prompt(0), NUM_TOKENS))]
    assert runner.num_run_tokens - before <= PAGE + NUM_TOKENS
    assert counts(engine) == (restores + 1, restored + 36)


def test_a_page_that_gives_way_during_a_restore_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvant.kv.offload.tiers.LOAD_PAGES", 2)
    monkeypatch.setattr("kvant.kv.offload.tiers.BEGUN_AT_ONCE", 1)
    engine, runner = offloading(num_pages=64)
    run(engine, [prompt(0)])
    engine.scheduler.allocator.forget_all()
    before = runner.num_run_tokens
    number = engine.submit(prompt(0), SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    engine.scheduler.schedule(0)
    host = engine.tiers._host.groups[0]  # type: ignore[union-attr]
    digest = engine.scheduler.sequences()[0].prefix_hashes[5]
    host.forget(host.match((digest,)))
    assert finish(engine, engine.audit)[number].token_ids == tuple(answer(prompt(0), NUM_TOKENS))
    computed = runner.num_run_tokens - before
    assert PAGE + NUM_TOKENS < computed <= len(prompt(0)) - 4 * PAGE + NUM_TOKENS
    settle(engine)


def test_a_long_prompt_is_hashed_in_parts_beside_running_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvant.scheduling.scheduler.HASHED_PAGES", 2)
    engine, _ = offloading(num_pages=64)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine.submit(prompt(1, 5), params)
    engine.step()
    engine.submit(prompt(0), params)
    waiting = engine.scheduler.sequences()[-1]
    lengths = []
    while not waiting.held:
        engine.step()
        lengths.append(len(waiting.prefix_hashes) - 1)
    assert lengths[:4] == [2, 4, 6, 8]
    finish(engine, engine.audit)


def test_a_long_sequence_gives_its_pages_back_beside_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvant.scheduling.row_table.MOST_AT_ONCE", 4)
    engine, _ = offloading(num_pages=64)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    engine.submit(prompt(1, 8), params)
    engine.step()
    long = engine.submit(prompt(0), SamplingParams(temperature=0, max_tokens=1))
    while long in engine.numbers:
        engine.step()
        engine.audit()
    assert engine.stats.num_held_pages > 40 // PAGE, "they wait for the next step"
    engine.step()
    engine.audit()
    assert engine.stats.num_held_pages <= 5
    finish(engine, engine.audit)
    assert engine.stats.num_held_pages == 0
    long = engine.submit(prompt(2), SamplingParams(temperature=0, max_tokens=1))
    finish(engine)
    assert engine.stats.num_held_pages == 0, "without another step nothing waits"
