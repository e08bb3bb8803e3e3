"""Places and waiting tokens: what is allowed is allowed, one more is refused."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import pytest

from kvant.plan.settings import Settings
from kvant.sampling.sampling_params import SamplingParams
from kvant.server.api_error import ApiError
from kvant.server.config import ServerConfig
from kvant.server.metrics import Metrics
from kvant.server.requests import Generation
from kvant.server.service import QUEUE_SECONDS, Admission, Service


def _refused(call: object, *arguments: int) -> ApiError:
    with pytest.raises(ApiError) as fault:
        call(*arguments)  # type: ignore[operator]
    return fault.value


def test_the_last_place_is_given_and_no_place_beyond() -> None:
    admission = Admission()
    admission.capacity = 8
    admission.take(7)
    assert admission.full() is None
    admission.take(1)
    assert _refused(admission.take, 1).status == 429
    full = admission.full()
    assert full is not None
    assert full.status == 429
    admission.give_back(1)
    assert admission.full() is None
    admission.take(1)


def test_what_never_fits_is_no_matter_of_waiting() -> None:
    admission = Admission()
    admission.capacity = 8
    admission.take(8)
    assert _refused(admission.take, 9).status == 400


def test_tokens_may_wait_up_to_the_limit_and_not_one_more() -> None:
    admission = Admission(100)
    admission.take_tokens(60)
    assert _refused(admission.take_tokens, 41).status == 429
    admission.take_tokens(40)
    assert admission.full() is not None
    admission.give_back_tokens(1)
    assert admission.full() is None
    admission.give_back_tokens(99)
    assert admission.queued_tokens == 0


def test_a_prompt_of_any_length_is_let_in_where_none_waits() -> None:
    admission = Admission(100)
    admission.take_tokens(101)
    assert _refused(admission.take_tokens, 1).status == 429


def test_without_a_limit_ten_seconds_of_measured_work_may_wait() -> None:
    admission = Admission()
    assert admission.most_tokens == math.inf, "nothing has been measured"
    admission.tokens_per_second = 50.0
    assert admission.most_tokens == 50 * QUEUE_SECONDS
    admission.take_tokens(500)
    refused = _refused(admission.take_tokens, 1)
    assert refused.status == 429
    assert refused.retry_after == 5, "half of what waits, at that speed"


def test_retry_after_is_between_a_second_and_a_minute() -> None:
    admission = Admission(10)
    admission.take_tokens(10**9)
    for speed in (0.0, 1e-9, 1e9):
        admission.tokens_per_second = speed
        assert 1 <= (_refused(admission.take_tokens, 1).retry_after or 0) <= 60


def test_a_request_that_was_not_submitted_leaves_no_tokens_in_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service(
        ServerConfig(), Settings(), Metrics("m"), print, on_ready=print, on_loading=print
    )
    service.admission.capacity = 1
    generation = Generation(
        prompts=((1, 2, 3),), conversation=None, sampling=SamplingParams(), stream=False,
        include_usage=False, continuous_usage=False, salt="", max_tokens=None, echo=False,
        prompt_logprobs=None, special_tokens=None, token_ids=False, tokens_as_ids=False,
        request_id=None, source="prompt",
    )  # fmt: skip

    async def tokenised(*_: object) -> tuple[list[tuple[int, ...]], str]:
        return [(1, 2, 3)], ""

    def fails(*_: object) -> list[int]:
        assert service.admission.queued_tokens == 3
        raise OSError("the socket is closed")

    monkeypatch.setattr(service, "require", lambda: SimpleNamespace(pooling=None))
    monkeypatch.setattr(service, "tokenise", tokenised)
    monkeypatch.setattr(service.supervisor, "submit", fails)
    with pytest.raises(OSError, match="socket"):
        asyncio.run(service.open(generation, key=None, counted={}))
    assert (service.admission.held, service.admission.queued_tokens) == (0, 0)
