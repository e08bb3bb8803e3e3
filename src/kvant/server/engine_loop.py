"""The engine's side of the conversation: requests in, reports out. No one request can end it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import msgspec

from kvant.engine.engine import Engine
from kvant.engine.failed_steps import FailedSteps
from kvant.engine.idle_audits import IdleAudits
from kvant.engine.result import Progress
from kvant.errors import EngineFault, RequestError
from kvant.scheduling.request import FinishReason, TokenLogprobs
from kvant.server.messages import (
    Cancel,
    Drafts,
    Failure,
    FailureKind,
    Logprobs,
    Piece,
    Report,
    Stats,
    Submit,
    Times,
    ToEngine,
)
from kvant.speculative.counts import SpeculationStats

PROMPT_STEP_TOKENS = 64
"""Steps of fewer tokens are mostly decodes and say nothing of how fast prompts are computed."""

_log = logging.getLogger(__name__)


class EngineLoop:
    """Takes messages and steps an engine; whoever holds it moves the bytes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._numbers: dict[int, int] = {}  # by id
        self._asked: dict[int, _Asked] = {}  # by the engine's number
        self._failures: list[Failure] = []
        self._failed = FailedSteps(engine)
        self._queued: set[int] = set()  # of them, those that have not run yet
        self._speed = 0.0
        self._audits = IdleAudits(engine)

    @property
    def has_news(self) -> bool:
        return bool(self._failures)

    def take(self, message: ToEngine) -> None:
        """Submit or cancel. What cannot be served becomes a failure of that request alone."""
        match message:
            case Cancel():
                for id in message.ids:
                    number = self._numbers.pop(id, None)
                    if number is not None:
                        self._drop(number)
                        self.engine.cancel(number)
            case Submit():
                self._submit(message)

    def step(self) -> Report:
        """One step if there is work; what came of it, and what has failed since the last report."""
        pieces: list[Piece] = []
        if self.engine.has_work:
            self._audits.worked()
            try:
                self._step(pieces)
                self._failed.in_a_row = 0
            except Exception:
                self._failed.survive(self._asked, lambda n: self._fail(n, "engine_fault", _OURS))
        else:
            self._audits.rest()
        failures, self._failures = tuple(self._failures), []
        stats = self.engine.stats
        return Report(
            Stats(
                stats.num_running,
                stats.num_waiting,
                stats.num_held_pages,
                stats.num_idle_pages,
                stats.num_usable_pages,
                stats.num_steps,
                stats.num_computed_tokens,
                stats.num_preemptions,
                None if stats.speculation is None else _drafts(stats.speculation),
                tuple((one.layer, one.k, one.v) for one in stats.saturated),
            ),
            tuple(pieces),
            failures,
            self._speed,
            self._audits.num_audits,
            self._audits.num_audit_faults,
            self._audits.num_scale_audits,
            self._audits.num_scale_faults,
        )

    def _step(self, pieces: list[Piece]) -> None:
        before = self.engine.stats.num_computed_tokens
        started = time.monotonic()
        done = self.engine.step()
        ended = time.monotonic()
        computed = self.engine.stats.num_computed_tokens - before
        if computed >= PROMPT_STEP_TOKENS:
            speed = computed / max(ended - started, 1e-9)
            self._speed += (0.2 if self._speed else 1.0) * (speed - self._speed)
        if self._queued:
            scheduler = self.engine.scheduler
            running = (s.number for s in scheduler.sequences()[: scheduler.num_running])
            ran = self._queued.intersection((*running, *(progress.number for progress in done)))
            self._queued -= ran
            for number in ran:
                self._asked[number].started = started
        for progress in done:
            number, tokens, text, result, logprobs, prompt_logprobs = progress
            asked = self._asked.get(number)
            if asked is None:
                continue
            if not asked.first:
                asked.first = ended
            if result is None and not logprobs and prompt_logprobs is None:
                pieces.append(Piece(asked.id, text, len(tokens)))  # nearly every one
            else:
                self._take(asked, progress, pieces)

    def _submit(self, message: Submit) -> None:
        if message.id in self._numbers:
            raise EngineFault(f"request {message.id} was submitted twice")
        try:
            number = self.engine.submit(
                message.prompt_token_ids, message.sampling.params(), salt=message.salt
            )
        except RequestError as fault:
            self._failures.append(Failure(message.id, "refused", str(fault), fault.param))
            return
        except Exception:
            # One request that trips over our own bug is answered; the others go on.
            _log.exception("request %d could not be submitted", message.id)
            self._failures.append(Failure(message.id, "engine_fault", _OURS))
            return
        self._numbers[message.id] = number
        self._asked[number] = _Asked(message.id, time.monotonic())
        self._queued.add(number)

    def _take(self, asked: _Asked, progress: Progress, pieces: list[Piece]) -> None:
        result = progress.result
        if result is not None and result.error is not None:
            self._fail(progress.number, "refused", str(result.error), result.error.param)
            return
        if result is not None and result.finish_reason is FinishReason.NUMERICAL_ERROR:
            self._fail(progress.number, "numerical_error", _NUMERICAL)
            return
        prompt_logprobs = progress.prompt_logprobs
        piece = Piece(
            asked.id,
            progress.text,
            len(progress.token_ids),
            tuple(_logprobs(one) for one in progress.logprobs),
            None
            if prompt_logprobs is None
            else tuple(map(_logprobs, filter(None, prompt_logprobs))),
        )
        if result is not None:
            times = asked.times()
            self._forget(progress.number)
            piece = msgspec.structs.replace(
                piece,
                finish_reason=result.finish_reason,
                stop_reason=result.stop_reason,
                num_cached_tokens=result.num_cached_tokens,
                times=times,
            )
        pieces.append(piece)

    def _fail(self, number: int, kind: FailureKind, message: str, param: str | None = None) -> None:
        self._failures.append(Failure(self._forget(number), kind, message, param))

    def _forget(self, number: int) -> int:
        id = self._drop(number)
        del self._numbers[id]
        return id

    def _drop(self, number: int) -> int:
        self._queued.discard(number)
        return self._asked.pop(number).id


@dataclass(slots=True)
class _Asked:
    """One sequence's id, and when it came, first ran, and had its first token; 0.0 where it has not."""

    id: int
    submitted: float
    started: float = 0.0
    first: float = 0.0

    def times(self) -> Times:
        """At its end."""
        first = self.first
        return Times(self.started - self.submitted, first - self.started, time.monotonic() - first)


def _logprobs(given: TokenLogprobs) -> Logprobs:
    return Logprobs(given.token_id, given.logprob, given.rank, given.top)


_OURS = "the engine failed on this request; the server's log says more"
_NUMERICAL = "the model computed NaN or Inf for this request"


def _drafts(stats: SpeculationStats) -> Drafts:
    return Drafts(
        stats.num_drafts,
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
        stats.num_emitted_tokens,
        stats.accepted_per_position,
        stats.num_plain_steps,
        stats.pays,
    )
