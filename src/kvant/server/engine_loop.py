"""The engine's side of the conversation: requests in, reports out. No one request can end it."""

from __future__ import annotations

import logging

from kvant.engine.engine import Engine
from kvant.engine.request import FinishReason
from kvant.engine.result import Progress
from kvant.errors import EngineFault, RequestError
from kvant.server.messages import (
    Cancel,
    Failure,
    FailureKind,
    Logprobs,
    Piece,
    Report,
    Stats,
    Submit,
    ToEngine,
)

MOST_FAILED_STEPS = 3
"""So many failed steps in a row mean that the device is broken, not a request."""

_log = logging.getLogger(__name__)


class EngineLoop:
    """Takes messages and steps an engine; whoever holds it moves the bytes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._numbers: dict[int, int] = {}  # by id
        self._ids: dict[int, int] = {}  # by the engine's number
        self._failures: list[Failure] = []
        self._failed_steps = 0

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
                        del self._ids[number]
                        self.engine.cancel(number)
            case Submit():
                self._submit(message)

    def step(self) -> Report:
        """One step if there is work; what came of it, and what has failed since the last report."""
        pieces: list[Piece] = []
        if self.engine.has_work:
            try:
                for progress in self.engine.step():
                    self._take(progress, pieces)
                self._failed_steps = 0
            except Exception:
                self._survive()
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
            ),
            tuple(pieces),
            failures,
        )

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
        self._ids[number] = message.id

    def _take(self, progress: Progress, pieces: list[Piece]) -> None:
        id = self._ids.get(progress.number)
        if id is None:
            return
        result = progress.result
        if result is None:
            pieces.append(Piece(id, progress.text, len(progress.token_ids)))
            return
        if result.finish_reason is FinishReason.NUMERICAL_ERROR:
            self._fail(progress.number, "numerical_error", _NUMERICAL)
            return
        self._forget(progress.number)
        logprobs = None
        if result.logprobs is not None:
            logprobs = tuple(Logprobs(p.token_id, p.logprob, p.top) for p in result.logprobs)
        pieces.append(
            Piece(
                id,
                progress.text,
                len(progress.token_ids),
                result.finish_reason,
                result.stop_reason,
                result.num_cached_tokens,
                logprobs,
            )
        )

    def _survive(self) -> None:
        """A step failed, and the engine cancelled those who took part: tell them, check, go on."""
        self._failed_steps += 1
        _log.exception("a step failed")
        left = {sequence.number for sequence in self.engine.scheduler.sequences()}
        for number in [number for number in self._ids if number not in left]:
            self._fail(number, "engine_fault", _OURS)
        self.engine.audit()
        if self._failed_steps >= MOST_FAILED_STEPS:
            raise EngineFault(f"{MOST_FAILED_STEPS} steps failed one after another")

    def _fail(self, number: int, kind: FailureKind, message: str) -> None:
        self._failures.append(Failure(self._forget(number), kind, message))

    def _forget(self, number: int) -> int:
        id = self._ids.pop(number)
        del self._numbers[id]
        return id


_OURS = "the engine failed on this request; the server's log says more"
_NUMERICAL = "the model computed NaN or Inf for this request"
