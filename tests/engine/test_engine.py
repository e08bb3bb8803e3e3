"""The loop's promises, on a model that reads back what it stored: see `fakes`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvant.engine import engine as engine_module
from kvant.engine.engine import Engine
from kvant.engine.result import Result
from kvant.errors import EngineFault, RequestError
from kvant.execution.batch import Batch
from kvant.kv.saturation import Saturated
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.request import FinishReason
from tests.engine.fakes import EOS, VOCAB, answer, make_engine, num_computed


def greedy(max_tokens: int = 8, *, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)


def run(engine: Engine, *, audit: bool = True) -> dict[int, Result]:
    """Step until nothing is left."""
    results: dict[int, Result] = {}
    for _ in range(100_000):
        if not engine.has_work:
            return results
        for progress in engine.step():
            if progress.result is not None:
                results[progress.number] = progress.result
        if audit:
            engine.audit()
    raise AssertionError("the engine does not come to an end")


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[Result]:
    numbers = [engine.submit(prompt, params) for prompt in prompts]
    results = run(engine)
    return [results[number] for number in numbers]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(7 * seed + 3 * i * i + i) % VOCAB for i in range(length)]


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_chunk_size_makes_no_difference(chunk: int) -> None:
    engine, runner = make_engine(max_num_batched_tokens=chunk)
    prompts = [prompt_of(length, length) for length in (1, 3, 4, 5, 17, 40)]
    results = generate(engine, prompts, greedy())
    assert [list(r.token_ids) for r in results] == [answer(p, 8) for p in prompts]
    assert max(sum(lengths) for lengths in runner.steps) <= chunk
    if chunk < 40:
        assert engine.stats.num_steps > 8, "no prompt was cut into chunks"


def test_prompts_are_cut_at_multiples_of_the_stride() -> None:
    engine, runner = make_engine(
        max_num_batched_tokens=40, prompt_stride=16, num_pages=200, prefix_caching=False
    )
    prompts = [prompt_of(length, length) for length in (70, 9, 65, 40, 3)]
    results = generate(engine, prompts, greedy(2))
    assert [list(r.token_ids) for r in results] == [answer(p, 2) for p in prompts]
    # First 32 of 70 tokens, then the other 38; beside its answer the next prompt's 9, and 16 of 65.
    assert runner.steps[:3] == [[32], [38], [1, 9, 16]]


def test_a_request_without_room_in_the_step_holds_no_pages() -> None:
    engine, runner = make_engine(max_num_batched_tokens=40, prompt_stride=16, num_pages=200)
    for length in (38, 9):
        engine.submit(prompt_of(length, length), greedy(2))
    engine.step()
    assert runner.steps == [[38]]
    assert engine.stats.num_running == 1
    run(engine)


def test_a_stride_larger_than_a_step_delays_no_request() -> None:
    engine, runner = make_engine(max_num_batched_tokens=8, prompt_stride=16, num_pages=200)
    prompts = [prompt_of(50, 1), prompt_of(33, 2)]
    results = generate(engine, prompts, greedy(4))
    assert [list(r.token_ids) for r in results] == [answer(p, 4) for p in prompts]
    assert max(map(sum, runner.steps)) == 8


def test_one_step_mixes_answers_with_pieces_of_prompts() -> None:
    engine, runner = make_engine(max_num_batched_tokens=8)
    generate(engine, [prompt_of(3), prompt_of(60, 1)], greedy(12))
    assert any(1 in lengths and max(lengths) > 1 for lengths in runner.steps)


def test_a_long_prompt_does_not_hold_up_those_who_are_answering() -> None:
    engine, _ = make_engine(max_num_batched_tokens=8, num_pages=200)
    short = engine.submit(prompt_of(3), greedy(30))
    engine.step()
    engine.submit(prompt_of(300, 1), greedy(2))
    for _ in range(20):
        assert short in {p.number for p in engine.step()}, "a step went by without a token"
    run(engine)


def test_under_constant_preemption_every_request_ends_with_the_same_answer() -> None:
    prompts = [prompt_of(5 + i % 9, i) for i in range(34)]
    engine, _ = make_engine(num_pages=33, page_size=4, max_num_seqs=34, max_num_batched_tokens=64)
    results = generate(engine, prompts, greedy(30))
    assert engine.stats.num_preemptions >= 1
    assert max(r.num_preemptions for r in results) >= 1
    assert [list(r.token_ids) for r in results] == [answer(p, 30) for p in prompts]


def test_no_request_is_admitted_into_the_page_that_a_running_one_needs_next() -> None:
    engine, _ = make_engine(num_pages=5)  # four pages of four tokens
    first = engine.submit(prompt_of(7), greedy(5))
    engine.step()  # holds two pages; the token after next needs a third
    second = engine.submit(prompt_of(5, 1), greedy(2))
    engine.step()
    assert (engine.stats.num_running, engine.stats.num_waiting) == (1, 1)
    results = run(engine)
    assert engine.stats.num_preemptions == 0
    assert list(results[first].token_ids) == answer(prompt_of(7), 5)
    assert list(results[second].token_ids) == answer(prompt_of(5, 1), 2)


def test_the_oldest_request_is_never_preempted() -> None:
    engine, _ = make_engine(num_pages=13, max_num_seqs=8)
    results = generate(engine, [prompt_of(4, i) for i in range(8)], greedy(30))
    assert engine.stats.num_preemptions >= 1
    assert results[0].num_preemptions == 0


@pytest.mark.parametrize("offset", range(-6, 7))
def test_a_prefix_hit_at_any_offset_from_a_pages_edge_changes_nothing(offset: int) -> None:
    shared = prompt_of(16)
    prompt = [*shared[: 16 + min(offset, 0)], *prompt_of(max(offset, 0) + 3, 9)]
    engine, _ = make_engine()
    generate(engine, [shared], greedy(1))
    warm = generate(engine, [prompt], greedy())[0]
    assert list(warm.token_ids) == answer(prompt, 8)
    common = next((i for i, (a, b) in enumerate(zip(shared, prompt, strict=False)) if a != b), 16)
    assert warm.num_cached_tokens == common // 4 * 4
    assert warm.num_cached_tokens > 0


def test_a_repeated_prompt_computes_only_what_its_last_token_needs() -> None:
    engine, runner = make_engine()
    cold = generate(engine, [prompt_of(16)], greedy(1))[0]
    before = runner.num_run_tokens
    warm = generate(engine, [prompt_of(16)], greedy(1))[0]
    assert warm.token_ids == cold.token_ids
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 12)
    assert runner.num_run_tokens - before == 4


def test_answers_too_are_found_by_the_next_turn() -> None:
    engine, _ = make_engine()
    first = generate(engine, [prompt_of(6)], greedy(11))[0]
    follow_up = [*prompt_of(6), *first.token_ids, 5, 6]
    second = generate(engine, [follow_up], greedy())[0]
    assert second.num_cached_tokens == 16
    assert list(second.token_ids) == answer(follow_up, 8)


def test_while_one_answers_others_find_its_prompt_and_afterwards_its_answer() -> None:
    engine, _ = make_engine()
    talk = [*prompt_of(8), *answer(prompt_of(8), 12), 5]
    first = engine.submit(prompt_of(8), greedy(20))
    for _ in range(14):
        engine.step()
    second = engine.submit(talk, greedy(1))
    results = run(engine)
    third = generate(engine, [talk], greedy(1))[0]
    assert list(results[first].token_ids) == answer(prompt_of(8), 20)
    assert (results[second].num_cached_tokens, third.num_cached_tokens) == (8, 20)
    assert list(results[second].token_ids) == list(third.token_ids) == answer(talk, 1)


def test_a_preempted_request_finds_the_pages_of_its_answer_again() -> None:
    engine, runner = make_engine(num_pages=14)
    prompts = [prompt_of(4), prompt_of(4, 1)]
    older, younger = (engine.submit(prompt, greedy(40)) for prompt in prompts)
    while not engine.stats.num_preemptions:
        engine.step()
    (waiting,) = [s for s in engine.scheduler.sequences() if s.number == younger]
    known, begun = waiting.num_tokens, len(runner.steps)
    assert waiting.row == -1
    assert known >= 20
    results = run(engine)
    assert max(map(max, runner.steps[begun:])) <= known - 8, "its answer was computed again"
    assert engine.stats.num_preemptions == 1
    for number, prompt in zip((older, younger), prompts, strict=True):
        assert list(results[number].token_ids) == answer(prompt, 40)


def test_a_request_preempted_within_its_prompt_leaves_no_findable_page() -> None:
    """No token has followed yet, so its pages may hold NaN."""
    engine, _ = make_engine(num_pages=8, max_num_batched_tokens=2)
    older = engine.submit(prompt_of(4), greedy(20))
    while engine.scheduler.sequences()[0].num_output_tokens == 0:
        engine.step()
    younger = engine.submit(prompt_of(16, 1), greedy(4))
    computed = 0
    while not engine.stats.num_preemptions:
        computed = num_computed(engine, engine.scheduler.sequences()[-1])
        engine.step()
    assert 8 <= computed < 16
    assert engine.stats.num_idle_pages == 0
    results = run(engine)
    assert results[younger].num_preemptions > 0
    assert list(results[older].token_ids) == answer(prompt_of(4), 20)
    assert list(results[younger].token_ids) == answer(prompt_of(16, 1), 4)


def test_a_request_beside_its_twin_shares_the_pages_that_are_ready() -> None:
    engine, _ = make_engine(max_num_batched_tokens=16)
    first = engine.submit(prompt_of(30), greedy())
    engine.step()
    engine.step()
    second = engine.submit(prompt_of(30), greedy())
    results = run(engine)
    assert results[second].num_cached_tokens == 28
    assert (
        list(results[second].token_ids)
        == list(results[first].token_ids)
        == answer(prompt_of(30), 8)
    )


def test_counts_of_saturated_values_are_read_a_step_after_they_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "SATURATION_STEPS", 4)
    engine, runner = make_engine()
    did: list[str] = []

    def count() -> Callable[[], tuple[Saturated, ...]]:
        did.append("asked")

        def read() -> tuple[Saturated, ...]:
            did.append("read")
            return ()

        return read

    monkeypatch.setattr(runner, "count_saturated", count)
    engine.submit(prompt_of(5), greedy(9))
    by_step = []
    while engine.has_work:
        engine.step()
        by_step.append(tuple(did))
        did.clear()
    asked = [place for place, one in enumerate(by_step[:-1]) if one == ("asked",)]
    assert asked, "counts are read while requests run"
    assert all(by_step[place + 1][0] == "read" for place in asked)
    assert by_step[-1][-2:] == ("asked", "read"), "the last step counts too"


def test_prefix_caching_can_be_switched_off() -> None:
    engine, _ = make_engine(prefix_caching=False)
    generate(engine, [prompt_of(16)], greedy())
    again = generate(engine, [prompt_of(16)], greedy())[0]
    assert again.num_cached_tokens == 0
    assert list(again.token_ids) == answer(prompt_of(16), 8)
    assert engine.stats.num_idle_pages == 0


def test_other_salts_never_share_pages() -> None:
    engine, _ = make_engine()
    for salt, expected in (("a", 0), ("b", 0), ("a", 12), ("", 0), ("b", 12)):
        number = engine.submit(prompt_of(16), greedy(), salt=salt)
        assert run(engine)[number].num_cached_tokens == expected


def test_cancelling_gives_back_every_page_at_once_and_leaves_nothing_to_find() -> None:
    engine, _ = make_engine()
    number = engine.submit(prompt_of(20), greedy(40))
    for _ in range(5):
        engine.step()
    assert engine.stats.num_held_pages > 0
    result = engine.cancel(number)
    assert result is not None
    assert result.finish_reason == "cancelled"
    assert list(result.token_ids) == answer(prompt_of(20), 40)[: len(result.token_ids)]
    assert engine.stats.num_held_pages == 0
    assert engine.cancel(number) is None, "it has ended already"
    assert generate(engine, [prompt_of(20)], greedy())[0].num_cached_tokens == 0


def test_cancelling_one_does_not_disturb_the_one_that_shares_its_pages() -> None:
    engine, _ = make_engine()
    first = engine.submit(prompt_of(20), greedy(40))
    engine.step()
    second = engine.submit(prompt_of(20), greedy(10))
    engine.step()
    engine.cancel(first)
    results = run(engine)
    assert results[second].num_cached_tokens > 0
    assert list(results[second].token_ids) == answer(prompt_of(20), 10)


def test_a_waiting_request_can_be_cancelled() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    first = engine.submit(prompt_of(5), greedy())
    second = engine.submit(prompt_of(5, 1), greedy())
    engine.step()
    assert engine.cancel(second) is not None
    assert set(run(engine)) == {first}


def test_nan_ends_its_own_request_alone_and_poisons_no_cache() -> None:
    engine, runner = make_engine()
    bad, good = prompt_of(20, 1), prompt_of(20, 2)
    generate(engine, [bad], greedy(2))  # its prompt is in the cache
    runner.poison = lambda context: context[:20] == bad and len(context) >= 22
    number, other = engine.submit(bad, greedy()), engine.submit(good, greedy())
    results = run(engine)
    assert results[number].finish_reason == "numerical_error"
    assert results[number].num_cached_tokens > 0
    assert list(results[number].token_ids) == answer(bad, 2)
    assert list(results[other].token_ids) == answer(good, 8)
    runner.poison = lambda context: False
    retry, third = (generate(engine, [bad], greedy())[0] for _ in range(2))
    assert retry.num_cached_tokens == 0, "a page of the faulty request was found"
    assert third.num_cached_tokens > 0
    assert list(retry.token_ids) == list(third.token_ids) == answer(bad, 8)


def test_a_failing_forward_ends_its_requests_and_the_engine_goes_on() -> None:
    engine, runner = make_engine(max_num_seqs=2)
    for i in range(3):
        engine.submit(prompt_of(9, i), greedy())
    runner.fail_at = 2
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(engine)
    engine.audit()
    assert engine.stats.num_held_pages == 0
    assert engine.stats.num_waiting == 1, "who was not in the step keeps its place"
    assert list(run(engine)[2].token_ids) == answer(prompt_of(9, 2), 8)


def test_eos_ends_an_answer_and_is_its_last_token() -> None:
    prompt = next(p for i in range(500) if EOS in answer(p := prompt_of(4, i), 30)[2:-2])
    whole = answer(prompt, 30)
    engine, _ = make_engine()
    ended = generate(engine, [prompt], greedy(30, ignore_eos=False))[0]
    assert list(ended.token_ids) == whole[: whole.index(EOS) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    ignored = generate(engine, [prompt], greedy(30))[0]
    assert list(ignored.token_ids) == whole
    assert ignored.finish_reason == FinishReason.LENGTH


def test_a_stop_token_ends_an_answer_but_not_before_min_tokens() -> None:
    whole = answer(prompt_of(6), 12)
    stop = whole[4]
    assert stop not in whole[:4]
    engine, _ = make_engine()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    result = generate(engine, [prompt_of(6)], params)[0]
    assert list(result.token_ids) == whole[:5]
    assert result.stop_reason == stop
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop], min_tokens=9
    )
    result = generate(engine, [prompt_of(6)], params)[0]
    assert len(result.token_ids) >= 10
    assert stop not in result.token_ids[:9]


def test_the_context_ends_an_answer_without_max_tokens() -> None:
    engine, _ = make_engine(num_pages=11, page_size=4, max_model_len=40)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    result = generate(engine, [prompt_of(7)], params)[0]
    assert list(result.token_ids) == answer(prompt_of(7), 33)
    assert result.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        (list(range(40)), "40 tokens"),
        ([5, VOCAB], f"token {VOCAB}"),
        ([-1], "token -1"),
        ([1.5], "1.5"),
        ([True], "True"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_with_the_numbers(
    prompt: list[int], words: str
) -> None:
    engine, _ = make_engine(max_model_len=40)
    with pytest.raises(RequestError, match=words) as caught:
        engine.submit(prompt, greedy())
    assert caught.value.param == "prompt"
    assert not engine.has_work


def test_a_prompt_one_token_below_the_context_is_served() -> None:
    engine, _ = make_engine(max_model_len=40)
    result = generate(engine, [prompt_of(39)], greedy())[0]
    assert list(result.token_ids) == answer(prompt_of(39), 1)


def test_leaving_a_stream_cancels_its_request() -> None:
    engine, _ = make_engine()
    stream = engine.stream(engine.submit(prompt_of(9), greedy(40)))
    assert [next(stream).token_ids for _ in range(3)] == [(t,) for t in answer(prompt_of(9), 3)]
    stream.close()
    assert not engine.has_work
    assert engine.stats.num_held_pages == 0
    assert list(stream) == []


def test_dropping_a_stream_cancels_its_request_even_before_its_first_piece() -> None:
    engine, _ = make_engine()
    stream = engine.stream(engine.submit(prompt_of(9), greedy(40)))
    assert engine.has_work
    del stream
    assert not engine.has_work
    for _ in engine.stream(engine.submit(prompt_of(9), greedy(40))):
        break
    assert not engine.has_work


def test_a_stream_collected_in_the_middle_of_a_step_harms_no_other_request() -> None:
    """One that lies in a cycle, such as a kept traceback's, ends whenever Python looks for cycles."""
    engine, runner = make_engine()
    number = engine.submit(prompt_of(9), greedy(40))
    lost = [engine.stream(number)]
    lost.append(lost)  # type: ignore[arg-type]
    other = engine.submit(prompt_of(5), greedy(6))
    run_inner = runner.run

    def collecting(batch: Batch) -> Tensor:
        gc.collect()
        return run_inner(batch)

    engine.step()
    runner.run = collecting  # type: ignore[method-assign]
    del lost
    results = run(engine)
    assert list(results[other].token_ids) == answer(prompt_of(5), 6)
    assert number not in results
    assert engine.stats.num_held_pages == 0


