"""The engine's side: a failing request does not end it, and every request gets an answer."""

from __future__ import annotations

import pytest

from kvant.engine.driver import MOST_FAILED_STEPS, Driver
from kvant.errors import EngineFault
from kvant.kv.dtype import KVDtype
from kvant.kv.saturation import Saturated
from kvant.kv.spec import Role
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.request import FinishReason
from kvant.server.engine_process import report_of, take
from kvant.server.messages import (
    Cancel,
    Failure,
    Piece,
    Report,
    Submit,
    encode,
    read_from_engine,
)
from kvant.server.metrics import saturation_metric
from tests.attention import driver
from tests.engine.fakes import VOCAB, answer, make_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def _submit(id: int, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY) -> Submit:
    return Submit(id, prompt, sampling, "")


def _step(loop: Driver[int]) -> Report:
    return report_of(loop, loop.step())


def _run(loop: Driver[int]) -> tuple[dict[int, Piece], dict[int, Failure]]:
    """The last piece or failure of every request. Fails if a request gets two ends."""
    ended: dict[int, Piece] = {}
    failed: dict[int, Failure] = {}
    while loop.has_work:
        report = _step(loop)
        for piece in report.pieces:
            assert piece.id not in ended | failed
            if piece.finish_reason is not None:
                ended[piece.id] = piece
        for failure in report.failures:
            assert failure.id not in ended | failed
            failed[failure.id] = failure
    loop.engine.audit()
    assert loop.engine.stats.num_held_pages == 0
    return ended, failed


def test_requests_are_answered_under_their_own_ids() -> None:
    engine, _ = make_engine()
    loop = Driver[int](engine)
    for id in (70, 7):
        take(loop, _submit(id, (id, 5)))
    ended, failed = _run(loop)
    assert set(ended) == {70, 7}
    assert failed == {}
    assert ended[7].finish_reason is FinishReason.LENGTH


def test_a_wrong_request_is_refused_alone_though_the_validator_let_it_pass() -> None:
    engine, _ = make_engine()
    loop = Driver[int](engine)
    take(loop, _submit(1, (5, 6)))
    wrong = {
        2: _submit(2, (VOCAB,)),
        3: _submit(3, ()),
        5: _submit(5, (5,), SamplingParams(stop=("x",))),
        6: _submit(6, (5,) * 10_000),
    }
    for message in wrong.values():
        take(loop, message)
    ended, failed = _run(loop)
    assert set(ended) == {1}
    assert set(failed) == set(wrong)
    assert {failure.kind for failure in failed.values()} == {"refused"}
    assert failed[5].param == "stop"


def test_a_step_that_fails_costs_only_the_requests_in_it() -> None:
    engine, runner = make_engine(max_num_seqs=2)
    loop = Driver[int](engine)
    for id in (1, 2, 3):
        take(loop, _submit(id, (id, 5)))
    _step(loop)
    runner.fail_at = len(runner.steps)
    ended, failed = _run(loop)
    assert {id: failure.kind for id, failure in failed.items()} == dict.fromkeys(
        (1, 2), "engine_fault"
    )
    assert set(ended) == {3}


def test_a_device_that_only_fails_ends_the_engine() -> None:
    engine, runner = make_engine()
    loop = Driver[int](engine)
    for id in range(MOST_FAILED_STEPS):
        take(loop, _submit(id, (5, 6)))
        runner.fail_at = len(runner.steps)
        if id < MOST_FAILED_STEPS - 1:
            assert [failure.id for failure in _step(loop).failures] == [id]
    with pytest.raises(EngineFault, match="steps failed"):
        _step(loop)


def test_nan_ends_its_own_request_with_numerical_error() -> None:
    engine, runner = make_engine()
    runner.poison = lambda context: context[:2] == [8, 8]
    loop = Driver[int](engine)
    take(loop, _submit(1, (8, 8)))
    take(loop, _submit(2, (8, 9)))
    ended, failed = _run(loop)
    assert failed[1].kind == "numerical_error"
    assert set(ended) == {2}


def test_cancelling_is_silent_repeatable_and_takes_unknown_ids() -> None:
    engine, _ = make_engine()
    loop = Driver[int](engine)
    for id in (1, 2):
        take(loop, _submit(id, (id, 5)))
    _step(loop)
    take(loop, Cancel((1, 99)))
    take(loop, Cancel((1,)))
    ended, failed = _run(loop)
    assert set(ended) == {2}
    assert failed == {}
    take(loop, Cancel((2,)))


def test_what_an_idle_engine_reports_is_a_heartbeat() -> None:
    engine, _ = make_engine()
    report = _step(Driver[int](engine))
    assert report.pieces == ()
    assert report.failures == ()
    assert report.stats.num_usable_pages == engine.stats.num_usable_pages


def test_the_fake_engine_answers_what_it_should() -> None:
    """The control of this file: tokens counted here are the engine's own."""
    engine, _ = make_engine()
    loop = Driver[int](engine)
    take(loop, _submit(1, (5, 6)))
    count = 0
    while engine.has_work:
        count += sum(len(piece.token_ids) for piece in _step(loop).pieces)
    assert count == len(answer((5, 6), 6)) == 6


def test_an_idle_engine_audits_its_pages_once_and_says_what_it_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = make_engine()
    loop = Driver[int](engine)
    monkeypatch.setattr("kvant.engine.driver.IDLE_SECONDS", 0.0)
    assert _step(loop).num_audits == 0, "nothing has happened"
    for wrong in (False, True):
        take(loop, _submit(1, (5, 6)))
        while loop.engine.has_work:
            _step(loop)
        if wrong:
            lost = engine.scheduler.allocator.groups[0].allocate(1)  # a page that no sequence holds
        first, second = _step(loop), _step(loop)
        assert first.num_audits == second.num_audits, "once"
    assert (first.num_audits, first.num_audit_faults) == (2, 1)
    assert second.num_scale_audits > 0, "and then looks at scales"
    assert lost is not None
    engine.scheduler.allocator.groups[0].release(lost)


def test_what_layers_could_not_hold_comes_to_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make_engine()
    layer = driver.plan([driver.layer(index=3)], KVDtype.FP8_E4M3).layers[0]
    monkeypatch.setattr(
        runner,
        "count_saturated",
        lambda: lambda: (Saturated(Role.TARGET, layer, 7, 0), Saturated(Role.DRAFT, layer, 0, 2)),
    )
    loop = Driver[int](engine)
    take(loop, _submit(1, (5, 6)))
    _run(loop)
    report = read_from_engine(encode(_step(loop)))
    assert isinstance(report, Report)
    samples = saturation_metric("m", report.stats).samples
    assert {(s.labels["layer"], s.labels["side"], s.value) for s in samples} == {
        ("3", "k", 7), ("3", "v", 0), ("draft:3", "k", 0), ("draft:3", "v", 2),
    }  # fmt: skip
    assert {s.name for s in samples} == {"kvant:kv_saturated_values_total"}
