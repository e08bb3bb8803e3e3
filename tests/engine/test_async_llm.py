"""`AsyncLLM`: many tasks, one batch, and pages that come back however a task ends."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from kvant import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from kvant.engine.async_llm import AsyncStream
from kvant.engine.driver import MOST_FAILED_STEPS
from kvant.engine.result import Result
from kvant.errors import ConfigError, EngineFault, KvantError, RequestError
from kvant.execution.runner import ModelRunner
from kvant.plan.config import config_of
from tests import forked
from tests.engine import tiny_chat

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
PROMPTS = [f"prompt number {i}" for i in range(12)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.build(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture
def sync(path: Path) -> LLM:
    return LLM(path, dtype="float32", kv_cache_memory="8MiB", max_num_seqs=16)


@pytest.fixture
def llm(sync: LLM) -> Iterator[AsyncLLM]:
    made = AsyncLLM.from_llm(sync)
    yield made
    made.close()
    assert made.metrics()["num_running"] == 0


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def result_of(stream: AsyncStream) -> Result:
    text, result = "", None
    async for piece in stream:
        text += piece.text
        result = piece.result
    assert result is not None
    assert text == result.text
    return result


async def back_within_a_second(llm: AsyncLLM) -> None:
    """Nothing runs or waits, and no page is held."""
    ended = time.monotonic() + 1.0
    while True:
        stats = llm.metrics()
        if not any(stats[name] for name in ("num_running", "num_waiting", "num_held_pages")):
            return
        assert time.monotonic() < ended, f"pages are not back after a second: {stats}"
        await asyncio.sleep(0.002)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not come to that")


def test_one_thread_prepares_the_engine_and_runs_its_steps(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[threading.Thread]] = {"capture": set(), "run": set()}

    def watched(name: str) -> Callable[..., Any]:
        original = getattr(ModelRunner, name)

        def call(*given: Any, **named: Any) -> Any:
            threads[name].add(threading.current_thread())
            return original(*given, **named)

        return call

    for name in threads:
        monkeypatch.setattr(ModelRunner, name, watched(name))
    for make in (
        lambda: AsyncLLM(path, kv_cache_memory="4MiB"),
        lambda: AsyncLLM.from_config(config_of(path, {"kv_cache_memory": "4MiB"})),
    ):
        llm = make()

        async def scenario(llm: AsyncLLM) -> None:
            await result_of(llm.generate("Hello", GREEDY))

        run(scenario(llm))
        llm.close()
        assert len(threads["run"]) == 1
        assert threads["capture"] == threads["run"] != {threading.current_thread()}
        for seen in threads.values():
            seen.clear()


def test_that_thread_works_on_the_gpu_that_its_maker_has_chosen(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int | None]] = []

    def work_on(gpu: int | None) -> None:
        seen.append((threading.current_thread().name, gpu))

    monkeypatch.setattr("kvant.engine.worker.chosen_gpu", lambda: threading.get_ident())
    monkeypatch.setattr("kvant.engine.worker.work_on", work_on)
    AsyncLLM(path, kv_cache_memory="4MiB").close()
    assert seen == [("kvant-engine", threading.get_ident())]


def test_a_model_that_cannot_be_loaded_is_refused_by_the_constructor(path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match="fp7"):
        AsyncLLM(path, kv_cache_dtype="fp7")
    with pytest.raises(ConfigError, match="colour"):
        AsyncLLM(path, colour="red")  # type: ignore[call-arg]
    assert threading.active_count() == before


def test_an_interruption_does_not_wait_for_the_loading(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def load(*_: Any, **__: Any) -> LLM:
        go_on.wait(30)
        return LLM.from_config(config_of(path, {"kv_cache_memory": "4MiB"}))

    def interrupted(self: Future[None], timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvant.engine.async_llm.LLM", load)
    monkeypatch.setattr("kvant.engine.worker.Future", type("F", (Future,), {"result": interrupted}))
    with pytest.raises(KeyboardInterrupt):
        AsyncLLM(path)
    (thread,) = [t for t in threading.enumerate() if t.name == "kvant-engine"]
    go_on.set()
    thread.join(30)
    assert not thread.is_alive()


def test_one_answer_is_that_of_the_plain_llm(sync: LLM) -> None:
    (expected,) = sync.generate("Hello", GREEDY)
    (chatted,) = sync.chat([{"role": "user", "content": "Hi"}], GREEDY)
    llm = AsyncLLM.from_llm(sync)

    async def scenario() -> None:
        assert (await result_of(llm.generate("Hello", GREEDY))).token_ids == expected.token_ids
        ids = expected.prompt_token_ids
        assert (await result_of(llm.generate(ids, GREEDY))).token_ids == expected.token_ids
        conversation = [{"role": "user", "content": "Hi"}]
        assert (await result_of(llm.chat(conversation, GREEDY))).token_ids == chatted.token_ids
        await back_within_a_second(llm)

    run(scenario())
    llm.close()


def test_tasks_that_ask_at_once_share_steps_and_get_their_own_answers(sync: LLM) -> None:
    expected = [r.token_ids for r in sync.generate(PROMPTS, GREEDY)]
    llm = AsyncLLM.from_llm(sync)
    before = llm.metrics()["num_steps"]

    async def scenario() -> None:
        results = await asyncio.gather(*(result_of(llm.generate(p, GREEDY)) for p in PROMPTS))
        assert [r.token_ids for r in results] == expected

    run(scenario())
    llm.close()
    # One by one they would take 24 steps each.
    assert llm.metrics()["num_steps"] - before < 12 * 24 / 2


def test_streams_run_before_they_are_read(llm: AsyncLLM) -> None:
    async def scenario() -> None:
        streams = [llm.generate(p, GREEDY) for p in PROMPTS]
        await until(lambda: llm.metrics()["num_steps"] >= 24)
        await back_within_a_second(llm)
        assert len({(await result_of(stream)).number for stream in streams}) == len(PROMPTS)

    run(scenario())


async def _read(llm: AsyncLLM, most: int) -> None:
    count = 0
    async for _ in llm.generate("Hello", LONG):
        count += 1
        if count == most:
            await asyncio.sleep(60)


@pytest.mark.parametrize("pieces", [0, 1, 2, 5, 40])
def test_a_cancelled_task_frees_its_pages_wherever_it_waits(llm: AsyncLLM, pieces: int) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(_read(llm, pieces or -1))
        await asyncio.sleep(0.01 * pieces)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await back_within_a_second(llm)
        assert (await result_of(llm.generate("Hello", GREEDY))).finish_reason == "length"

    run(scenario())


def test_cancelled_at_random_moments_among_others_nothing_is_lost(sync: LLM) -> None:
    expected = [r.token_ids for r in sync.generate(PROMPTS, GREEDY)]
    llm = AsyncLLM.from_llm(sync)
    numbers = random.Random(7)

    async def scenario() -> None:
        for _ in range(6):
            tasks = [asyncio.create_task(_read(llm, -1)) for _ in range(8)]
            good = [asyncio.create_task(result_of(llm.generate(p, GREEDY))) for p in PROMPTS]
            for task in tasks:
                await asyncio.sleep(numbers.random() * 0.01)
                task.cancel()
            assert [r.token_ids for r in await asyncio.gather(*good)] == expected
            await back_within_a_second(llm)
            assert all(task.cancelled() for task in tasks)

    run(scenario())
    llm.close()


def test_a_cancelled_task_frees_its_pages_even_if_it_keeps_the_stream(llm: AsyncLLM) -> None:
    kept: list[AsyncStream] = []

    async def reader() -> None:
        stream = llm.generate("Hello", LONG)
        kept.append(stream)
        await anext(stream)
        await asyncio.sleep(60)

    async def scenario() -> None:
        task = asyncio.create_task(reader())
        await until(lambda: llm.metrics()["num_running"] == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await back_within_a_second(llm)

    run(scenario())


async def _breaks(llm: AsyncLLM) -> None:
    async for _ in llm.generate("Hello", LONG):
        break


async def _never_reads(llm: AsyncLLM) -> None:
    stream = llm.generate("Hello", LONG)
    await until(lambda: llm.metrics()["num_running"] == 1)
    del stream


async def _closes(llm: AsyncLLM) -> None:
    stream = llm.generate("Hello", LONG)
    await anext(stream)
    await stream.aclose()
    assert [piece async for piece in stream] == []


async def _leaves(llm: AsyncLLM) -> None:
    async with llm.generate("Hello", LONG) as stream:
        async for _ in stream:
            raise ZeroDivisionError


async def _raises(llm: AsyncLLM) -> None:
    async for _ in llm.generate("Hello", LONG):
        raise ZeroDivisionError


async def _times_out(llm: AsyncLLM) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(result_of(llm.generate("Hello", LONG)), 0.02)


@pytest.mark.parametrize(
    "leave",
    [_breaks, _never_reads, _closes, _leaves, _raises, _times_out],
    ids=lambda f: f.__name__,
)
def test_a_stream_that_is_left_early_gives_its_pages_back(
    llm: AsyncLLM, leave: Callable[[AsyncLLM], Awaitable[None]]
) -> None:
    async def scenario() -> None:
        kept = None
        try:
            await leave(llm)
        except ZeroDivisionError as fault:
            kept = fault  # with its traceback, which holds every variable on the way
        await back_within_a_second(llm)
        del kept

    run(scenario())


def test_cancelling_ends_the_stream_with_what_there_is(llm: AsyncLLM) -> None:
    async def scenario() -> None:
        stream = llm.generate("Hello", LONG)
        for _ in range(3):
            await anext(stream)
        stream.cancel()
        result = await result_of_rest(stream)
        assert result.finish_reason == "cancelled"
        assert len(result.token_ids) >= 3
        at_once = llm.generate("Hello", LONG)
        at_once.cancel()
        assert (await result_of_rest(at_once)).finish_reason == "cancelled"
        stream.cancel()  # long ended
        await back_within_a_second(llm)

    run(scenario())


def test_without_a_running_loop_generating_is_an_error_and_nothing_else(llm: AsyncLLM) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        llm.generate("nobody could read it")
    gc.collect()  # pytest fails a test in which an object could not be finalised


async def result_of_rest(stream: AsyncStream) -> Result:
    *_, last = [piece async for piece in stream]
    assert last.result is not None
    return last.result


def test_a_wrong_request_is_told_to_its_reader_alone(llm: AsyncLLM) -> None:
    async def scenario() -> None:
        good = asyncio.create_task(result_of(llm.generate("Hello", GREEDY)))
        for wrong in ([10**6], [], "x" * 5000, "\ud800"):
            with pytest.raises(RequestError):
                await result_of(llm.generate(wrong, GREEDY))
        assert (await good).finish_reason == "length"
        await back_within_a_second(llm)

    run(scenario())


def test_a_form_that_cannot_be_is_an_error_of_its_own_request(llm: AsyncLLM) -> None:
    async def scenario() -> None:
        good = asyncio.create_task(result_of(llm.generate("Hello", GREEDY)))
        for wrong in (
            SamplingParams(structured_outputs=StructuredOutputs(regex="(((")),
            SamplingParams(n=2),
        ):
            with pytest.raises(RequestError):
                await result_of(llm.generate("Hello", wrong))
        assert (await good).finish_reason == "length"
        form = SamplingParams(structured_outputs=StructuredOutputs(choice=["yes", "no"]))
        assert (await result_of(llm.generate("Hello", form))).text in ("yes", "no")
        await back_within_a_second(llm)

    run(scenario())


def test_a_step_that_fails_costs_those_who_took_part_an_error_and_nothing_else(
    llm: AsyncLLM, sync: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        def broken(batch: object) -> None:
            raise RuntimeError("the device is gone")

        with monkeypatch.context() as patch:
            patch.setattr(sync.engine.runner, "run", broken)
            for _ in range(MOST_FAILED_STEPS - 1):
                with pytest.raises(EngineFault):
                    await result_of(llm.generate("Hello", GREEDY))
        await back_within_a_second(llm)
        assert (await result_of(llm.generate("Hello", GREEDY))).finish_reason == "length"

    run(scenario())


@pytest.mark.parametrize("broken", ["step", "audit"])
def test_an_engine_that_is_broken_ends_every_request(
    sync: LLM, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    llm = AsyncLLM.from_llm(sync)

    def fail(*_: object) -> None:
        raise EngineFault("pages are not as they should be")

    async def scenario() -> None:
        other = llm.generate("waits", LONG)
        await anext(other)
        if broken == "audit":
            monkeypatch.setattr(sync.engine.runner, "run", fail)
            monkeypatch.setattr(sync.engine, "audit", fail)
        else:
            monkeypatch.setattr(sync.engine.scheduler, "schedule", fail)
        for stream in (other, llm.generate("comes now", GREEDY)):
            with pytest.raises(KvantError, match=r"failed|has ended|is closed"):
                await result_of_rest(stream)

    run(scenario())
    llm.close()


def test_a_device_that_only_fails_ends_the_engine_as_it_does_behind_a_server(
    sync: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = AsyncLLM.from_llm(sync)

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    async def scenario() -> None:
        monkeypatch.setattr(sync.engine.runner, "run", fail)
        for _ in range(MOST_FAILED_STEPS):
            assert llm._worker._thread.is_alive()
            with pytest.raises(EngineFault, match="ran this request"):
                await result_of(llm.generate("Hello", GREEDY))
        await asyncio.to_thread(llm._worker._thread.join, 10)
        assert not llm._worker._thread.is_alive()
        with pytest.raises(RequestError, match="its engine has failed"):
            await result_of(llm.generate("Hello", GREEDY))

    run(scenario())
    llm.close()


def test_an_idle_engine_looks_after_its_pages_and_scales(
    sync: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvant.engine.driver.IDLE_SECONDS", 0.01)
    monkeypatch.setattr("kvant.engine.worker.IDLE_SECONDS", 0.01)
    llm = AsyncLLM.from_llm(sync)
    audits = llm._worker._driver

    async def scenario() -> None:
        await result_of(llm.generate("Hello", GREEDY))
        await until(lambda: audits.num_scale_audits > 2)

    run(scenario())
    llm.close()
    assert (audits.num_audits, audits.num_audit_faults, audits.num_scale_faults) == (1, 0, 0)


def test_closing_ends_everything_and_later_requests_are_refused(llm: AsyncLLM) -> None:
    async def scenario() -> None:
        readers = [asyncio.create_task(result_of_rest(llm.generate(p, LONG))) for p in PROMPTS]
        await until(lambda: llm.metrics()["num_running"] == len(PROMPTS))
        llm.close()
        assert {(await reader).finish_reason for reader in readers} == {"cancelled"}
        with pytest.raises(RequestError, match="closed"):
            await result_of(llm.generate("Hello", GREEDY))
        llm.close()

    run(scenario())


def test_several_event_loops_can_ask_one_llm(sync: LLM) -> None:
    (expected,) = sync.generate("Hello", GREEDY)
    llm = AsyncLLM.from_llm(sync)
    found: list[Result] = []

    async def scenario() -> None:
        for _ in range(3):
            found.append(await result_of(llm.generate("Hello", GREEDY)))

    threads = [threading.Thread(target=run, args=(scenario(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [result.token_ids for result in found] == [expected.token_ids] * 12
    llm.close()


def test_a_loop_that_ends_with_open_streams_leaves_nothing_running(llm: AsyncLLM) -> None:
    kept: list[AsyncStream] = []

    async def scenario() -> None:
        kept.append(llm.generate("Hello", LONG))
        await anext(kept[0])

    run(scenario())
    run(back_within_a_second(llm))


def test_a_stream_keeps_its_llm_alive_and_programs_end_without_closing(path: Path) -> None:
    code = f"""
import asyncio
from kvant import AsyncLLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
async def main():
    async for piece in AsyncLLM({str(path)!r}, kv_cache_memory="4MiB").generate("Hello", params):
        pass
    print(piece.result.finish_reason, len(piece.result.token_ids))
asyncio.run(main())
left_open = AsyncLLM({str(path)!r}, kv_cache_memory="4MiB")
"""
    done = forked.run(["-c", code])
    assert (done.returncode, done.stdout, done.stderr) == (0, "length 5\n", "")