def test_streams_read_in_turn_and_requests_run_between_lose_nothing() -> None:
    engine, _ = make_engine()
    first = engine.stream(engine.submit(prompt_of(9), greedy(12)))
    second = engine.stream(engine.submit(prompt_of(5, 1), greedy(6)))
    pieces = [next(first), next(first)]
    assert list(generate(engine, [prompt_of(7, 2)], greedy(20))[0].token_ids)  # runs all to the end
    pieces += first
    assert [t for p in pieces for t in p.token_ids] == answer(prompt_of(9), 12)
    assert [t for p in second for t in p.token_ids] == answer(prompt_of(5, 1), 6)


def test_a_stream_whose_request_is_cancelled_elsewhere_ends_with_that_result() -> None:
    engine, _ = make_engine()
    number = engine.submit(prompt_of(9), greedy(12))
    stream = engine.stream(number)
    next(stream)
    engine.cancel(number)
    (last,) = stream
    assert last.result is not None
    assert last.result.finish_reason == "cancelled"


def test_a_fault_of_the_device_reaches_the_reader_of_a_stream() -> None:
    engine, runner = make_engine()
    stream = engine.stream(engine.submit(prompt_of(9), greedy(12)))
    runner.fail_at = 2
    with pytest.raises(RuntimeError, match="the device is gone"):
        list(stream)
    assert not engine.has_work
    assert list(stream) == []


def test_a_broken_ownership_is_found_by_the_audit() -> None:
    engine, _ = make_engine()
    number = engine.submit(prompt_of(9), greedy())
    engine.step()
    engine.scheduler.table.write(0, 1, [7])
    with pytest.raises(EngineFault, match="row differs"):
        engine.audit()
    engine.cancel(number)


@st.composite
def _prompts(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that often share a beginning."""
    stems = draw(st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=14), min_size=1, max_size=2))
    ends = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)
    return [draw(st.sampled_from(stems)) + draw(ends) for _ in range(draw(st.integers(1, 9)))]


@settings(max_examples=120, deadline=None)
@given(
    prompts=_prompts(),
    page_size=st.sampled_from([1, 2, 4, 5]),
    spare_pages=st.integers(0, 12),
    max_num_seqs=st.integers(1, 9),
    budget=st.integers(1, 40),
    prefix_caching=st.booleans(),
    lengths=st.lists(st.integers(1, 12), min_size=9, max_size=9),
    cancels=st.dictionaries(st.integers(0, 8), st.integers(0, 30), max_size=4),
    arrivals=st.lists(st.integers(0, 10), min_size=9, max_size=9),
)
def test_scheduling_never_changes_an_answer_and_never_loses_a_page(
    prompts: list[list[int]],
    page_size: int,
    spare_pages: int,
    max_num_seqs: int,
    budget: int,
    prefix_caching: bool,
    lengths: list[int],
    cancels: dict[int, int],
    arrivals: list[int],
) -> None:
    longest = max(len(p) for p in prompts) + 12
    num_pages = 1 + -(-longest // page_size) + spare_pages  # the longest just fits alone
    engine, _ = make_engine(
        num_pages=num_pages,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=longest,
        prefix_caching=prefix_caching,
    )
    due = sorted(range(len(prompts)), key=lambda i: arrivals[i])
    index_of: dict[int, int] = {}
    results: dict[int, Result] = {}
    for time in range(10_000):
        while due and arrivals[due[0]] <= time:
            i = due.pop(0)
            index_of[engine.submit(prompts[i], greedy(lengths[i]))] = i
        if not due and not engine.has_work:
            break
        for progress in engine.step():
            if progress.result is not None:
                results[index_of[progress.number]] = progress.result
        for number, i in index_of.items():
            if cancels.get(i) == time and (cancelled := engine.cancel(number)):
                results[i] = cancelled
        engine.audit()
    assert set(results) == set(range(len(prompts)))
    for i, result in results.items():
        expected = answer(prompts[i], lengths[i])
        if result.finish_reason == "cancelled":
            expected = expected[: len(result.token_ids)]
        assert list(result.token_ids) == expected
        assert 0 <= result.num_cached_tokens < len(prompts[i])
    assert engine.stats.num_held_pages == 0
